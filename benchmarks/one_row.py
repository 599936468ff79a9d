"""Count rows whose bits depend on the call: `python benchmarks/one_row.py`, some minutes.

The reference is a causal prefill with random options, dtypes and sizes. Calls of 1, 2, 5, 17 and 64 queries compute its
rows again, over the keys up to the last query, with another sequence in the batch. As a control, torch's
scaled_dot_product_attention does the same, and some of its rows must differ. Target: 0 of a million rows differ. Writes
benchmarks/results/one-row-<cpu>.json. Exits with 1 if a target is missed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from runner import Args, option, run, target
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flashpoint_kernels import attention, native

COUNTS = (1, 2, 5, 17, 64)  # number of queries of each call
LENGTHS = (40, 130, 300, 700, 1300)
Solve = Callable[..., Tensor]


def drawn(draw: random.Random) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    """Return random tensors of one sequence, random options, and a description of the options."""
    kv_heads, group, length = draw.choice((1, 2, 4)), draw.choice((1, 2, 4)), draw.choice(LENGTHS)
    dim, dtype = draw.choice((16, 40, 64, 80, 128)), draw.choice((torch.float32, torch.float16, torch.bfloat16))
    numbers = torch.Generator().manual_seed(draw.getrandbits(32))
    shapes = {"q": kv_heads * group, "k": kv_heads, "v": kv_heads}
    t = {n: torch.randn(1, h, length, dim, generator=numbers).to(dtype) for n, h in shapes.items()}
    heads = kv_heads * group
    extra = draw.choice(("", "alibi_slopes", "sinks", "attn_mask", "bool mask"))
    if extra in ("alibi_slopes", "sinks"):
        t[extra] = torch.rand(heads, generator=numbers) / 16
    elif extra:
        mask = torch.randn(1, heads, length, length, generator=numbers)
        t["attn_mask"] = mask if extra == "attn_mask" else mask > -1
    options: dict[str, Any] = draw.choice(({}, {"window": (37, -1)}, {"softcap": 3.0}, {"scale": 0.3}))
    return t, options, f"{str(dtype)[6:]}, {heads}/{kv_heads} heads, N {length}, D {dim}, {extra or '–'}, {options}"


def beside(t: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    """Call attention with the queries [start, stop), together with another sequence in the batch."""
    tensors = {"q": t["q"][:, :, start:stop], "k": t["k"][:, :, :stop], "v": t["v"][:, :, :stop]}
    if "attn_mask" in t:
        tensors["attn_mask"] = t["attn_mask"][..., start:stop, :stop]
    both = {name: torch.cat([x, x.flip(1)]) for name, x in tensors.items()}
    return both | {name: t[name] for name in t.keys() & {"alibi_slopes", "sinks"}}


def differing(solve: Solve, t: dict[str, Tensor], count: int, **options: Any) -> tuple[int, int]:
    """Return the number of rows, and how many of them have other bits in calls of `count` queries."""
    whole, length, differing_rows = solve(**t, **options), t["q"].shape[2], 0
    for start in range(0, length, count):
        stop = min(start + count, length)
        answer = solve(**beside(t, start, stop), **options)[:1]
        differing_rows += int((answer != whole[:, :, start:stop]).any(-1).sum())
    return whole.shape[1] * length, differing_rows


def ours(**t: Any) -> Tensor:
    return attention(**t, causal=True, backend="torch")


def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Call torch's operator with a causal mask whose diagonal ends at the lower right, as in our attention."""
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    return scaled_dot_product_attention(q, k, v, attn_mask=hidden, enable_gqa=True)


def measure(args: Args) -> dict[str, Any]:
    draw, rows, wrong, problems = random.Random(args.seed), 0, 0, 0
    control_rows = control_wrong = 0
    failures: list[str] = []
    with torch.inference_mode():
        while rows < args.rows:
            t, options, what = drawn(draw)
            for count in COUNTS:
                more, bad = differing(ours, t, count, **options)
                rows, wrong = rows + more, wrong + bad
                failures += [f"{bad} rows of {what}, calls of {count}"] if bad else []
            problems += 1
            if problems % 20 == 1:
                more, bad = differing(torchs, {name: t[name] for name in "qkv"}, 1)
                control_rows, control_wrong = control_rows + more, control_wrong + bad
    return {
        "seed": args.seed, "rows": rows, "differing": wrong, "problems": problems, "found": failures,
        "control": {"rows": control_rows, "differing": control_wrong}, "kernels": native.names(),
        "targets": [
            target("rows whose bits depend on the call", wrong, "rows", most=0),
            target("rows that the control finds", control_wrong, "rows", least=1),
        ],
    }  # fmt: skip


if __name__ == "__main__":
    run(
        measure,
        "one-row",
        packages=("torch",),
        rows=option(1_000_000, "least number of rows to compare"),
        seed=option(0),
    )
