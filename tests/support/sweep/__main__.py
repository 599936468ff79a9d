"""Run cases on a level of a guarded library: `python -m tests.support.sweep LIBRARY LEVEL CASES LONGEST SEED [usual]`.

The environment is that of `guards.environment`. A wrong answer or a wrong access ends the process with its message.
"""

import faulthandler
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from flashpoint_kernels.native import switches
from tests.support.sweep import guards
from tests.support.sweep.cases import WIDE_DIMS, cases, edges
from tests.support.sweep.check import check_all

BACKEND = "cpu"
WIDE_LONGEST = 70  # queries and keys of cases with wide heads


def main() -> None:
    path, level, count, longest, seed = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:6])
    faulthandler.enable()
    began = time.monotonic()
    sweep_level(path, level, count, longest, (guards.USUAL if "usual" in sys.argv else guards.SMALL)[level], seed)
    print(f"{count} cases on {level} in {time.monotonic() - began:.1f} s")


def sweep_level(path: Path, level: str, count: int, longest: int, blocks: guards.Blocks, seed: int) -> None:
    """Check cases on one level of a library with these blocks."""
    torch.set_num_threads(3)
    guards.use(path, level, blocks)
    sizes = guards.SMALL[level]
    q_lens = edges([sizes.queries, sizes.forward.get("STRIP", 32), sizes.part], longest)
    kv_lens = edges([sizes.backward["KEYS"], sizes.forward["BLOCK"], sizes.chunk], longest)
    types = ["bfloat16"] if level in switches.BFLOAT16 else ["float32", "float16", "bfloat16"]
    check_all(cases(count, q_lens, kv_lens, types=types, extremes=True, seed=seed), BACKEND)
    # Products with wide heads take long, so there are few of these cases, and they are short.
    few = [[n for n in lens if n <= WIDE_LONGEST] for lens in (q_lens, kv_lens)]
    check_all(cases(count // 10, *few, dims=WIDE_DIMS, types=types, seed=seed), BACKEND)


if __name__ == "__main__":
    main()
