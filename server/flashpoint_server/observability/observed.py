"""Metrics that are read at each scrape: the versions of the software, and the resources of each process."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import Metric, ProcessCollector
from prometheus_client.core import GaugeMetricFamily

from flashpoint_server.ipc.messages import DeviceInfo

_LIBRARIES = ("torch", "triton", "numpy", "fastapi", "uvicorn")
_OF_BUILD = ("python", "torch", "triton")


@cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed libraries, without importing them."""
    by_package = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            by_package[name] = version(name)
        except PackageNotFoundError:
            continue
    return by_package


def build_info(device: DeviceInfo | None) -> Metric:
    """Return the metric whose labels are the versions and the device. If `device` is None, the device's are empty."""
    labels = {"version": version("flashpoint")} | {name: versions().get(name, "") for name in _OF_BUILD}
    labels |= {"device": device.name, "title": device.title} if device else {"device": "", "title": ""}
    what = "Versions and device of the service, as labels"
    family = GaugeMetricFamily("flashpoint_build_info", what, labels=list(labels))
    family.add_metric(list(labels.values()), 1)
    return family


def used(processes: Mapping[str, int]) -> Iterable[Metric]:
    """Return the CPU time, memory and descriptors of each process from /proc. `processes` maps names to process ids.

    prometheus_client's collector reads one process; the label `process` distinguishes several.
    """
    families: dict[str, Metric] = {}
    for name, pid in processes.items():
        for metric in ProcessCollector(pid=partial(int, pid), registry=None).collect():
            family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            for sample in metric.samples:
                family.add_sample(sample.name, {"process": name}, sample.value)
    return families.values()
