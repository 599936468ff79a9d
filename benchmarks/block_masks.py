"""Time `tiled` with and without a block mask: `python benchmarks/block_masks.py`.

Forward and gradient (from o and lse) at (1,8,2048,64) in float32 on the CPU. Calls with a mask alternate with calls
without one. The masks keep a random 1/16 of the blocks of 128 × 128 for each head, a random half of these blocks, or
the blocks within documents. Target: the call with 1/16 of the blocks is six times as fast as without a mask. Writes
benchmarks/results/block-masks-<cpu>.json. Exits with 1 if the target is missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from runner import Args, Option, pair, rows_of_child, run, target
from torch import Tensor

from flashpoint_kernels import attention, attention_backward, create_block_mask

SHAPE = (1, 8, 2048, 64)
FASTER = 6.0
SPARSE = "1/16 of the blocks, of each head"


def masks() -> dict[str, Tensor]:
    """Return the block masks by name."""
    generator = torch.Generator().manual_seed(0)
    document = torch.arange(SHAPE[2]) // 300
    blocks = (SHAPE[1], SHAPE[2] // 128, SHAPE[2] // 128)
    return {
        SPARSE: torch.rand(blocks, generator=generator) < 1 / 16,
        "half of the blocks, of each head": torch.rand(blocks, generator=generator) < 1 / 2,
        "documents of 300 tokens": create_block_mask(
            lambda b, h, i, j: document[i] == document[j], q_len=SHAPE[2], kv_len=SHAPE[2]
        ),
    }


def call_of(tensors: list[Tensor], mask: Tensor | None, gradient: bool) -> Callable[[], Any]:
    q, k, v, do = tensors
    keywords: dict[str, Any] = {"backend": "tiled", "block_mask": mask}
    if not gradient:
        return lambda: attention(q, k, v, **keywords)
    o, lse = attention(q, k, v, return_lse=True, **keywords)
    return lambda: attention_backward(do, q, k, v, o, lse, **keywords)


def rows(args: Args) -> Iterator[dict[str, Any]]:
    """Yield a row for each mask and direction: milliseconds with and without the mask, and the median ratio."""
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(SHAPE, generator=generator) for _ in range(4)]
    for name, mask in masks().items():
        for gradient in (False, True):
            times = pair(*(call_of(tensors, each, gradient) for each in (mask, None)), args.rounds)
            yield {
                "mask": name, "share": round(float(mask.float().mean()), 4),
                "pass": "gradient" if gradient else "forward",
                "ms": times["ms"], "without_ms": times["other_ms"], "times": times["times"],
            }  # fmt: skip


def measure(args: Args) -> dict[str, Any]:
    table = list(rows_of_child("--rounds", str(args.rounds), "--measure", "all"))
    targets = [
        target(f"{row['pass']} without / with {SPARSE}", row["times"], "times faster", least=FASTER)
        for row in table
        if row["mask"] == SPARSE
    ]
    return {"rows": table, "targets": targets}


if __name__ == "__main__":
    run(measure, "block-masks", child=rows, rounds=Option(15))
