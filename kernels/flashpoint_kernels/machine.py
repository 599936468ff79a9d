"""The machine and the software that figures belong to, as far as torch is not needed for it."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def cpu_name() -> str:
    """The CPU's model, such as "AMD EPYC 9654 96-Core Processor"."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def version_of(package: str) -> str | None:
    """The version of an installed package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
