"""Run a caller's function in its own process: start it, call it, and detect a crash or a hang.

The program of that process is `child`. Answers come as bytes, and are compared here: this process has the judge's
modules, the exact answers and the earlier ones, and a function can neither read nor trace it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import inspect
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

import torch
from torch import Tensor

from flashpoint_contract.wording.hints import meant
from flashpoint_kernels.judging import child
from flashpoint_kernels.judging.exact.answers import Answers, listed, viewed

_TAIL = 1 << 12  # bytes of the function's output, from its end, that are read after a crash
_OUTPUT = 1 << 24  # largest number of bytes of the function's output that are kept
_HEADER = 1 << 28  # largest header of a message; the function may write anything into the socket
_DUMPABLE, _SET_DUMPABLE = 3, 4  # options of prctl
_MODES = (
    "no_grad",
    "inference_mode",
    "autocast",
    "default_dtype",
    "compile",
    "stream",
    "threads",
    "num_threads",
)  # of the calls
_FURTHER = ("twice", "second", "zeroed")  # entries of a request that concern its backward
_TOLD = ("PYTEST_", "COV_", "_=")  # beginnings of variables that would tell who started a process


class EndedError(Exception):
    """The function's process ended or was ended. `kind` is the reason: `crash`, `killed`, `hang` or `memory`."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class NotLoadedError(Exception):
    """The function cannot be imported, or is not a function."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        text = f"it cannot be imported: {told['type']}: {told['text']}"
        with contextlib.suppress(ValueError, KeyError):
            if told["type"] == "LookupError":
                text = _not_found(*json.loads(told["text"]))
        super().__init__(text)
        self.told = told


def _not_found(module: str, name: str, names: list[str] | None) -> str:
    if names is None:
        return f"{module} must be a function, not {name}"
    if not module:
        return f"there is no module {name}: run it in the folder of the module"
    near = meant(name, names)
    return f"{module} has no {name}" + (f"; did you mean {near}?" if near else "")


_guards = [0, 1]  # number of judgements that run, and what the process allowed before the first
_guarding = threading.Lock()


@contextlib.contextmanager
def unreadable() -> Iterator[None]:
    """Keep other processes of this user from reading or tracing this process (Linux)."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "prctl"):
        yield
        return
    with _guarding:
        _guards[0] += 1
        if _guards[0] == 1:
            _guards[1] = libc.prctl(_DUMPABLE, 0, 0, 0, 0)
            libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    try:
        yield
    finally:
        with _guarding:
            _guards[0] -= 1
            if not _guards[0]:
                libc.prctl(_SET_DUMPABLE, _guards[1], 0, 0, 0)


class _Spawner:
    """A process that has imported torch, and forks a process for each session (see `child.processes`).

    Args:
        function: The function of the sessions, if they cannot import it: this process is forked. Otherwise a new
            interpreter runs the program, so that sessions have nothing of this process.
    """

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self.control, theirs = socket.socketpair()
        if function is None:
            environment = {n: v for n, v in os.environ.items() if not f"{n}=".startswith(_TOLD)}
            self.process: subprocess.Popen[bytes] | None = subprocess.Popen(
                [sys.executable, "-P", "-"], env=environment, stdin=subprocess.PIPE, stdout=theirs.fileno()
            )
            self.pid = self.process.pid
            self.control.sendall(json.dumps(sys.path).encode() + b"\n")
            assert self.process.stdin is not None
            with contextlib.suppress(OSError), self.process.stdin as program:
                program.write(inspect.getsource(child).encode())
        else:
            self.process = None
            child.import_for_gradients()
            with warnings.catch_warnings():  # Python and JAX warn of threads at a fork; the child uses none of them
                warnings.simplefilter("ignore", DeprecationWarning)
                warnings.filterwarnings("ignore", r"os\.fork", RuntimeWarning)
                # A fork of this thread would wait without end for the threads of OpenMP that this one has begun, and
                # that the fork does not have. A new thread has none.
                with ThreadPoolExecutor(1) as forking:
                    self.pid = forking.submit(self._fork, theirs, function).result()
        theirs.close()
        self.text = b""
        self.ended: dict[int, int] = {}  # the exit status of each session that has ended

    def _fork(self, theirs: socket.socket, function: Callable[..., Any]) -> int:
        """Fork this process to serve `theirs`, and return the pid of the fork."""
        if (pid := os.fork()) == 0:
            try:
                self.control.close()
                child.processes(theirs, function)
            finally:
                os._exit(0)
        return pid

    def message(self, timeout: float) -> dict[str, Any] | None:
        """Return the spawner's next message; None after the timeout or if the spawner has ended."""
        until = time.monotonic() + timeout
        while b"\n" not in self.text:
            self.control.settimeout(max(0.001, until - time.monotonic()))
            try:
                part = self.control.recv(4096)
            except (TimeoutError, OSError):
                return None
            if not part:
                return None
            self.text += part
        text, _, self.text = self.text.partition(b"\n")
        message: dict[str, Any] = json.loads(text)
        if "status" in message:
            self.ended[message["pid"]] = message["status"]
        return message

    def start(self, request: list[Any], files: Sequence[int], timeout: float) -> int | None:
        """Start a session, and return its pid; None if the spawner does not answer."""
        try:
            socket.send_fds(self.control, [json.dumps(request).encode()], files)
        except OSError:
            return None
        while (message := self.message(timeout)) is not None and "status" in message:
            pass
        return None if message is None else int(message["pid"])

    def status(self, pid: int, timeout: float) -> int | None:
        """Return the exit status of a session; None if it has not ended after the timeout."""
        while pid not in self.ended:
            if self.message(timeout) is None:
                return None
        return self.ended[pid]

    @property
    def alive(self) -> bool:
        if self.process is not None:
            return self.process.poll() is None
        return os.waitpid(self.pid, os.WNOHANG)[0] == 0

    def close(self) -> None:
        """End the spawner, which first ends its sessions and all that they have started."""
        self.control.close()
        until = time.monotonic() + 5.0
        with contextlib.suppress(ChildProcessError):
            while self.alive and time.monotonic() < until:
                time.sleep(0.002)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            if self.process is not None:
                self.process.wait()
            else:
                os.waitpid(self.pid, 0)


