"""Move a power of two from q to a tiny scale where products q·k exceed float32's range, though their scores do not.

The kernels in C multiply a product of q and k by the scale, and a product beyond float32's range counts as its largest
number (docs/numerics.md). With a usual scale the score of such a product is huge, too. With one of 1e-40 it may be 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from flashpoint_kernels.problems.problem import Problem

TINY = 2.0**-20  # products are examined if the scale is smaller
_PRODUCT = 90  # exponent of the largest product afterwards; gradients multiply it by more numbers


def is_tiny(scale: float) -> bool:
    """Return whether scores may be moderate where products are not."""
    return 0 < abs(scale) < TINY


def with_moved(compute: Callable[[Problem], None], problem: Problem) -> None:
    """Compute a problem with a tiny scale, as one whose products float32 can represent.

    q is divided by 2^n and the scale multiplied by it, so that dq, which the gradient writes, is that of q/2^n.
    """
    if not (n := _exponent(problem)):
        compute(problem)
        return
    spec = problem.spec
    moved = replace(spec, options=replace(spec.options, scale=math.ldexp(spec.scale, n)))
    compute(replace(problem, spec=moved, tensors=problem.tensors | {"q": problem.tensors["q"] * 2.0**-n}))
    if "dq" in problem.outputs:
        problem.outputs["dq"].mul_(2.0**-n)


def _exponent(problem: Problem) -> int:
    """Return the exponent by which products must become smaller; 0 if they are small, or infinite in any case."""
    largest = math.prod(_largest(problem.tensors[name]) for name in "qk") * max(1, problem.spec.head_dim)
    return max(0, math.frexp(largest)[1] - _PRODUCT) if math.isfinite(largest) else 0


def _largest(t: Tensor) -> float:
    return float(t.double().abs().max()) if t.numel() else 0.0
