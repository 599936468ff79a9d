"""Run a caller's function in its own process: start it, call it, and detect a crash or a hang."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import IO, Any

import torch
from torch import Tensor

from flashpoint_kernels.judging import child

_TAIL = 1 << 12  # bytes of the function's output, from its end, that are read after a crash
_OUTPUT = 1 << 24  # largest number of bytes of the function's output that are kept
_SENDING = 10.0  # seconds after the timeout within which an answer must be complete


class EndedError(Exception):
    """The function's process ended or was ended. `kind` is the reason: `crash`, `hang` or `memory`."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class NotLoadedError(Exception):
    """The function cannot be imported, or is not a function."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        not_found = told["type"] == child.NotFoundError.__name__
        super().__init__(told["text"] if not_found else f"it cannot be imported: {told['type']}: {told['text']}")
        self.told = told


def _may_fork() -> bool:
    """Return whether this process may fork safely: one thread, no GPU, and no JAX, which warns at each fork."""
    if "jax" in sys.modules:
        return False
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/task")) == 1 and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return False


class _Spawner:
    """A process that has imported torch, and forks a process for each session (see `child`).

    Args:
        function: The function of the sessions, if they cannot import it. Needs `fork=True`.
        fork: Fork this process, which takes almost no time. Otherwise start a new process, which imports torch.
    """

    def __init__(self, function: Callable[..., Any] | None = None, *, fork: bool) -> None:
        self.control, theirs = socket.socketpair()
        if not fork:
            command = [
                sys.executable,
                "-P",
                "-c",
                "from flashpoint_kernels.judging.child import main; main()",
                str(theirs.fileno()),
            ]
            sources = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [sources, *sys.path]))}
            self.process: subprocess.Popen[bytes] | None = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL
            )
            self.pid = self.process.pid
        else:
            self.process = None
            child.import_for_gradients()
            with warnings.catch_warnings():  # Python and JAX warn of threads at a fork; the child uses none of them
                warnings.simplefilter("ignore", DeprecationWarning)
                warnings.filterwarnings("ignore", r"os\.fork", RuntimeWarning)
                self.pid = os.fork()
                if self.pid == 0:
                    try:
                        self.control.close()
                        child.spawner(theirs, function)
                    finally:
                        os._exit(0)
        theirs.close()
        self.lines: list[bytes] = []

    def line(self, timeout: float) -> dict[str, Any] | None:
        """Return the next line from the spawner; None after the timeout or if the spawner has ended."""
        self.control.settimeout(timeout)
        while not any(b"\n" in part for part in self.lines):
            try:
                part = self.control.recv(4096)
            except (TimeoutError, OSError):
                return None
            if not part:
                return None
            self.lines.append(part)
        text, _, rest = b"".join(self.lines).partition(b"\n")
        self.lines = [rest] if rest else []
        message: dict[str, Any] = json.loads(text)
        return message

    @property
    def alive(self) -> bool:
        if self.process is not None:
            return self.process.poll() is None
        return os.waitpid(self.pid, os.WNOHANG)[0] == 0

    def close(self) -> None:
        self.control.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            if self.process is not None:
                self.process.wait()
            else:
                os.waitpid(self.pid, 0)


@functools.cache
def _shared() -> list[_Spawner]:
    spawners: list[_Spawner] = []

    def close() -> None:
        for each in spawners:
            each.close()

    atexit.register(close)
    return spawners


def _spawner(module: str) -> _Spawner:
    """Return the spawner that all judgements of this process share."""
    spawners = _shared()
    if not spawners or not spawners[-1].alive:
        spawners[:] = [_Spawner(fork=module not in sys.modules and _may_fork())]
    return spawners[-1]


class Worker:
    """A function in its own process. The next call starts the process again if it has ended."""

    def __init__(self, target: str | Callable[..., Any], device: str) -> None:
        self.target, self.device = target, device
        self.local = target if callable(target) else None
        self.spawner: _Spawner | None = None
        self.connection: Connection | None = None
        self.output: IO[bytes] | None = None
        self.pid = 0
        self.starts = 0
        self.about: dict[str, Any] = {}

    def start(self, timeout: float = 120.0) -> dict[str, Any]:
        """Start a process, and return what `child.described` returns. Raises NotLoadedError and EndedError."""
        self.stop()
        self.starts += 1
        if self.local is None:
            self.spawner = _spawner(str(self.target).partition(":")[0])
        elif self.spawner is None or not self.spawner.alive:
            self.spawner = _Spawner(self.local, fork=True)
        self.output = tempfile.TemporaryFile()  # noqa: SIM115
        ours, theirs = socket.socketpair()
        request = {
            "target": self.target if self.local is None else "", "device": self.device, "path": sys.path,
            "cwd": os.getcwd(), "threads": 1,
        }  # fmt: skip
        socket.send_fds(self.spawner.control, [json.dumps(request).encode()], [theirs.fileno(), self.output.fileno()])
        theirs.close()
        self.connection = Connection(ours.detach())
        started = self.spawner.line(timeout)
        if started is None:
            raise EndedError("crash", "the process of the function did not start")
        self.pid = started["pid"]
        self.about, _ = self._answer(timeout)
        if "failed" in self.about:
            told = self.about["failed"]
            self.stop()
            raise NotLoadedError(told)
        return self.about

    def ask(self, request: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Send a call. Raises EndedError if the process has ended."""
        if self.connection is None:
            self.start()
        assert self.connection is not None
        assert self.output is not None
        if os.fstat(self.output.fileno()).st_size > _OUTPUT:
            self.output.truncate(0)
        try:
            child.send(self.connection, request, tensors)
        except OSError:
            raise self._ended() from None

    def answer(self, timeout: float) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return `facts` (see `child`) and the answers to the call that `ask` sent.

        Raises EndedError after a crash or a timeout.
        """
        return self._answer(timeout)

    def _answer(self, timeout: float) -> tuple[dict[str, Any], dict[str, Tensor]]:
        assert self.connection is not None
        late = threading.Timer(timeout + _SENDING, self._kill)  # the process may begin an answer and never end it
        late.daemon = True
        try:
            if not self.connection.poll(timeout):
                self.stop()
                raise EndedError("hang", f"it did not return within {timeout:.0f} s")
            late.start()
            return child.receive(self.connection)
        except EndedError:
            raise
        except Exception:  # the function may have written anything into the connection
            raise self._ended() from None
        finally:
            late.cancel()

    def _kill(self) -> None:
        """Kill the process and its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _ended(self) -> EndedError:
        """Stop the process if it still runs, and return the reason why it ended, as an error to raise."""
        said = ""
        if self.output is not None:
            self.output.seek(-min(os.fstat(self.output.fileno()).st_size, _TAIL), os.SEEK_END)
            lines = self.output.read().decode(errors="replace").strip().splitlines()
            said = lines[-1][:300] if lines else ""
        ended = self.spawner.line(1.0) if self.spawner is not None else None
        self.stop(reported=ended is not None)
        status = None if ended is None else ended.get("status")
        if status is None:
            text, kind = "its process sent no answer, or closed or wrote into files that are not its own", "crash"
        elif status < 0:
            name = signal.Signals(-status).name
            kind = "memory" if name == "SIGKILL" else "crash"
            text = f"its process was ended by {name}" + (", probably for lack of memory" if kind == "memory" else "")
        else:
            text, kind = f"it ended its process with exit status {status}", "crash"
        return EndedError(kind, text + (f"; it printed: {said}" if said else ""))

    def stop(self, *, reported: bool = False) -> None:
        """Stop the process if it runs."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        if self.pid:
            self._kill()
            if not reported and self.spawner is not None and self.spawner.line(10.0) is None:
                self._drop_spawner()
            self.pid = 0
        if self.output is not None:
            self.output.close()
            self.output = None

    def _drop_spawner(self) -> None:
        if self.spawner is not None:
            self.spawner.close()
            if self.local is None:
                _shared().clear()
            self.spawner = None

    def close(self) -> None:
        self.stop()
        if self.local is not None and self.spawner is not None:
            self.spawner.close()
            self.spawner = None


def importable(function: Callable[..., Any]) -> str | None:
    """Return MODULE:FUNCTION if another process can import the function; None for a local one."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not module or not name or module == "__main__" or "<" in name:
        return None
    try:
        return f"{module}:{name}" if child.load(f"{module}:{name}") is function else None
    except (ImportError, child.NotFoundError):
        return None


def target_of(function: str | Callable[..., Any]) -> str | Callable[..., Any]:
    """Return the target of a Worker: a name to import, or a local function, which only a fork of this process has.

    Raises ValueError for a local function if this process uses a GPU already, which a fork cannot.
    """
    if isinstance(function, str):
        return function
    name = importable(function)
    if name is not None:
        return name
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise ValueError(
            "a function that cannot be imported needs a process that has not used the GPU yet: define it in a module"
        )
    return function