_MALLOC_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)


def trim() -> None:
    """Return the free memory of the C library's heaps to the system. Takes some milliseconds. Only glibc can."""
    if _MALLOC_TRIM is not None:
        _MALLOC_TRIM(0)


@functools.cache
def _shared() -> list[_Spawner]:
    spawners: list[_Spawner] = []

    def close() -> None:
        for each in spawners:
            each.close()

    atexit.register(close)
    return spawners


def _spawner() -> _Spawner:
    """Return the spawner that all judgements of this process share."""
    spawners = _shared()
    if not spawners or not spawners[-1].alive:
        spawners[:] = [_Spawner()]
    return spawners[-1]


class Worker:
    """A function in its own process. The next call starts the process again if it has ended."""

    def __init__(self, target: str | Callable[..., Any], device: str) -> None:
        self.target, self.device = target, device
        self.local = target if callable(target) else None
        self.spawner: _Spawner | None = None
        self.connection: socket.socket | None = None
        self.output: IO[bytes] | None = None
        self.pid = 0
        self.starts = 0
        self.about: dict[str, Any] = {}
        self.random = random.Random(0)  # draws the seeds of torch's and Python's generators in the process
        self.answers = Answers(device, [])

    def start(self, timeout: float = 120.0) -> dict[str, Any]:
        """Start a process, and return what `child.described` returns. Raises NotLoadedError and EndedError."""
        self.stop()
        self.starts += 1
        if self.local is None:
            self.spawner = _spawner()
        elif self.spawner is None or not self.spawner.alive:
            self.spawner = _Spawner(self.local)
        self.output = tempfile.TemporaryFile()  # noqa: SIM115
        self.connection, theirs = socket.socketpair()
        request = [self.target if self.local is None else "", self.device, sys.path, os.getcwd()]
        started = self.spawner.start(request, [theirs.fileno(), self.output.fileno()], timeout)
        theirs.close()
        if started is None:
            self._drop_spawner()
            raise EndedError("crash", "the process of the function did not start")
        self.pid = started
        with self._until(timeout):
            self.about = self._header()
            settings = [] if "failed" in self.about else self._header()
        if "failed" in self.about:
            told = self.about["failed"]
            self.stop()
            raise NotLoadedError(told)
        self.answers = Answers(self.device, settings)
        return self.about

    def ask(self, request: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Send a call, or several with `calls`. Raises EndedError if the process has ended.

        A request is a dict. `args` and `kwargs`: plain values, or {"tensor": name}. `leaves`: the inputs that want a
        gradient. Further entries, all optional:

        - `views`: memory forms of inputs by name, see `answers.viewed`; tensors that share memory keep sharing it.
          `reuse`: write the inputs into the memory of those of the call before.
        - `no_grad`, `inference_mode`, `autocast` and `default_dtype` (names of types), `num_threads`, `compile` (by
          torch.compile with aot_eager), `poison` (NaN in memory that is not initialised), `stream`: how it is called.
        - `dlse`: a gradient of lse is in `tensors`. `twice`: run the backward twice. `second`: names of tensors by
          gradient, {"dq": "ddq"}; differentiate once more. `zeroed`: zero the inputs between forward and backward.
        - `calls`: a list of requests, in place of one; all forwards run before the first backward. `threads`: each
          call runs in a thread of its own, all at once. The answers of call n > 0 have the prefix `n.`.
        - `times`, `within`: repeat the calls so often, and at most for so many seconds.
        """
        if self.connection is None:
            self.start()
        assert self.connection is not None
        assert self.output is not None
        if os.fstat(self.output.fileno()).st_size > _OUTPUT:
            self.output.truncate(0)
        calls = request.get("calls") or [request]
        inputs = {name: viewed(t, request.get("views", {}).get(name, "plain")) for name, t in tensors.items()}
        leaves = {name for each in calls for name in each["leaves"]}
        blocks, places = listed(inputs, leaves)
        modes = {n: request[n] for n in _MODES if request.get(n)}
        if request.get("poison"):
            modes["filled"] = True
        jobs = []
        for each in calls:
            upstream = [["o", each.get("upstream", "do")]] + ([["lse", "dlse"]] if request.get("dlse") else [])
            further = {n: each.get(n) or request[n] for n in _FURTHER if each.get(n) or request.get(n)}
            further |= {n: True for n in ("filled", "stream") if n in modes}
            jobs.append([each["args"], each["kwargs"], each["leaves"], upstream, further])
        keep = not request.get("poison") and "times" not in request
        self.answers.begin(inputs, blocks, request)
        header = [
            [len(block) for block in blocks], places, bool(request.get("reuse")), self.random.getrandbits(48), modes,
            request.get("times", 1), request.get("within", 0.0), keep, jobs,
        ]  # fmt: skip
        text = json.dumps(header).encode()
        try:
            self.connection.settimeout(60.0)
            self.connection.sendall(len(text).to_bytes(8, "little") + text)
            for block in blocks:
                self.connection.sendall(block)
        except OSError:
            raise self._ended() from None

    def answer(self, timeout: float) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return `facts` (see `answers.Answers`) and the answers to the call that `ask` sent.

        Raises EndedError after a crash or a timeout.
        """
        with self._until(timeout):
            while (header := self._header())[0] != "end":
                data = self._bytes(header[-1]) if header[0] in ("answer", "input", "earlier") else bytearray()
                self.answers.take(header, data)
            return self.answers.end(bool(header[1]))

    @contextlib.contextmanager
    def _until(self, timeout: float) -> Iterator[None]:
        """Read from the process; raise EndedError if it ends, if it takes longer, or if it sends what is no answer."""
        self.deadline = time.monotonic() + timeout
        try:
            yield
        except TimeoutError:
            self.stop()
            raise EndedError("hang", f"it did not return within {timeout:.0f} s") from None
        except Exception:  # the function may have written anything into the connection
            raise self._ended() from None

    def _header(self) -> Any:
        length = int.from_bytes(self._bytes(8), "little")
        if length > _HEADER:
            raise ValueError(length)
        return json.loads(self._bytes(length))

    def _bytes(self, count: int) -> bytearray:
        assert self.connection is not None
        data = bytearray(count)
        view = memoryview(data)
        while len(view):
            left = self.deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self.connection.settimeout(left)
            got = self.connection.recv_into(view)
            if not got:
                raise EOFError
            view = view[got:]
        return data

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
        status = self.spawner.status(self.pid, 1.0) if self.spawner is not None else None
        self.stop()
        kind = "crash"
        if status is None:
            text = "its process sent no answer, or closed or wrote into files that are not its own"
        elif status < 0:
            name = signal.Signals(-status).name
            kind = "killed" if name == "SIGKILL" else "crash"
            text = f"its process was ended by {name}" + (
                ", as the system does where memory runs out; a function may also have sent it"
                if kind == "killed"
                else ""
            )
        else:
            text = f"it ended its process with exit status {status}"
        return EndedError(kind, text + (f"; it printed: {said}" if said else ""))

    def stop(self) -> None:
        """Stop the process, and all that it has started, if it runs."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        if self.pid and self.spawner is not None:
            if self.pid not in self.spawner.ended:
                self._kill()
            if self.spawner.status(self.pid, 10.0) is None:
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
        return f"{module}:{name}" if child.found(f"{module}:{name}") is function else None
    except (ImportError, LookupError):
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
