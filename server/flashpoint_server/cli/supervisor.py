"""`flashpoint serve --workers N`: run N HTTP processes on one port and one engine process for each device.

The supervisor restarts processes that die. It keeps the listening sockets open, but serves no requests. After SIGTERM
or SIGINT the workers drain, then the engines stop. After SIGHUP the workers read keys and certificate again.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial

import structlog

from flashpoint_server.cli.hangup import HANGUP, NOTHING_TO_REREAD
from flashpoint_server.cli.stand_in import StandIn
from flashpoint_server.config.files import Files, Shared
from flashpoint_server.config.settings import Settings
from flashpoint_server.config.sources import as_environment
from flashpoint_server.http.loop import Loop
from flashpoint_server.ipc.counts import clear
from flashpoint_server.ipc.memory import NamedMemory
from flashpoint_server.observability import shared
from flashpoint_server.processes.processes import Child, running_engines

log = structlog.stdlib.get_logger("flashpoint.supervisor")

_WORKER_MARGIN = 15.0  # seconds beyond the shutdown timeout in which a worker must end


def run(settings: Settings, listener: socket.socket, files: Files) -> int:
    """Run until a signal arrives. Return the exit code: 1 if an engine cannot work."""
    with asyncio.Runner(loop_factory=partial(Loop, settings.header_timeout)) as runner:
        return runner.run(_run(settings, listener, files))


async def _run(settings: Settings, listener: socket.socket, files: Files) -> int:
    ended = asyncio.Event()
    loop, workers = asyncio.get_running_loop(), list[Child]()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    async with AsyncExitStack() as inside:
        handing = _Handing(files, workers)
        HANGUP.listen(lambda: loop.call_soon_threadsafe(_reload, settings, handing))
        inside.callback(HANGUP.listen, None)
        stand_in = StandIn(settings, files, listener)
        for watch in (files.watch_keys(handing.keys), files.watch_certificate(handing.certificate)):
            inside.callback(asyncio.ensure_future(watch.run()).cancel)

        def look() -> None:
            stand_in.look(needed=not any(worker.alive for worker in workers))

        addresses = await inside.enter_async_context(running_engines(settings))
        engines = ",".join(address.hex() for address in addresses)
        memory = NamedMemory()

        def forget(number: int, _: int) -> None:
            """Remove the gauges and the counts of admitted requests of a worker that has ended."""
            look()
            shared.forget(memory, number)
            clear(memory, number)

        descriptors = {"listener": listener.fileno(), "files": handing.shared.fd, "memory": memory.fd}
        fixed = [f"--{name}={descriptor}" for name, descriptor in descriptors.items()]
        workers += [
            Child(
                f"worker {n}",
                "flashpoint_server.cli.worker",
                [*fixed, f"--engines={engines}", f"--number={n}"],
                list(descriptors.values()),
                as_environment(settings),
                partial(forget, n),
                look,
            )
            for n in range(settings.workers)
        ]
        keeping = [asyncio.ensure_future(worker.keep()) for worker in workers]
        waiting = asyncio.ensure_future(ended.wait())
        # `keep` returns only if the worker has reported that it cannot work: its engine is broken.
        await asyncio.wait([waiting, *keeping], return_when=asyncio.FIRST_COMPLETED)
        broken = not waiting.done()
        waiting.cancel()
        log.info("stopping", broken=broken)
        stand_in.drain()
        patience = settings.shutdown_timeout + _WORKER_MARGIN
        await asyncio.gather(*(worker.stop(patience) for worker in workers))
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)
        await stand_in.close()
    return 1 if broken else 0


class _Handing:
    """Reads keys and certificates for the workers, which get the last good content, and SIGHUP when it changes."""

    def __init__(self, files: Files, workers: Sequence[Child]) -> None:
        self._files = files
        self._workers = workers
        self.shared = Shared(files.contents)

    def keys(self) -> None:
        self._hand("keys", self._files.refresh_keys)

    def certificate(self) -> None:
        self._hand("certificate", self._files.refresh_certificate)

    def _hand(self, what: str, refresh: Callable[[], bool]) -> None:
        before = self._files.contents
        try:
            if not refresh():
                return
            if self._files.contents == before:
                log.info(f"{what} unchanged")
                return
            self.shared.write(self._files.contents)
        except (OSError, ValueError) as error:
            log.error(f"{what} kept", error=str(error))
            return
        for worker in self._workers:
            worker.signal(signal.SIGHUP)


def _reload(settings: Settings, handing: _Handing) -> None:
    """Handle SIGHUP: read keys and certificate again."""
    if not settings.rereads:
        log.info(NOTHING_TO_REREAD)
        return
    handing.keys()
    handing.certificate()
