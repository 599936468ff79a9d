"""The engine process: `python -m flashpoint_server.engine.process --listener FD --device NAME`.

It inherits a listening socket, opens the device, checks the backends against the float64 reference, and serves the HTTP
processes that connect (loop.py) until SIGTERM.

    opening → serving → stopped      opening → broken: sends the reason to the first worker, exits with CANNOT_WORK
                                     opening → ended, to be restarted: the problem may be temporary
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from flashpoint_server.engine.scheduling.waiting import Budget
from flashpoint_server.ipc.bodies import encode
from flashpoint_server.ipc.messages import Broken, Channel, ToEngine
from flashpoint_server.observability import logs
from flashpoint_server.processes.parent import (
    CANNOT_WORK,
    die_with_parent,
    keep_what_is_there,
    let_others_first,
    raise_descriptor_limit,
)

if TYPE_CHECKING:
    from flashpoint_server.engine.execution.device import ComputeDevice
    from flashpoint_server.engine.scheduling.tasks import Plugin

log = structlog.stdlib.get_logger("flashpoint.engine")


def main(start: Callable[[str], ComputeDevice] | None = None) -> int:
    """Serve until SIGTERM. Return the exit code. `start` opens the device; tests pass their own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parent", type=int, required=True, help="process id of the parent")
    parser.add_argument("--listener", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--batch-flops", type=int, required=True)
    parser.add_argument("--batch-bytes", type=int, required=True)
    parser.add_argument("--max-queue-delay", type=float, required=True)
    parser.add_argument("--hang-timeout", type=float, required=True)
    parser.add_argument("--benchmark-slice-ms", type=float, required=True)
    parser.add_argument("--benchmark-keep", type=float, required=True)
    parser.add_argument("--cache-bytes", type=int, required=True)
    parser.add_argument("--cache-count", type=int, required=True)
    parser.add_argument("--cache-ttl", type=float, required=True)
    parser.add_argument("--saved-ttl", type=float, required=True)
    parser.add_argument("--verify-rate", type=float, required=True)
    parser.add_argument("--verify-bytes", type=int, required=True)
    parser.add_argument("--verify-action", required=True)
    parser.add_argument("--log-format", required=True)
    parser.add_argument("--log-level", required=True)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    raise_descriptor_limit()
    logs.configure(arguments.log_format, arguments.log_level)
    from flashpoint_server.engine import self_test  # imported after the setup above: torch takes seconds to import
    from flashpoint_server.engine.benchmarks.jobs import BenchmarkJobs
    from flashpoint_server.engine.caches.store import CacheStore
    from flashpoint_server.engine.execution.cuda import DeviceMissingError
    from flashpoint_server.engine.execution.executor import Executor
    from flashpoint_server.engine.loop import EngineLoop, Waker
    from flashpoint_server.engine.scheduling.scheduler import Scheduler
    from flashpoint_server.engine.state.ledger import Ledger
    from flashpoint_server.engine.state.saved import SavedStore

    listener = socket.socket(fileno=arguments.listener)
    try:
        device = (start or self_test.start)(arguments.device)
    except Exception as error:
        if self_test.may_pass(error):
            log.exception("cannot start", device=arguments.device)
            return 1
        missing = isinstance(error, DeviceMissingError)  # a setting is wrong: a traceback would not help
        log.error("broken", device=arguments.device, exc_info=not missing, **({"error": str(error)} if missing else {}))
        sock, _ = listener.accept()
        reason = str(error) if missing else f"{type(error).__name__}: {error}"
        Channel(sock, ToEngine).send(encode(Broken(reason)))
        return CANNOT_WORK
    budget = Budget(arguments.batch_flops, arguments.batch_bytes, arguments.max_queue_delay)
    waker = Waker()
    device.ledger = ledger = Ledger(arguments.cache_bytes, most=arguments.cache_count)
    device.caches = CacheStore(ledger, arguments.cache_ttl, device.info.name, paged="triton" in device.info.backends)
    device.saved = SavedStore(ledger, arguments.saved_ttl)
    plugins: list[Plugin] = []
    answered = None
    if arguments.verify_rate:
        from flashpoint_server.engine.verifying.verifier import Verifier  # takes 0.1 s to import

        verifier = Verifier(device, arguments.verify_rate, arguments.verify_bytes, arguments.verify_action)
        plugins, answered = [verifier], verifier.answered
    executor = Executor(device, budget, arguments.hang_timeout, answered)
    benchmarks = BenchmarkJobs(device.info.name, arguments.benchmark_slice_ms, arguments.benchmark_keep)
    scheduler = Scheduler(device, budget, executor.answer, waker.wake, [benchmarks, *plugins], ledger)
    loop = EngineLoop(listener, waker, scheduler, executor)
    keep_what_is_there()
    if device.shares_cores:
        let_others_first()  # leave the cores to the HTTP processes when they need them
    about = device.info
    if about.no_kernels:
        log.warning("the backend cpu is not available", reason=about.no_kernels)
    if about.no_gpu:
        log.warning("no GPU", reason=about.no_gpu)
    if arguments.cache_bytes > about.memory:
        log.warning(
            "--cache-bytes is more than the memory", cache_bytes=arguments.cache_bytes, memory=about.memory,
            device=about.name, advice="set --cache-bytes to what the caches may use of it",
        )  # fmt: skip
    loop.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
