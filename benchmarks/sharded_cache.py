"""Time one query over a cache of a million tokens at four servers, beside the operator: `benchmarks/sharded_cache.py`.

Four `flashpoint serve` on this machine's CPU each hold a quarter of the keys and values (8 key heads, D 64, bfloat16: 2
GiB). Calls to them with `flashpoint.sharded.cache` alternate with calls of our operator and torch's in this process on
the same tensors. The benchmark records the largest errors against float64. The medians go to
benchmarks/results/sharded-cache-<device>.json. Exits with 1 if a target is missed. Needs 6 GiB of memory and about two
minutes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from runner import Args, in_turn, medians, option, run, seconds, target
from serving import service

import flashpoint
from flashpoint import sharded
from flashpoint_kernels import Options, Problem
from flashpoint_kernels import run as compute
from flashpoint_kernels.problems.reproducible import split

TOKENS, HEADS, DIM, SERVERS = 1 << 20, 8, 64, 4
PIECE = 1 << 15  # number of tokens in one append
GOAL = 0.8  # target: part of the operator's speed
UNIT = 2.0**-8  # unit roundoff of bfloat16


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o in float64, and Σ p·|v|, which gives the size of rounding errors."""
    answers = []
    for head in range(HEADS):
        scores = (k[0, head].double() @ q[0, head, 0].double()) * DIM**-0.5
        p, values = scores.softmax(0), v[0, head].double()
        answers.append((p @ values, p @ values.abs()))
    o, size = (torch.stack(parts)[None, :, None] for parts in zip(*answers, strict=True))
    return o, size


def measure(given: Args) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn((1, HEADS, 1, DIM), generator=generator).bfloat16()
    k, v = (torch.empty((1, HEADS, given.tokens, DIM), dtype=torch.bfloat16) for _ in range(2))
    for t in (k, v):
        for head in range(HEADS):
            t[0, head] = torch.randn((given.tokens, DIM), generator=generator)

    def ours() -> torch.Tensor:
        problem = Problem.create({"q": q, "k": k, "v": v}, Options())
        for part in split(problem, "torch"):
            compute([part], "torch")
        return problem.outputs["o"]

    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(service())[1] for _ in range(SERVERS)]
        clients = [stack.enter_context(flashpoint.Client(f"http://127.0.0.1:{port}", timeout=600)) for port in ports]
        span = -(-given.tokens // SERVERS)
        cache = stack.enter_context(sharded.cache(clients, kv_heads=HEADS, head_dim=DIM, dtype="bfloat16", span=span))
        for first in range(0, given.tokens, PIECE):
            cache.append(k[:, :, first : first + PIECE], v[:, :, first : first + PIECE])
        ways: dict[str, Callable[[], torch.Tensor]] = {
            "operator": ours,
            "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v),
            "sharded": lambda: cache.attention(q),
        }
        answers = {name: call() for name, call in ways.items()}
        timed = {name: lambda call=call: 1e3 * seconds(call) for name, call in ways.items()}
        milliseconds = medians(list(in_turn(timed, given.rounds, warm=0)))
    o, size = exact(q, k, v)
    bound = UNIT * (size + o.abs()) + 1e-6
    errors = {name: float(((answer.double() - o).abs() / bound).max()) for name, answer in answers.items()}
    ratio = min(milliseconds["operator"], milliseconds["sdpa"]) / milliseconds["sharded"]
    targets = [
        target("the faster operator's time / the four servers'", ratio, "time", least=GOAL),
        target("largest error / the bound for bfloat16", errors["sharded"], "error", most=1.0),
    ]
    return {
        "tokens": given.tokens, "kv_heads": HEADS, "head_dim": DIM,
        "dtype": "bfloat16", "servers": SERVERS, "bytes": k.nbytes + v.nbytes, "rounds": given.rounds,
        "targets": targets, "median_milliseconds": {name: round(time, 1) for name, time in milliseconds.items()},
        "errors": {name: round(error, 3) for name, error in errors.items()},
    }  # fmt: skip


if __name__ == "__main__":
    run(measure, "sharded-cache", packages=("torch",), rounds=option(15), tokens=option(TOKENS))
