"""Faults of files: a full disk, no folder for temporary files, and a key file that is damaged or absent.

Each one also kills a process that reads requests, which must start again nevertheless.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from chaos.world import World

SEEN = (2.2, 3.0)  # range of seconds that a key file stays damaged: the service looks at it every two seconds
LASTS = (0.5, 2.0)  # range of seconds that the disk stays full, or the folder away


def fill_disk(world: World) -> str | None:
    """Fill the file system of the folder for temporary files."""
    if not world.service.contained:
        return None
    path = _inside(world) / "filled"
    try:
        with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 12))
        killed = _kill(world)
        world.wait(*LASTS)
        path.unlink()
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # the service does not run
        return None
    return f"full, {killed}"


def remove_folder(world: World) -> str | None:
    """Remove the folder for temporary files with all that it contains."""
    folder = _inside(world)
    try:
        content = list(folder.iterdir())
        if content:
            world.violations.append(f"temporary files: {content}")
            return None
        folder.rmdir()
        killed = _kill(world)
        world.wait(*LASTS)
        folder.mkdir()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return f"removed, {killed}"


def damage_keys(world: World) -> str:
    """Write a part of the key file, as an editor that was interrupted."""
    path = world.service.keys
    good = path.read_text()
    path.write_text(good[: len(good) // 2].rstrip('"\n0123456789abcdef'))
    return _held_back(world, path, good, "damaged")


def remove_keys(world: World) -> str:
    path = world.service.keys
    good = path.read_text()
    path.unlink()
    return _held_back(world, path, good, "absent")


def _held_back(world: World, path: Path, good: str, what: str) -> str:
    try:
        world.wait(*SEEN)
        killed = _kill(world)
        world.wait(*LASTS)
    finally:
        path.write_text(good)
    return f"{what}, {killed}"


def _inside(world: World) -> Path:
    """Return the folder for temporary files, as the service's mount namespace has it."""
    folder = world.service.temporary
    return Path(f"/proc/{world.service.pid}/root{folder}") if world.service.contained else folder


def _kill(world: World) -> str:
    """Kill an HTTP process if there are several, else the process that reads JSON."""
    role = "http" if world.service.workers > 1 else "codec"
    pids = world.pids(role)
    if not pids:
        return "nothing killed"
    if role == "codec":
        os.kill(pids[0], signal.SIGKILL)
    else:
        with world.breaking(), contextlib.suppress(ProcessLookupError):
            os.kill(world.choose(pids), signal.SIGKILL)
    return f"{role} killed"
