"""Time attention on this device, by this library and others: turn a grid of cases into rows of a table.

    cases = preset("papers", "cpu")                   # or grid(shapes, dtypes=…, causal=…, directions=…, backends=…)
    for event in run_grid(cases, "cpu", Timing()):    # a generator: stop it with .close()
        ...

`run_grid(cases, device, timing)`, and `measure(case, device, timing, …)` for one case, are generators that work for
about `timing.slice_ms` at a time. At every yield the device is idle; the caller may run something else for any time, or
close them. The events are plain dicts, ready for JSON:

    {"type": "device", "environment": {…}}       once, first: `describe(device)` with `peaks`, a dict of `Peak` by dtype
    {"type": "progress", "done": 3, "total": 20, "backend": "naive", "slice_ms": 18.2}    after every slice
    {"type": "row", "done": 4, "total": 20, "row": {…}}     after every case; its keys are `ROW_FIELDS`

A case that cannot run gives a row with the reason in `skipped`, and None for all figures. If the GPU does not work any
more after a case, `measurement.DeviceLostError` is raised, which has that row. Rows come problem by problem in the
order of the cases, with `naive` first, so that `speedup_over_naive` of the others is known.

The module `case` does not import torch, so an HTTP process can check a grid, count its cases and predict its cost.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashpoint_kernels.timing.case import PRESETS, ROW_FIELDS, TIMED, Case, Timing, grid, preset
    from flashpoint_kernels.timing.device import Peak, describe
    from flashpoint_kernels.timing.measurement import measure, run_grid

__all__ = [
    "PRESETS",
    "ROW_FIELDS",
    "TIMED",
    "Case",
    "Peak",
    "Timing",
    "describe",
    "grid",
    "measure",
    "preset",
    "run_grid",
]


# The module that defines a name; names that are not listed are in `case`.
_HOME = {"Peak": "device", "describe": "device", "measure": "measurement", "run_grid": "measurement"}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f"flashpoint_kernels.timing.{_HOME.get(name, 'case')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
