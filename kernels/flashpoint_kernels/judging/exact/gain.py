"""Find answers that are too large or too small by a factor, which no bound of single elements shows.

The error e of an answer is regressed on the exact answer x: g = Σ e·x / Σ x², over many rows of normal values. Rounding
is independent of x, so that g is close to 0 whatever the size of single errors. The standard error of g comes from the
rows, whose elements share errors of the weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flashpoint_kernels.judging.exact.rounding import unit_of

ROWS = 256  # smallest number of rows
_WRONG = {"o": 2.5, "dv": 2.5, "dq": 3.0, "dk": 3.0}  # largest |g| in units of rounding of the data type
_IMPRECISE = 0.25
_OF_LSE = 0.01, 0.002  # largest mean error of lse of a right, and of an accurate kernel
_SURE = 5.0  # standard errors


@dataclass
class Gain:
    """The sums over the rows of one answer in many calls of one data type: products a = Σ e·x and b = Σ x²."""

    output: str
    dtype: str
    rows: int = 0
    a: float = 0.0
    b: float = 0.0
    aa: float = 0.0
    ab: float = 0.0
    bb: float = 0.0

    def add(self, answer: Tensor, exact: Tensor, well: Tensor | None) -> None:
        """Add a call: an answer and its exact value of the same shape, and which rows are well-posed (None: all)."""
        if self.output == "lse":
            x, e = torch.ones_like(exact)[..., None], (answer.double() - exact)[..., None]
        else:
            x, e = exact, answer.double() - exact
        finite = e.isfinite().all(-1) & exact.isfinite().view(*x.shape[:-1], -1).all(-1)
        kept = finite & (x.amax(-1) > x.amin(-1) if x.shape[-1] > 1 else finite)
        kept = kept if well is None or well.shape != kept.shape else kept & well
        a, b = (e * x).sum(-1)[kept], (x * x).sum(-1)[kept]
        self.rows += a.numel()
        self.a, self.b = self.a + float(a.sum()), self.b + float(b.sum())
        sums = float((a * a).sum()), float((a * b).sum()), float((b * b).sum())
        self.aa, self.ab, self.bb = self.aa + sums[0], self.ab + sums[1], self.bb + sums[2]

    @property
    def value(self) -> float:
        return self.a / self.b if self.b else 0.0

    @property
    def deviation(self) -> float:
        """Return the standard error of `value`."""
        g = self.value
        return math.sqrt(max(0.0, self.aa - 2 * g * self.ab + g * g * self.bb)) / self.b if self.b else math.inf

    @property
    def limits(self) -> tuple[float, float]:
        """Return the largest |g| of a right and of an accurate kernel."""
        if self.output == "lse":
            wrong, imprecise = _OF_LSE
        else:
            u = unit_of(self.dtype).u
            wrong, imprecise = _WRONG[self.output] * u, _IMPRECISE * u
        return wrong + _SURE * self.deviation, imprecise + _SURE * self.deviation

    @property
    def verdict(self) -> str:
        wrong, imprecise = self.limits
        if self.rows < ROWS:
            return "right"
        return "wrong" if abs(self.value) > wrong else "imprecise" if abs(self.value) > imprecise else "right"

    def __str__(self) -> str:
        wrong, _ = self.limits
        if self.output == "lse":
            text = f"lse is off by {self.value:+.4f} on average over {self.rows} rows"
            return f"{text}; a right kernel is within {wrong:.4f}"
        return (
            f"{self.output} is too {'large' if self.value > 0 else 'small'} by {abs(self.value):.2%} over {self.rows} "
            f"rows; a right kernel is within {wrong:.2%}"
        )
