"""Compile the shipped kernels for GPUs that are not here, and write down what the compiler made of them.

Writes benchmarks/results/compile-sm<arch>.json with versions, commit and date: registers, spilled bytes, shared memory,
matrix instructions and atomics of each variant. Needs no GPU, and some minutes. docs/kernels.md shows them in a table.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEAD_DIMS = ("64", "128", "256")
# Half types at every level; float32 at the first alone, for its tiles are the same at all. Level 2 with a float mask.
VARIANTS = [("bfloat16", "0"), ("bfloat16", "1"), ("bfloat16", "2"), ("float32", "0")]


def reports(arch: int) -> list[dict[str, object]]:
    found = []
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    for (dtype, level), dim in product(VARIANTS, HEAD_DIMS):
        command = [sys.executable, "-m", "flashpoint_kernels.triton_backend.aot", "--arch", str(arch)]
        command += ["--dtype", dtype, "--level", level, "--head-dim", dim]
        command += ["--mask", "float32"] if level == "2" else []
        out = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
        found += [json.loads(line) for line in out.splitlines()]
        print(f"sm_{arch} {dtype} level {level} D {dim}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90], help="compute capabilities, as 90 for sm_90")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    for arch in asked.arch:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
        result = {
            "device": "none: compiled ahead of time",
            "triton": version("triton"),
            "python": platform.python_version(),
            "commit": commit.stdout.strip() or "unknown",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "kernels": reports(arch),
        }
        (asked.out / f"compile-sm{arch}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
