"""A verification in words: the options, the place of the largest error, and a verdict."""

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
    """A function of the caller's on one problem: what was found, or why there is nothing to find.

    `note` says why it was skipped or what it raised; `mistakes` has the known mistake behind each wrong answer.
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
        """The problem in words, such as `B 1 H 4/2 N 128 D 64, causal=true`."""
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
    """Return the options that a problem was judged with: those that were given, and those that were not."""
    said = {name: value for name, value in given.items() if name in OPTIONS}
    missing = {n: "1/sqrt(D)" if n == "scale" else OPTIONS[n].default for n in MEANT if n not in said}
    parts = [f"options: {', '.join(_pairs(said)) or 'none given'}"]
    return "; not given, so the default: ".join([*parts, *([", ".join(_pairs(missing))] if missing else [])])


def place(judged: Judgement, layout: str) -> str:
    """Return where the largest error is: `batch 0, head 3, row 17, column 5`."""
    index = judged.worst_index
    if not index:
        return "nowhere"
    row = TENSORS[judged.name]
    for rank in (4, 3, 2):  # of q, which the answer's own follows from
        axes = row.axes_in(layout, rank)
        if len(axes) == len(index):
            return ", ".join(f"{_AXES.get(axis, axis)} {i}" for axis, i in zip(axes, index, strict=True))
    return f"index {','.join(map(str, index))}"


def findings(report: VerifyReport, layout: str, mistakes: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each tensor that is wrong, and one for the mistake that explains it."""
    for t in report.tensors:
        if t.ok:
            continue
        what = f"{t.name} is off by {t.max_abs:.1e}, over the bound of {t.bound:.1e}, at {place(t, layout)}"
        if t.worst_value is not None and t.worst_expected is not None:
            what += f": {t.worst_value:.6g} where float64 has {t.worst_expected:.6g}"
        yield what
        if t.name in mistakes:
            yield f"  hint: {mistakes[t.name]}"
