"""The device and the software that figures belong to."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def device_name(device: str) -> str:
    """What the hardware calls itself, such as "NVIDIA H100 80GB HBM3" or the CPU's model."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def is_lost(device: str) -> bool:
    """Whether nothing works on a GPU any more in this process, as after an illegal access."""
    if torch.device(device).type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def describe(device: str) -> dict[str, Any]:
    """Device, cores or multiprocessors, and versions, as plain data."""
    found: dict[str, Any] = {"device": device_name(device), "kind": torch.device(device).type}
    if found["kind"] == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "multiprocessors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    else:
        found |= {
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
        }
    return found | {
        "flashpoint": _version("flashpoint"), "torch": torch.__version__, "triton": _version("triton"),
        "python": platform.python_version(),
    }  # fmt: skip


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
