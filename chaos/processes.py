"""Faults that kill, stop or restart processes. A fault returns a description of its effect, or None without effect."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from chaos.service import START
from chaos.world import World

NOT_READY = 60.0  # timeout in seconds for /health/ready to report that an engine is gone or stopped
STOPPED = (0.1, 1.5)  # range of seconds that a process is stopped


def kill_engine(world: World) -> str | None:
    """Kill the engine: /health/ready must report not ready before the next engine is ready."""
    pids = world.pids("engine")
    if not pids or not world.service.ready():
        return None
    os.kill(pids[0], signal.SIGKILL)
    took = world.until(lambda: not world.service.ready(), NOT_READY, "ready without an engine")
    return f"not ready after {took:.2f} s" if took is not None else "ready all the time"


def stop_engine(world: World) -> str | None:
    return _pause(world, "engine")


def stop_http(world: World) -> str | None:
    return _pause(world, "http")


def stop_codec(world: World) -> str | None:
    return _pause(world, "codec")


def stop_supervisor(world: World) -> str | None:
    return _pause(world, "main") if world.service.workers > 1 else None


def kill_codec(world: World) -> str | None:
    pids = world.pids("codec")
    if not pids:
        return None
    os.kill(world.choose(pids), signal.SIGKILL)
    return "killed"


def kill_http(world: World) -> str | None:
    """Kill one of several HTTP processes: a new one replaces it, and the others answer meanwhile."""
    pids = world.pids("http")
    if world.service.workers == 1 or not pids:
        return None
    with world.breaking():
        os.kill(world.choose(pids), signal.SIGKILL)
    return "killed"


def kill_every_http(world: World) -> str | None:
    """Kill all of several HTTP processes: the supervisor answers 503 until one is there again."""
    pids = world.pids("http")
    if world.service.workers == 1 or not pids:
        return None
    with world.breaking():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return f"{len(pids)} killed"


def restart(world: World) -> str | None:
    """End the service by SIGTERM or SIGINT under load: it answers admitted calls and exits with 0. Then restart it."""
    number = signal.SIGTERM if world.rng.integers(2) else signal.SIGINT
    with world.breaking():
        code = world.service.terminate(number)
        if code != 0:
            world.violations.append(f"exit code {code} after {number.name}")
        _start(world)
    return number.name


def kill_service(world: World) -> str | None:
    """Send SIGKILL to the parent process, then start the service again: no old process may remain."""
    with world.breaking():
        code = world.service.terminate(signal.SIGKILL)
        if code != -signal.SIGKILL:
            world.violations.append("processes of a killed service stay")
        _start(world)
    return "SIGKILL"


def _start(world: World) -> None:
    world.service.start()
    world.until(world.service.ready, START, "not ready after a restart")


def _pause(world: World, role: str) -> str | None:
    pids = world.pids(role)
    if not pids:
        return None
    pid, began = world.choose(pids), time.monotonic()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        try:
            if role == "engine":
                world.until(lambda: not world.service.ready(), NOT_READY, "ready with an engine that is stopped")
            world.wait(*STOPPED)
        finally:
            os.kill(pid, signal.SIGCONT)
    return f"for {time.monotonic() - began:.1f} s"
