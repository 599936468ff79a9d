"""Prove, tune and time the kernels on a real GPU, a stage at a time: `make gpu`, `make gpu STAGE=tests`.

    first    a smoke test of each kernel; then D 128, bfloat16, 4k and 16k beside torch's SDPA; under four minutes
    tests    the kernel tests on the device, in parallel: those of the path for Hopper first, then all backends
    judge    the judge's verdict on our kernels, torch's, and those of other packages that are installed
    races    the tests of the path for Hopper under Triton's race detector
    sweep    other tiles than the shipped ones, each checked against the shipped one; proposes the fastest
    table    every head dimension and length beside SDPA and other installed packages
    papers   the tables that papers print: naive, flash and SDPA
    decode   one query against many keys, in one piece and in pages
    flex     FlexAttention at eight points

Each row is written to OUT/rows.jsonl as soon as it is measured; OUT also has report.md, timings.svg, tests.log and the
compile cache. The command ends within --minutes. The same command later continues where the first one ended, on this
machine or, with --resume, on another one. A task that hangs, crashes or loses the device fails only its own row.
docs/gpu-day.md has the procedure.

Needs only torch, triton, numpy, pytest, pytest-xdist and matplotlib, and no network. Exit codes: 0, everything is
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
from benchmarks.gpu_day.run import Run  # noqa: E402
from benchmarks.record import commit  # noqa: E402

DONE, FAILED, NO_GPU, UNFINISHED = 0, 1, 3, 4
FIRST_MINUTES, MINUTES = 3.75, 9.0
CACHE = "cache"  # the folder of the packed compile cache


def main(
    arguments: Iterable[str] | None = None, device: Cuda | None = None, clock: Callable[[], float] = time.monotonic
) -> int:
    """Run the requested stages on `device`, by default the first CUDA device, and return an exit code."""
    args = _parse(arguments)
    minutes = args.minutes or (FIRST_MINUTES if args.stages == ["first"] else MINUTES)
    device = device or Cuda()
    with tempfile.TemporaryDirectory() as installed:
        _set_environment(device, args.cache, Path(installed), args.commit)
        run = Run(device, 60 * minutes, clock, args.commit)
        try:
            if not run.find_device():
                print("no CUDA device here: nothing was tested and nothing was timed", file=sys.stderr)
                return NO_GPU
            run.record = Record(args.out / FILE)
            _take_over(run, args)
            whole = True
            for stage in (name for name in STAGES if name in args.stages):
                if run.left <= 0:
                    whole = False
                    break
                whole &= run.stage(stage)
                _save(run, args)
            bad = any(is_bad(row) for row in run.done().values())
        finally:
            run.close()
    return FAILED if bad else DONE if whole else UNFINISHED


def _parse(arguments: Iterable[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"{', '.join(STAGES)}; `first` by default")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="where the record is, or will be")
    parser.add_argument("--resume", type=Path, help="take over the rows and compiled kernels of another OUT")
    parser.add_argument("--minutes", type=float, help=f"time limit; {MINUTES:g}, for `first` alone {FIRST_MINUTES:g}")
    parser.add_argument("--again", action="store_true", help="measure rows again that failed or are wrong")
    parser.add_argument(
        "--cache", type=Path, default=Path(tempfile.gettempdir()) / "flashpoint-gpu-cache",
        help="Triton's folder of compiled kernels, outside OUT; OUT has them packed",
    )  # fmt: skip
    parser.add_argument("--cache-mib", type=int, default=40, help="MiB of compiled kernels in OUT, at most")
    parser.add_argument("--commit", default=commit(), help="the commit that runs, where git is missing")
    args = parser.parse_args(None if arguments is None else list(arguments))
    if unknown := set(args.stages) - set(STAGES):
        parser.error(f"no stage: {', '.join(sorted(unknown))}; the stages are {', '.join(STAGES)}")
    args.stages = args.stages or ["first"]
    if args.resume and not (args.resume / FILE).exists():
        parser.error(f"--resume: {args.resume} has no {FILE}")
    return args


def _set_environment(device: Cuda, compiled: Path, installed: Path, version: str) -> None:
    """Set the variables that child processes inherit: paths of our packages, their version, Triton's cache folder."""
    described = checkout.pretend_installed(installed, f"0+{version[:10]}")
    sys.path.append(described)  # the processes that `guard.Guard` starts inherit this list
    for name in ("TRITON_INTERPRET", "FLASHPOINT_HOPPER"):
        os.environ.pop(name, None)
    paths = {"TRITON_CACHE_DIR": str(compiled.resolve()), "PYTHONPATH": checkout.python_path(described)}
    os.environ |= device.environment() | paths


def _take_over(run: Run, args: argparse.Namespace) -> None:
    """Copy rows and compiled kernels from the folder `--resume`, if given.

    Print the number of rows that are measured again, because they come from another device, version or source.
    """
    if args.resume:
        compiled = cache.unpack(args.resume / CACHE, args.cache)
        brought = run.record.bring(args.resume / FILE)
        print(f"{brought} rows and {compiled} compiled kernels brought from {args.resume}", flush=True)
    if args.again:
        run.measure_failures_again()
    rows = run.record.rows
    current_rows = {id(row) for row in current(rows, run.environment)}
    others = Counter(row["environment"]["commit"][:10] for row in rows if id(row) not in current_rows)
    for other, count in others.items():
        print(f"{count} rows of commit {other} are of other sources, versions or devices: kept, and measured again")


def _save(run: Run, args: argparse.Namespace) -> None:
    """Write the report and the plot of the record, and pack the compile cache."""
    run.record.reload()
    report.write(args.out, run.device.sizes)
    packed, left = cache.pack(args.cache, args.out / CACHE, args.cache_mib)
    print(f"written: {args.out / report.FILE}; {packed} compiled kernels packed, {left} left out", flush=True)


if __name__ == "__main__":
    sys.exit(main())
