"""Run cases on one level of a guarded library: `python -m tests.support.sweep LIBRARY LEVEL CASES LONGEST [usual]`.

The environment is that of `guards.environment`. A wrong answer or a wrong access ends the process with its message.
"""

import faulthandler
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from hypothesis import HealthCheck, Phase, given, settings

from tests.support.sweep import guards
from tests.support.sweep.cases import Case, cases, edges
from tests.support.sweep.check import check

BACKEND = "cpu"


def main() -> None:
    path, level, count, longest = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    faulthandler.enable()
    began = time.monotonic()
    sweep_level(path, level, count, longest, guards.USUAL[level] if "usual" in sys.argv else guards.SMALL[level])
    print(f"{count} cases on {level} in {time.monotonic() - began:.1f} s")


def sweep_level(path: Path, level: str, count: int, longest: int, blocks: guards.Blocks) -> None:
    """Check cases on one level of a library with these blocks."""
    torch.set_num_threads(3)
    guards.use(path, level, blocks)
    sizes, exploring = guards.SMALL[level], bool(os.environ.get("FLASHPOINT_TEST_EXPLORE"))
    q_lens = edges([sizes.queries, sizes.forward.get("STRIP", 32), sizes.part], longest)
    kv_lens = edges([sizes.backward["KEYS"], sizes.forward["BLOCK"], sizes.chunk], longest)
    # hypothesis would run a failing case again, and its parts: the process has one case to report
    phases = [Phase.generate] + [Phase.shrink] * exploring
    types = ["bfloat16"] if level == "amx" else ["float32", "float16", "bfloat16"]

    @settings(
        max_examples=count, deadline=None, database=None, derandomize=not exploring, phases=phases,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(cases(q_lens, kv_lens, types=types))
    def sweep(case: Case) -> None:
        check(case, BACKEND)

    sweep()


if __name__ == "__main__":
    main()
