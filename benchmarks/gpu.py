"""Prove, tune and time the kernels on a real GPU, a stage at a time: `make gpu`, `make gpu STAGE=tests`.

    first    a smoke test of each kernel; then D 128, bfloat16, 4k and 16k beside torch's SDPA; under four minutes
    tests    the kernel tests on the device, in parallel: those of the path for Hopper first, then all backends
    judge    the judge's verdict on our kernels, torch's, and those of other packages that are installed
    races    the tests of the path for Hopper under Triton's race detector
    sweep    other tiles than the table's, each proven against it; what is fastest is proposed
    table    every head dimension and length beside SDPA and what else is installed
    papers   the tables that papers print: naive, flash and SDPA
    decode   one query against many keys, in one piece and in pages
    flex     FlexAttention at eight points

Each row is on disk when it is measured: OUT/rows.jsonl, beside report.md, timings.svg, tests.log and the compile cache.
A call ends itself within --minutes; the same call goes on where that one ended, here or, with --resume, on another
machine. A task that hangs, crashes or loses the device fails its own row only. docs/gpu-day.md has the whole procedure.

Needs torch, triton, numpy, pytest, pytest-xdist and matplotlib alone, and no network. Exit codes: 0, all of it is
measured and right; 1, something failed or is wrong; 3, there is no GPU; 4, time ran out before the end.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), *(str(path.parents[1]) for path in ROOT.glob("*/flashpoint*/__init__.py"))]

from benchmarks import gpu_report as report  # noqa: E402
from benchmarks.gpu_day import cache, checkout  # noqa: E402
from benchmarks.gpu_day.device import Cuda  # noqa: E402
from benchmarks.gpu_day.plan import STAGES  # noqa: E402
from benchmarks.gpu_day.record import FILE, Record, current, is_bad  # noqa: E402
from benchmarks.gpu_day.run import Budget, Run  # noqa: E402

DONE, FAILED, NO_GPU, UNFINISHED = 0, 1, 3, 4
FIRST_MINUTES, MINUTES = 3.75, 9.0
CACHE = "cache"  # the folder of its parts


def main(
    arguments: Iterable[str] | None = None, device: Cuda | None = None, clock: Callable[[], float] = time.monotonic
) -> int:
    """Run the stages that are asked for on `device`, the first CUDA device by default, and return an exit code."""
    asked = _parse(arguments)
    minutes = asked.minutes or (FIRST_MINUTES if asked.stages == ["first"] else MINUTES)
    budget = Budget(60 * minutes, clock)
    device = device or Cuda()
    with tempfile.TemporaryDirectory() as installed:
        _set_environment(device, asked.cache, Path(installed), asked.commit)
        run = Run(device, budget, asked.commit)
        try:
            if not run.find_device():
                print("no CUDA device here: nothing was tested and nothing was timed", file=sys.stderr)
                return NO_GPU
            run.open(Record(asked.out / FILE))
            _take_over(run, asked)
            whole = True
            for stage in (name for name in STAGES if name in asked.stages):
                if budget.left <= 0:
                    whole = False
                    break
                whole &= run.stage(stage)
                _save(run, asked)
            bad = any(is_bad(row) for row in run.done().values())
        finally:
            run.close()
    return FAILED if bad else DONE if whole else UNFINISHED


def _parse(arguments: Iterable[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"{', '.join(STAGES)}; `first` by default")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="where the record is, or will be")
    parser.add_argument("--resume", type=Path, help="take over the rows and compiled kernels of another OUT")
    parser.add_argument("--minutes", type=float, help=f"end within these; {MINUTES:g}, for `first` {FIRST_MINUTES:g}")
    parser.add_argument("--again", action="store_true", help="measure again what failed or was wrong")
    parser.add_argument(
        "--cache", type=Path, default=Path(tempfile.gettempdir()) / "flashpoint-gpu-cache",
        help="where Triton keeps compiled kernels; outside OUT, which has them packed",
    )  # fmt: skip
    parser.add_argument("--cache-mib", type=int, default=40, help="how much of them OUT has at most")
    parser.add_argument("--commit", default=checkout.commit(), help="what is checked out, where there is no git")
    asked = parser.parse_args(None if arguments is None else list(arguments))
    if unknown := set(asked.stages) - set(STAGES):
        parser.error(f"no stage: {', '.join(sorted(unknown))}; the stages are {', '.join(STAGES)}")
    asked.stages = asked.stages or ["first"]
    if asked.resume and not (asked.resume / FILE).exists():
        parser.error(f"--resume: {asked.resume} has no {FILE}")
    return asked


def _set_environment(device: Cuda, compiled: Path, installed: Path, commit: str) -> None:
    """Set what all child processes inherit: our packages, their version, and where Triton keeps what it compiles."""
    described = checkout.pretend_installed(installed, f"0+{commit[:10]}")
    variables = {
        **device.environment(),
        "TRITON_CACHE_DIR": str(compiled.resolve()),
        "PYTHONPATH": checkout.python_path(described),
    }
    sys.path.append(described)  # guarded processes get this list
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _take_over(run: Run, asked: argparse.Namespace) -> None:
    """Bring rows and compiled kernels from another OUT, and say which rows do not count here."""
    if asked.resume:
        compiled = cache.unpack(asked.resume / CACHE, asked.cache)
        brought = run.record.bring(asked.resume / FILE)
        print(f"{brought} rows and {compiled} compiled kernels brought from {asked.resume}", flush=True)
    if asked.again:
        run.measure_failures_again()
    rows = run.record.rows
    here = {id(row) for row in current(rows, run.environment)}
    others = Counter(row["environment"]["commit"][:10] for row in rows if id(row) not in here)
    for commit, count in others.items():
        print(f"{count} rows of commit {commit} are of other sources, versions or devices: kept, and measured again")


def _save(run: Run, asked: argparse.Namespace) -> None:
    """Write what is made of the record, and the compile cache."""
    run.record.reload()
    report.write(asked.out, run.device.sizes)
    packed, left = cache.pack(asked.cache, asked.out / CACHE, asked.cache_mib)
    print(f"written: {asked.out / report.FILE}; {packed} compiled kernels packed, {left} left out", flush=True)


if __name__ == "__main__":
    sys.exit(main())
