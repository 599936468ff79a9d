"""Write a verification as text: its options, the place of the largest error, and the verdict."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from flashpoint.cases import MEANT
from flashpoint.verify_schema import Judgement, VerifyReport, VerifyRequest
from flashpoint_contract.options import OPTIONS
from flashpoint_contract.tensors import TENSORS

_AXES = {"B": "batch", "Hq": "head", "Hk": "head", "Sq": "row", "Sk": "row", "D": "column", "Dv": "column"}


class KernelCase(NamedTuple):
    """The result of the caller's function on one problem.

    - `report`: the verification; None if the case was skipped or the function raised.
    - `note`: why it was skipped, or what the function raised.
    - `mistakes`: the known mistake that explains each wrong tensor, by the tensor's name.
    """

    request: VerifyRequest
    report: VerifyReport | None = None
    note: str = ""
    skipped: bool = False
    mistakes: Mapping[str, str] = {}

    @property
    def ok(self) -> bool:
        return self.skipped or (self.report is not None and self.report.ok)

    @property
    def problem(self) -> str:
        """Return the problem as text, such as `B 1 H 4/2 N 128 D 64, causal=true`."""
        s = self.request.shape
        pairs = (("H", s.q_heads, s.kv_heads), ("N", s.q_len, s.kv_len), ("D", s.head_dim, s.value_dim))
        sizes = [f"{name} {a}" if a == b else f"{name} {a}/{b}" for name, a, b in pairs]
        given = {n: v for n in MEANT if (v := getattr(self.request, n)) != OPTIONS[n].default}
        return ", ".join([" ".join([f"B {s.batch}", *sizes]), *_pairs(given), *self.request.extras])


def _pairs(options: Mapping[str, Any]) -> Iterator[str]:
    return (f"{name}={_written(value)}" for name, value in options.items())


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def options_line(given: Mapping[str, Any]) -> str:
    """Return a line with the options of a problem: the given ones, and the defaults of the others."""
    said = {name: value for name, value in given.items() if name in OPTIONS}
    missing = {n: "1/sqrt(D)" if n == "scale" else OPTIONS[n].default for n in MEANT if n not in said}
    parts = [f"options: {', '.join(_pairs(said)) or 'none given'}"]
    return "; not given, so the default: ".join([*parts, *([", ".join(_pairs(missing))] if missing else [])])


def place(judged: Judgement, layout: str) -> str:
    """Return the place of the largest error, such as `batch 0, head 3, row 17, column 5`."""
    index = judged.worst_index
    if not index:
        return "nowhere"
    row = TENSORS[judged.name]
    for rank in (4, 3, 2):  # ranks of q, from which the axes of the answer follow
        axes = row.axes_in(layout, rank)
        if len(axes) == len(index):
            return ", ".join(f"{_AXES.get(axis, axis)} {i}" for axis, i in zip(axes, index, strict=True))
    return f"index {','.join(map(str, index))}"


def findings(report: VerifyReport, layout: str, mistakes: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each wrong tensor, and a line for the known mistake that explains it."""
    for t in report.tensors:
        if t.ok:
            continue
        what = f"{t.name} is off by {t.max_abs:.1e}, over the bound of {t.bound:.1e}, at {place(t, layout)}"
        if t.worst_value is not None and t.worst_expected is not None:
            what += f": {t.worst_value:.6g} where float64 has {t.worst_expected:.6g}"
        yield what
        if t.name in mistakes:
            yield f"  hint: {mistakes[t.name]}"
