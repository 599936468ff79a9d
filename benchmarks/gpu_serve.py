"""Prove and time the service on a real GPU: `make gpu-serve`.

Starts it on the device for the tests that a CPU cannot stand in for: grouped launches, launches that overlap, cancelled
and late requests, memory that runs out, an engine that dies, hangs or loses its device. Then benchmarks/serving.py
there, whose figures go to benchmarks/results/serving-<device>.json. Needs the `server` and `dev` extras. Exits with 2
where there is no GPU, and with 1 where a test fails or a target is missed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
TESTS = ("tests/e2e/test_batching.py", "tests/e2e/test_gpu_served.py")


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was tested and nothing was timed", file=sys.stderr)
        return 2
    environment = {**os.environ, "FLASHPOINT_TEST_DEVICE": "cuda"}
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "not full", *TESTS]
    timings = [sys.executable, "benchmarks/serving.py", "--device", "cuda"]
    failed = [
        subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode for command in (tests, timings)
    ]
    return int(any(failed))


if __name__ == "__main__":
    sys.exit(main())
