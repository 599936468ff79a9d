"""Plain calls on the CPU beside another commit: `python benchmarks/cpu_calls.py --beside CHECKOUT`, some minutes.

Forward, and forward with gradient, of (1,8,N,D) through `flashpoint_kernels.attention`, for each type, D and N.
CHECKOUT is a checkout whose kernels are compiled; both take turns (checkouts.py). Wanted: no call takes longer than at
CHECKOUT by more than 5%. Goes to benchmarks/results/cpu-calls-<cpu>.json. Exits with 1 where the target is missed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from checkouts import Call, answer, in_turns

LENGTHS = (1, 16, 64, 128, 512, 2048)
DIMS = (16, 40, 64, 80, 128, 256)
TYPES = ("float32", "float16", "bfloat16")
CALLS, SECONDS = 1000, 0.05  # of one call in one turn
SLOWER = 1.05


def cases() -> dict[str, Call]:
    """The calls, in one process."""
    import torch

    from flashpoint_kernels import attention

    def pair(dtype: str, dim: int, length: int) -> tuple[Call, Call]:
        q, k, v, do = torch.randn(4, 1, 8, length, dim, generator=torch.Generator().manual_seed(0)).to(
            getattr(torch, dtype)
        )
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        return lambda: attention(q, k, v), lambda: torch.autograd.grad(attention(*leaves), leaves, do)

    found: dict[str, Call] = {}
    for dtype in TYPES:
        for dim in DIMS:
            for length in LENGTHS:
                forward, gradient = pair(dtype, dim, length)
                found[f"forward, {dtype}, D {dim}, N {length}"] = forward
                found[f"with gradient, {dtype}, D {dim}, N {length}"] = gradient
    return found


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    from runner import target

    found = in_turns(__file__, asked.beside, asked.rounds)
    slowest = max(found["rows"], key=lambda row: row.get("ratio", 0.0))
    if asked.beside is None:
        return found
    return {**found, "targets": [target(slowest["call"], slowest["ratio"], "of the time before", most=SLOWER)]}


if __name__ == "__main__":
    if sys.argv[1:] == ["--work"]:
        answer(cases(), CALLS, SECONDS)
    else:
        from runner import Option, run  # a checkout of another commit may have other packages

        beside = Option(None, "a checkout of another commit", type=Path)
        run(measure, "cpu-calls", packages=("torch",), beside=beside, rounds=Option(5))
