"""Time plain calls on the CPU in two commits: `python benchmarks/cpu_calls.py --beside CHECKOUT`, some minutes.

Times `flashpoint_kernels.attention` at (1,8,N,D), without and with the gradient, for each dtype, D and N. CHECKOUT is
another checkout with compiled kernels; calls here and in CHECKOUT alternate (checkouts.py). Target: no call takes more
than 5% longer here than in CHECKOUT. Writes benchmarks/results/cpu-calls-<cpu>.json. Exits with 1 if the target is
missed.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from checkouts import BESIDE, Call, in_turns
from runner import Args, Option, run, target

LENGTHS = (1, 16, 64, 128, 512, 2048)
DIMS = (16, 40, 64, 80, 128, 256)
TYPES = ("float32", "float16", "bfloat16")
CALLS, SECONDS = 1000, 0.05  # limits of one turn: calls and seconds of a case
SLOWER = 1.05  # largest allowed ratio to the time in CHECKOUT


def cases() -> dict[str, Call]:
    """Return the timed calls by name."""
    import torch

    from flashpoint_kernels import attention

    def pair(dtype: str, dim: int, length: int) -> tuple[Call, Call]:
        q, k, v, do = torch.randn(4, 1, 8, length, dim, generator=torch.Generator().manual_seed(0)).to(
            getattr(torch, dtype)
        )
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        return lambda: attention(q, k, v), lambda: torch.autograd.grad(attention(*leaves), leaves, do)

    calls: dict[str, Call] = {}
    for dtype, dim, length in product(TYPES, DIMS, LENGTHS):
        forward, gradient = pair(dtype, dim, length)
        calls[f"forward, {dtype}, D {dim}, N {length}"] = forward
        calls[f"with gradient, {dtype}, D {dim}, N {length}"] = gradient
    return calls


def measure(args: Args) -> dict[str, Any]:
    result = in_turns(cases, args.beside, args.rounds, CALLS, SECONDS)
    slowest = max(result["rows"], key=lambda row: row.get("ratio", 0.0))
    if args.beside is None:
        return result
    return {**result, "targets": [target(slowest["call"], slowest["ratio"], "of the time before", most=SLOWER)]}


if __name__ == "__main__":
    run(measure, "cpu-calls", packages=("torch",), beside=BESIDE, rounds=Option(5))
