"""The most memory that a call holds at once beyond what was held before it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_RESIDENT = Path("/proc/self/clear_refs")  # writing 5 resets the peak of resident memory (man 5 proc)


def peak_bytes(call: Callable[[], Any], device: str) -> int | None:
    """Run `call`, which has run before, and see what its peak adds; what it returns counts, its inputs do not.

    On CUDA the allocator's own statistics, exact. On the CPU what the kernel saw resident in this process at most, on
    all threads and of all libraries, to some hundred KiB; None where the system does not tell (all but Linux).
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if not _RESIDENT.exists():
        return None
    ctypes.CDLL(None).malloc_trim(0)  # else the call would be served from memory that is free, yet resident
    _RESIDENT.write_text("5")
    before = _kib("/proc/self/status", "VmHWM")
    call()
    return (_kib("/proc/self/status", "VmHWM") - before) * 1024


def available_bytes() -> int:
    """What this process could still allocate on the CPU: of the machine's memory, or its container's where less."""
    available = _kib("/proc/meminfo", "MemAvailable") * 1024
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.exists() and (text := limit.read_text().strip()).isdecimal():
        available = min(available, int(text) - int(used.read_text()))
    return available


def _kib(table: str, name: str) -> int:
    return next(int(line.split()[1]) for line in Path(table).read_text().splitlines() if line.startswith(name))
