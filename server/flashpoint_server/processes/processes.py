"""Child processes: start them, wait for their end, restart them after growing pauses, and stop them.

running → lost → (pause) → running …      running → stopping → ended
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import structlog

from flashpoint_kernels import native
from flashpoint_kernels.native import switches
from flashpoint_kernels.problems import workspace
from flashpoint_server.config.settings import Settings
from flashpoint_server.processes.parent import CANNOT_WORK

log = structlog.stdlib.get_logger("flashpoint.processes")

# Seconds between the end of a process and its next start. The pause doubles at each restart, until the process has run
# for STEADY seconds.
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0
# An OpenMP thread that waits by spinning occupies the core that the other threads, or the HTTP process, need: on 2
# cores with another busy process, an operation of 1 ms took 24 ms; with sleeping threads it took 0.9 ms. While any
# thread uses torch's deterministic mode, cuBLAS refuses the calls of all threads unless its workspaces are configured.
ENGINE_VARIABLES = {"OMP_WAIT_POLICY": "passive", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
ENGINE = "flashpoint_server.engine.process"
ENGINE_SETTINGS = (
    "batch_flops", "batch_bytes", "max_queue_delay", "hang_timeout", "benchmark_slice_ms", "benchmark_keep",
    "cache_bytes", "cache_count", "cache_ttl", "saved_ttl", "verify_rate", "verify_bytes", "verify_action",
    "log_format", "log_level",
)  # fmt: skip
ENGINE_PATIENCE = 1.0  # seconds for an engine to end after SIGTERM, when no HTTP process needs its answers any more
STEADY = 30.0  # seconds of running after which a start counts as successful


class Child:
    """A process of this package, `python -P -m MODULE --parent PID ARGUMENTS`, which is restarted when it dies.

    -P keeps Python from importing the modules of the working folder in the place of others.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        inherited: Sequence[int],
        environment: Mapping[str, str] = os.environ,
        ended: Callable[[int], None] = lambda pid: None,
        started: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self._ended = ended  # called with the pid of each process that has ended
        self._started = started  # called after each start
        self._environment = dict(environment)
        self.starts = 0
        self._command = [sys.executable, "-P", "-m", module, "--parent", str(os.getpid()), *arguments]
        self._inherited = tuple(inherited)
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def keep(self) -> None:
        """Run the process, and restart it, until `stop` or until it exits with CANNOT_WORK."""
        pause = FIRST_PAUSE
        while not self._stopping:
            began = time.monotonic()
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command, pass_fds=self._inherited, env=self._environment
                )
            except Exception as error:  # for now, there is not enough memory, or the limit of processes is reached
                log.error("cannot start", process=self.name, error=str(error))
                pause = min(pause * 2, LONGEST_PAUSE)
                await asyncio.sleep(pause)
                continue
            self.starts += 1
            log.info("started", process=self.name, pid=self._process.pid, starts=self.starts)
            self._tell(self._started)
            code = await self._process.wait()
            self._tell(self._ended, self._process.pid)
            if self._stopping:
                return
            log.error("lost", process=self.name, pid=self._process.pid, exit_code=code)
            if code == CANNOT_WORK:
                return
            pause = FIRST_PAUSE if time.monotonic() - began > STEADY else min(pause * 2, LONGEST_PAUSE)
            await asyncio.sleep(pause)

    def _tell(self, call: Callable[..., None], *arguments: int) -> None:
        """Make a call whose failure must not keep the process from its next start."""
        try:
            call(*arguments)
        except Exception as error:
            log.exception("failed", process=self.name, error=type(error).__name__)

    @asynccontextmanager
    async def running(self, patience: float) -> AsyncIterator[Child]:
        """Keep the process running inside the context.

        At its end, stop the process, which has `patience` seconds to end.
        """
        keeping = asyncio.ensure_future(self.keep())
        try:
            yield self
        finally:
            await self.stop(patience)
            keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeping

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it runs."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def stop(self, patience: float) -> bool:
        """Send SIGTERM, and SIGKILL after `patience` seconds. Return whether the process ended before that."""
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return True
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), patience)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            return False
        return True


@asynccontextmanager
async def running_engines(settings: Settings, module: str = ENGINE) -> AsyncIterator[list[bytes]]:
    """Keep one engine process running for each device of `settings.device`. Yields the engines' socket addresses.

    `Engines.connect` takes the addresses. `module` is the module that the processes run; tests use one with faults.
    """
    environment = ENGINE_VARIABLES | os.environ  # the operator's values win
    environment |= {native.FLOAT32: str(settings.cpu_float32), switches.VARIABLE: ",".join(settings.kernels_off)}
    environment |= {workspace.STORE: str(settings.store_ds), workspace.BYTES: str(settings.workspace_bytes)}
    async with AsyncExitStack() as inside:
        addresses = []
        for device in await devices(settings.device):
            listener = inside.enter_context(_listener())
            arguments = ["--listener", str(listener.fileno()), "--device", device]
            for name in ENGINE_SETTINGS:
                arguments += [f"--{name.replace('_', '-')}", str(getattr(settings, name))]
            child = Child(f"engine {device}", module, arguments, [listener.fileno()], environment)
            await inside.enter_async_context(child.running(ENGINE_PATIENCE))
            addresses.append(listener.getsockname())
        yield addresses


@contextlib.contextmanager
def _listener() -> Iterator[socket.socket]:
    """Open a listening socket for an engine to inherit. It outlives the engine: clients can wait for the next one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as sock:
        sock.bind("")  # an abstract name that the kernel chooses: nothing in the file system to remove
        sock.listen(128)
        yield sock


async def devices(name: str) -> list[str]:
    """Return the devices that `name` means: itself, or for "all" every CUDA device, or the CPU if there is none."""
    if name != "all":
        return [name]
    # A separate process counts the CUDA devices, because this one must not import torch.
    count = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", "import torch; print(torch.cuda.device_count())", stdout=asyncio.subprocess.PIPE
    )
    out, _ = await count.communicate()
    return [f"cuda:{i}" for i in range(int(out))] or ["cpu"]
