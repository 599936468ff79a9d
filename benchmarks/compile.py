"""Compile every variant of the kernels for GPUs that are not here, and write down what the compiler made of them.

Writes benchmarks/results/compile-sm<arch>.json with versions, commit and date (`make compile-all`): registers, spilled
bytes, shared memory, instructions, matrix instructions, atomics. Needs no GPU, and minutes. docs/kernels.md shows them
in tables. Exits with 1 where a variant is not as it must be (`aot.faults`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "contract"), str(ROOT / "kernels")]
os.environ.pop("TRITON_INTERPRET", None)  # read when kernels are defined

from record import commit, now  # noqa: E402

from flashpoint_kernels.triton_backend.aot import compile_all, faults  # noqa: E402
from flashpoint_kernels.triton_backend.configurations import TABLES  # noqa: E402
from flashpoint_kernels.triton_backend.shipped import DTYPES, all_of  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=list(TABLES), choices=TABLES, help="90 for sm_90")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    wrong = 0
    for arch in asked.arch:
        reports = []
        for report in compile_all(all_of(arch, asked.dtypes), asked.processes):
            reports.append(asdict(report))
            for fault in faults(report):
                wrong += 1
                print(f"sm_{arch} {report.kernel} {report.dtype} D {report.head_dim} level {report.level}: {fault}")
        result = {
            "device": "none: compiled ahead of time",
            "triton": version("triton"),
            "python": platform.python_version(),
            "commit": commit(),
            "date": now(),
            "kernels": reports,
        }
        path = asked.out / f"compile-sm{arch}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written: {path}: {len(reports)} variants", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
