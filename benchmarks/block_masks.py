"""Time `tiled` with and without a block mask: `python benchmarks/block_masks.py`.

At (1,8,2048,64) in float32 on the CPU, forward and gradient (with o and lse) without a mask and with one of a random
1/16 of the blocks of 128 × 128 for each head, in turn; and with half of them, and with documents. Wanted: with 1/16 six
times as fast as without. Goes to benchmarks/results/block-masks-<cpu>.json. Exits with 1 where that is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from record import write
from serving import MALLOC, ROOT, environment, target
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


def seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure(rounds: int) -> list[dict[str, Any]]:
    """A row for each mask and direction: milliseconds with it and without, and the median of the ratio."""
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(SHAPE, generator=generator) for _ in range(4)]
    rows = []
    for name, mask in masks().items():
        for gradient in (False, True):
            ours, plain = (call_of(tensors, each, gradient) for each in (mask, None))
            ours(), plain()
            found = [(seconds(ours), seconds(plain)) for _ in range(rounds)]
            with_mask, without = (median(pair[n] for pair in found) * 1e3 for n in (0, 1))
            rows.append({
                "mask": name, "share": round(float(mask.float().mean()), 4),
                "pass": "gradient" if gradient else "forward",
                "ms": round(with_mask, 2), "without_ms": round(without, 2),
                "times": round(median(b / a for a, b in found), 2),
            })  # fmt: skip
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        print(json.dumps(measure(asked.rounds)))
        return 0
    command = [sys.executable, __file__, "--rounds", str(asked.rounds), "--measure"]
    done = subprocess.run(command, env={**os.environ, **MALLOC}, stdout=subprocess.PIPE, text=True, check=True)
    rows = json.loads(done.stdout)
    for row in rows:
        print(row)
    targets = [
        target(f"{row['pass']} without / with {SPARSE}", row["times"], "times faster", least=FASTER)
        for row in rows
        if row["mask"] == SPARSE
    ]
    write(asked.out, "block-masks", {"environment": environment(), "rows": rows, "targets": targets})
    return 0 if all(each["met"] for each in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
