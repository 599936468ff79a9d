"""`flashpoint serve --workers N`: N HTTP processes on one port and one engine process a device, kept running.

The supervisor holds the listening sockets and no requests. SIGTERM or SIGINT: the workers drain, then the engines stop.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import structlog
from prometheus_client.multiprocess import mark_process_dead

from flashpoint_server.counts import clear
from flashpoint_server.metrics import DIRECTORY as METRICS_DIRECTORY
from flashpoint_server.processes import Child, running_engines
from flashpoint_server.settings import Settings

log = structlog.stdlib.get_logger("flashpoint.supervisor")

_WORKER_MARGIN = 15.0  # seconds beyond the shutdown timeout that a worker may take to end


def run(settings: Settings, argv: Sequence[str], listener: socket.socket) -> int:
    """Until a signal; the exit code, 1 where an engine cannot work. `argv` are the flags that `settings` came from."""
    return asyncio.run(_run(settings, argv, listener))


async def _run(settings: Settings, argv: Sequence[str], listener: socket.socket) -> int:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with AsyncExitStack() as inside:
        addresses = await inside.enter_async_context(running_engines(settings))
        engines = ",".join(address.hex() for address in addresses)
        metrics = inside.enter_context(tempfile.TemporaryDirectory(prefix="flashpoint-metrics-"))
        limits = inside.enter_context(tempfile.TemporaryDirectory(prefix="flashpoint-limits-"))
        counts = Path(limits)

        def forget(number: int, pid: int) -> None:
            """Nothing of a worker that has ended counts any more: neither its gauges nor what it had inside."""
            mark_process_dead(pid, metrics)  # type: ignore[no-untyped-call]
            clear(counts, number)

        fixed = ["--listener", str(listener.fileno()), "--engines", engines, "--limits", limits]
        workers = [
            Child(
                f"worker {n}",
                "flashpoint_server.worker",
                [*fixed, "--number", str(n), "--", *argv],
                [listener.fileno()],
                {METRICS_DIRECTORY: metrics},
                partial(forget, n),
            )
            for n in range(settings.workers)
        ]
        if settings.rereads:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _reload, workers)
        keeping = [asyncio.ensure_future(worker.keep()) for worker in workers]
        waiting = asyncio.ensure_future(ended.wait())
        # A worker that is not kept any more has said that it cannot work: its engine is broken.
        await asyncio.wait([waiting, *keeping], return_when=asyncio.FIRST_COMPLETED)
        broken = not waiting.done()
        waiting.cancel()
        log.info("stopping", broken=broken)
        patience = settings.shutdown_timeout + _WORKER_MARGIN
        await asyncio.gather(*(worker.stop(patience) for worker in workers))
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)
    return 1 if broken else 0


def _reload(workers: Sequence[Child]) -> None:
    """Pass SIGHUP on: each worker reads keys and certificate again."""
    for worker in workers:
        worker.signal(signal.SIGHUP)
