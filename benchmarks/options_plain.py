"""Time attention without options on the CPU beside torch's operator: types, head dimensions, lengths, gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from runner import pair, target
from torch.nn.functional import scaled_dot_product_attention

from flashpoint_kernels import attention, native

HEADS = 8
DTYPES, DIMS, LENGTHS = ("float32", "float16", "bfloat16"), (64, 128), (128, 512, 2048)
PASSES = ("forward", "with gradient")
LONG = LENGTHS[-1]
SECONDS = 0.1  # least seconds of one side in a round

Row = dict[str, Any]


def rows(rounds: int) -> Iterator[Row]:
    """Yield a row for each problem, (1,8,N,D)."""
    for gradient, dtype, dim, length, causal in product(PASSES, DTYPES, DIMS, LENGTHS, (False, True)):
        t = tuple(torch.randn(1, HEADS, length, dim, dtype=getattr(torch, dtype)) for _ in range(4))
        times = pair(
            call_of(attention, t, gradient, causal=causal),
            call_of(scaled_dot_product_attention, t, gradient, is_causal=causal),
            rounds,
            SECONDS,
        )
        yield {
            "pass": gradient, "dtype": dtype, "head_dim": dim, "length": length, "causal": causal,
            "kernel": native.names().get(dtype), **times,
        }  # fmt: skip


def call_of(
    attend: Callable[..., torch.Tensor], t: Sequence[torch.Tensor], gradient: str, **how: bool
) -> Callable[[], Any]:
    """Return a call on `t`, which is q, k, v and do: of the forward, or of it and the gradient of q, k and v."""
    q, k, v, do = t
    leaves = [x.requires_grad_() for x in (q, k, v)] if gradient == "with gradient" else []

    def call() -> Any:
        o = attend(q, k, v, **how)
        return torch.autograd.grad(o, leaves, do) if leaves else o

    return call


def targets(measured: Sequence[Row]) -> list[Row]:
    """Return the targets: the least ratio of torch's time to ours among the rows of each kind."""
    amx = any(row["kernel"] == "c-amx" for row in measured)
    made = []

    def least(what: str, bound: float, **kind: Any) -> None:
        if ratios := [row["times"] for row in measured if all(row[name] == value for name, value in kind.items())]:
            made.append(target(f"SDPA's time / ours, {what}, least", min(ratios), "time", least=bound))

    for dtype in ("float32", "float16"):
        forward = {"pass": "forward", "dtype": dtype}
        least(f"{dtype} N {LONG}", 1.08 if amx else 1.0, **forward, length=LONG, causal=False)
        least(f"{dtype} N {LONG} causal", 1.3 if amx else 1.2, **forward, length=LONG, causal=True)
        least(f"{dtype} N 512", 1.05 if amx else 1.0, **forward, length=512, causal=False)
        least(f"{dtype} N 128", 0.95 if amx else 0.9, **forward, length=128, causal=False)
    forward = {"pass": "forward", "dtype": "bfloat16"}
    for dim, length, bound in ((64, 512, 1.2), (64, 128, 1.0), (128, 512, 1.05), (128, 128, 0.8)):
        least(f"bfloat16 N {length} D {dim}", bound, **forward, length=length, head_dim=dim, causal=False)
    for causal, bound in ((False, 1.4), (True, 1.6)):
        if amx:
            what = f"bfloat16 N {LONG}{' causal' if causal else ''}"
            least(what, bound, **forward, length=LONG, causal=causal)
    least(f"float32 N {LONG} with gradient", 1.1, **{"pass": PASSES[1]}, dtype="float32", length=LONG)
    if amx:
        least(f"bfloat16 N {LONG} with gradient", 1.8, **{"pass": PASSES[1]}, dtype="bfloat16", length=LONG)
        return made
    for gradient, bound in zip(PASSES, (1.05, 1.1), strict=True):
        ms = [
            {(row["head_dim"], row["causal"]): row["ms"] for row in measured
             if (row["pass"], row["dtype"], row["length"]) == (gradient, dtype, LONG)}
            for dtype in ("bfloat16", "float32")
        ]  # fmt: skip
        if ratios := [ms[0][kind] / ms[1][kind] for kind in ms[0].keys() & ms[1].keys()]:
            made.append(
                target(f"bfloat16's time / float32's, N {LONG} {gradient}, most", max(ratios), "time", most=bound)
            )
    return made
