"""Put faults in and run the sweep's cases alone: `python -m tests.faults.quick --draw 48 --seed 67 --json FILE`.

A process that has imported torch forks for each fault, and the kernels in C are compiled without sanitizers, so a fault
takes a third of the time. The cases are those that `make test` draws (tests/kernels/test_sweep.py): it finds what is
found here. They run without a fault first, and must find nothing.
"""

import argparse
import contextlib
import json
import os
import random
import re
import resource
import sys
import tempfile
import time
from pathlib import Path

os.environ |= {
    "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1", "TRITON_INTERPRET": "1",
}  # fmt: skip

import hypothesis.strategies
import numpy as np
import torch
import triton

from tests.faults.__main__ import bank, copied, mistakes

IMPORTED = (hypothesis, np, torch, triton)  # the product is imported in the children, with its fault
LIMIT = 300  # seconds of processor time


def variants(file: str) -> list[str]:
    """Return the variants of the sweep that run the code of a file."""
    if file.endswith(("_amx.h", "tiles.h")):
        return ["avx512bf16", "amx"]
    for folder, names in {
        "native/": ["avx2", "generic", "avx512", "avx512bf16", "amx"],
        "cpu_backend/": ["avx2", "generic", "avx512", "avx512bf16", "amx"],
        "triton_backend/": ["triton"],
        "tiled_backend/": ["tiled"],
        "reference_backend/": ["reference"],
    }.items():
        if folder in file:
            return names
    return ["tiled", "triton", "reference"]


def run(variant: str, native: Path) -> None:
    """Run the cases that `make test` draws for one variant."""
    from flashpoint_kernels.native import switches
    from tests.kernels import test_sweep
    from tests.support.kernels import fast_interpreter
    from tests.support.sweep import __main__ as level
    from tests.support.sweep import guards

    if variant in guards.SMALL:
        guards.FLAGS = tuple(flag for flag in guards.FLAGS if flag != "-Werror")  # a warning finds no fault
        path = guards.library(variant, flags=(), folder=native)
        longest = 200 if variant in switches.BFLOAT16 else 150
        level.sweep_level(path, variant, test_sweep.CASES, longest, guards.SMALL[variant], test_sweep.SEED)
        return
    test = {
        "triton": test_sweep.test_triton_with_its_smallest_tiles, "tiled": test_sweep.test_tiled_with_small_tiles,
        "reference": test_sweep.test_reference,
    }[variant]  # fmt: skip
    fast_interpreter.install()
    with test_sweep.smallest_tiles():
        test(*([] if variant == "reference" else [None]))


def found(tree: Path, variant: str) -> str:
    """Return the first line of what a variant's cases say in a child process; "" if they find nothing."""
    reader, writer = os.pipe()
    if child := os.fork():
        os.close(writer)
        with os.fdopen(reader) as said:
            text = said.read()
        status = os.waitpid(child, 0)[1]
        return text or (f"ended by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "")
    os.close(reader)
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT))
    sys.path[:0] = [str(tree / name) for name in ("contract", "client", "kernels", "server")]
    with os.fdopen(writer, "w") as says, open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        try:
            run(variant, tree / "kernels/flashpoint_kernels/native")
        except BaseException as error:  # whatever a fault does is found
            says.write(f"{type(error).__name__}: {str(error)[:200]}")
    os._exit(0)


def main() -> int:
    assert "flashpoint_kernels" not in sys.modules, (
        "the children would not see a fault in a module that is imported here"
    )
    parser = argparse.ArgumentParser(prog="python -m tests.faults.quick", description=__doc__)
    parser.add_argument("--draw", type=int, default=0, help="number of faults, drawn at random; 0 for all")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the draw")
    parser.add_argument("--only", default="", help="a regular expression that the ids must match")
    parser.add_argument("--part", default="0/1", help="k/n: the k-th of n parts of the draw, to run beside the others")
    parser.add_argument("--json", type=Path, help="write the table to this file, after each fault")
    asked = parser.parse_args()
    faults = bank()
    stale = {line.split(":")[0] for line in mistakes(faults)}
    chosen = [fault for fault in faults if fault["id"] not in stale and re.search(asked.only, fault["id"])]
    if asked.draw:
        chosen = random.Random(asked.seed).sample(chosen, min(asked.draw, len(chosen)))
    print(f"{len(faults)} faults in the bank, {len(chosen)} drawn with seed {asked.seed}")
    part, parts = map(int, asked.part.split("/"))  # faults of one variant stay together: its right cases run once
    chosen = sorted(chosen, key=lambda fault: variants(fault["file"]))
    chosen = chosen[len(chosen) * part // parts : len(chosen) * (part + 1) // parts]
    rows, right_ones = [], set()
    with tempfile.TemporaryDirectory() as folder:
        tree = copied(Path(folder))
        for fault in chosen:
            path, began, by, says = tree / fault["file"], time.monotonic(), "", ""
            right = path.read_text()
            for variant in variants(fault["file"]):
                if variant not in right_ones and (says := found(tree, variant)):
                    print(f"{variant} finds a fault where there is none: {says}")
                    return 2
                right_ones.add(variant)
                path.write_text(right.replace(fault["old"], fault["new"]))
                says = found(tree, variant)
                path.write_text(right)
                if says.startswith("RuntimeError: gcc"):
                    print(f"{fault['id']} does not compile: {says}")
                    return 2
                if says:
                    by = variant
                    break
            rows.append(
                {"id": fault["id"], "file": fault["file"], "seen": fault["seen"], "by": by, "says": says,
                 "seconds": round(time.monotonic() - began, 1)}
            )  # fmt: skip
            print(f"{rows[-1]['seconds']:7.1f} s  {fault['id']:24} {by or 'NOT FOUND'}: {says}"[:160], flush=True)
            if asked.json:
                table = {"bank": len(faults), "seed": asked.seed, "drawn": len(chosen), "run": len(rows),
                         "found": sum(bool(row["by"]) for row in rows), "faults": rows}  # fmt: skip
                asked.json.write_text(json.dumps(table, indent=1) + "\n")
    print(f"{sum(bool(row['by']) for row in rows)} of {len(rows)} found")
    return any(not row["by"] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
