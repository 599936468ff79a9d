"""Time `tiled` with and without a block mask: `python benchmarks/block_masks.py`.

At (1,8,2048,64) in float32 on the CPU, forward and gradient (with o and lse) without a mask and with one of a random
1/16 of the blocks of 128 × 128 for each head, in turn; and with half of them, and with documents. Wanted: with 1/16 six
times as fast as without. Goes to benchmarks/results/block-masks-<cpu>.json. Exits with 1 where that is missed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from runner import Option, pair, rows_of_child, run, target
from torch import Tensor

from flashpoint_kernels import attention, attention_backward, create_block_mask

SHAPE = (1, 8, 2048, 64)
FASTER = 6.0
SPARSE = "1/16 of the blocks, of each head"


def masks() -> dict[str, Tensor]:
    """Block masks by what they are."""
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
    given: dict[str, Any] = {"backend": "tiled", "block_mask": mask}
    if not gradient:
        return lambda: attention(q, k, v, **given)
    o, lse = attention(q, k, v, return_lse=True, **given)
    return lambda: attention_backward(do, q, k, v, o, lse, **given)


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each mask and direction: milliseconds with it and without, and the median of the ratio."""
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(SHAPE, generator=generator) for _ in range(4)]
    for name, mask in masks().items():
        for gradient in (False, True):
            found = pair(*(call_of(tensors, each, gradient) for each in (mask, None)), asked.rounds)
            yield {
                "mask": name, "share": round(float(mask.float().mean()), 4),
                "pass": "gradient" if gradient else "forward",
                "ms": found["ms"], "without_ms": found["other_ms"], "times": found["times"],
            }  # fmt: skip


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    found = list(rows_of_child("--rounds", str(asked.rounds), "--measure", "all"))
    targets = [
        target(f"{row['pass']} without / with {SPARSE}", row["times"], "times faster", least=FASTER)
        for row in found
        if row["mask"] == SPARSE
    ]
    return {"rows": found, "targets": targets}


if __name__ == "__main__":
    run(measure, "block-masks", child=rows, rounds=Option(15))
