"""Compile every variant of the kernels for GPUs that this machine lacks, and record properties of the compiled code.

Writes benchmarks/results/compile-sm<arch>.json with versions, commit and date (`make compile-all`): registers, spilled
bytes, shared memory, instructions, matrix instructions, atomics. Takes minutes and needs no GPU. docs/compiled.md has
the tables. `--missing` compiles only variants that the file lacks or has with another tile; the file records a commit
for each variant. Exits with 1 if a variant has a fault (`aot.faults`).

`--beside FILE --beside-commit HASH` compiles the loops of the level 0 kernels and those of Triton's tutorial instead,
and writes loops-sm<arch>.json (`compile_beside.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "contract"), str(ROOT / "kernels")]
os.environ.pop("TRITON_INTERPRET", None)  # Triton reads this variable when kernels are defined

import compile_beside  # noqa: E402
from record import commit, write_compiled  # noqa: E402

from flashpoint_kernels.triton_backend.host.configurations import TABLES, Tile  # noqa: E402
from flashpoint_kernels.triton_backend.tools.aot import compile_all, faults, tile_of  # noqa: E402
from flashpoint_kernels.triton_backend.tools.shipped import DTYPES, Variant, all_of  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=list(TABLES), choices=TABLES, help="90 for sm_90")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--missing", action="store_true", help="compile only variants and tiles that the file lacks")
    parser.add_argument("--beside", type=Path, help="a copy of triton's python/tutorials/06-fused-attention.py")
    parser.add_argument("--beside-commit", help="the commit of triton that the copy comes from")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.beside:
        if not args.beside_commit:
            parser.error("--beside needs --beside-commit")
        for arch in set(args.arch) & set(compile_beside.ARCHITECTURES):
            compile_beside.write(arch, args.beside, args.beside_commit, args.out, args.processes)
        return 0
    fault_count = 0
    for arch in args.arch:
        path = args.out / f"compile-sm{arch}.json"
        variants = all_of(arch, args.dtypes)
        known = read_reports(path) if args.missing else {}
        due = [variant for variant in variants if (variant, tile_of(variant)) not in known]
        for variant, report in zip(due, compile_all(due, args.processes), strict=True):
            known[variant, tile_of(variant)] = {**asdict(report), "commit": commit()}
            for fault in faults(report):
                fault_count += 1
                print(f"sm_{arch} {report.kernel} {report.dtype} D {report.head_dim} level {report.level}: {fault}")
        write_compiled(path, kernels=[known[variant, tile_of(variant)] for variant in variants])
    return 1 if fault_count else 0


def read_reports(path: Path) -> dict[tuple[Variant, Tile], dict[str, Any]]:
    """Return the reports that a file contains, by variant and tile."""
    reports = {}
    for report in json.loads(path.read_text())["kernels"]:
        variant = Variant(**{name: report[name] for name in Variant._fields})
        tile = Tile(*(report[name] for name in ("block_m", "block_n", "num_warps", "num_stages")))
        reports[variant, tile] = report
    return reports


if __name__ == "__main__":
    sys.exit(main())
