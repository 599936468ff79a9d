"""How much memory the service's control group, or the machine, has in use, and where its limit is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

_GROUPS, _PROC = Path("/sys/fs/cgroup"), Path("/proc")


class MemoryUse(NamedTuple):
    """Bytes in use that the system cannot take back, and the bytes at which it ends processes."""

    used: int
    limit: int


def memory(groups: Path = _GROUPS, proc: Path = _PROC) -> MemoryUse | None:
    """Return the memory of the control group that is nearest to its limit; without a limit, that of the machine.

    A control group (version 2) has the limit of systemd's MemoryMax, of a container or of a pod. None where /proc has
    no such files.
    """
    try:
        limited = list(_limited(groups, proc))
        return max(limited, key=lambda each: each.used / each.limit) if limited else _of_machine(proc)
    except (OSError, ValueError, KeyError):
        return None


def _limited(groups: Path, proc: Path) -> Iterator[MemoryUse]:
    lines = (proc / "self/cgroup").read_text().splitlines()
    place = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if place is None:
        return
    for folder in (groups / place, *(groups / parent for parent in Path(place).parents)):
        try:
            limit = (folder / "memory.max").read_text().strip()
            current = int((folder / "memory.current").read_text())
            counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except FileNotFoundError:  # the root has no limit, and a container may not see groups above its own
            continue
        if limit != "max" and int(limit) > 0:
            yield MemoryUse(max(0, current - int(counts.get("inactive_file", 0))), int(limit))


def _of_machine(proc: Path) -> MemoryUse:
    lines = (proc / "meminfo").read_text().splitlines()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return MemoryUse((kib["MemTotal"] - kib["MemAvailable"]) << 10, kib["MemTotal"] << 10)


def memory_metrics() -> Iterable[Metric]:
    """Return the two metrics of `memory`; none where it is not known."""
    if (found := memory()) is not None:
        used = (
            "Bytes of memory in use, without caches of files: of the control group that has a limit, or of the machine"
        )
        yield GaugeMetricFamily("flashpoint_memory_bytes", used, value=found.used)
        yield GaugeMetricFamily(
            "flashpoint_memory_limit_bytes", "The limit of flashpoint_memory_bytes", value=found.limit
        )
