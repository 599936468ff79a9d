"""Processes are killed, stopped, and the service restarted. A fault returns what it did, None where it could not."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from chaos.service import START
from chaos.world import World

NOT_READY = 60.0  # seconds in which /health/ready must say that an engine is gone or stopped; ends a hang
STOPPED = (0.1, 1.5)  # seconds that a process stands still


def kill_engine(world: World) -> str | None:
    """Readiness goes false before the next engine is there."""
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
    """One of several: another takes its place, and the others serve meanwhile."""
    pids = world.pids("http")
    if world.service.workers == 1 or not pids:
        return None
    with world.breaking():
        os.kill(world.choose(pids), signal.SIGKILL)
    return "killed"


def restart(world: World) -> str | None:
    """SIGTERM or SIGINT under load: what was admitted is answered, the exit code is 0, nothing is left."""
    number = signal.SIGTERM if world.rng.integers(2) else signal.SIGINT
    with world.breaking():
        code = world.service.terminate(number)
        if code != 0:
            world.violations.append(f"exit code {code} after {number.name}")
        _start(world)
    return number.name


def kill_service(world: World) -> str | None:
    """SIGKILL to the process that all others are below: none of them stays."""
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
