"""Prove, tune and time the kernels on a real GPU: `make gpu`.

In stages, each in less than nine minutes, each saving what it has as it goes and going on from there when it is started
again (`--stages sweep`), in benchmarks/results/gpu-<device>.json:

    compile   every variant of this architecture, in 16 processes, and what the compiler made of them
    tests     the kernel tests on the device, the general path and, on sm_90, the path of hopper.py
    sweep     other tiles than the table's, each proven against it; what is fastest is proposed as a table
    timings   forward and backward beside torch's SDPA, FlexAttention, and what else can be imported; ratios and a plot

Needs torch, triton, numpy, pytest and matplotlib alone. Exits with 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # read when kernels are defined

import torch  # noqa: E402

from benchmarks import gpu_report as report  # noqa: E402
from flashpoint_kernels import Options, Problem  # noqa: E402
from flashpoint_kernels.timing import Timing, describe, run_grid  # noqa: E402
from flashpoint_kernels.timing.clock import clock_of  # noqa: E402
from flashpoint_kernels.triton_backend import aot, launch  # noqa: E402
from flashpoint_kernels.triton_backend.calls import Call  # noqa: E402
from flashpoint_kernels.triton_backend.config import chip_of, config_for, table_of  # noqa: E402
from flashpoint_kernels.triton_backend.configurations import Config, Tile  # noqa: E402
from flashpoint_kernels.triton_backend.shipped import all_of  # noqa: E402

DEVICE = "cuda"
STAGE_SECONDS = 500  # of the nine minutes that a stage may take; what it is at then is finished
PROCESSES = 16
SWEEP_SEQ = 4096  # the middle of the table's lengths


class Results:
    """The file of one device: what a stage has found so far, saved at every step."""

    def __init__(self, path: Path, environment: dict[str, Any]) -> None:
        self.path = path
        self.found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        if self.found.get("environment", {}).get("commit") != environment["commit"]:
            self.found = {}  # of other kernels
        self.found["environment"] = environment
        self.until = time.monotonic() + STAGE_SECONDS

    def save(self, **found: Any) -> None:
        self.found |= found
        self.path.write_text(json.dumps(self.found, indent=1) + "\n")

    @property
    def late(self) -> bool:
        return time.monotonic() > self.until


def compile_stage(results: Results) -> bool:
    arch = table_of(chip_of(torch.device(DEVICE)))
    reports, wrong = [], []
    for made in aot.compile_all(all_of(arch), PROCESSES):
        reports.append(asdict(made))
        wrong += [f"{made.kernel} {made.dtype} D {made.head_dim} level {made.level}: {f}" for f in aot.faults(made)]
        results.save(compile={"arch": arch, "faults": wrong, "kernels": reports})
    print(f"compile: {len(reports)} variants for sm_{arch}, {len(wrong)} faults", *wrong, sep="\n  ")
    return not wrong


def tests_stage(results: Results) -> bool:
    files = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tests/kernels").glob("test_triton_*.py"))
    files.append("tests/kernels/test_nano.py")
    paths = {"general": "0", **({"hopper": "1"} if chip_of(torch.device(DEVICE)).arch == 90 else {})}
    found = {}
    for name, asked in paths.items():
        env = {**os.environ, "FLASHPOINT_TEST_DEVICE": "cuda", "FLASHPOINT_HOPPER": asked}
        env["PYTHONPATH"] = str(ROOT / "kernels")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not full", *files]
        try:
            run = subprocess.run(
                command, cwd=ROOT, env=env, capture_output=True, text=True, check=False,
                timeout=max(results.until - time.monotonic(), 1),
            )  # fmt: skip
            print(run.stdout[-4000:], run.stderr[-2000:])
            found[name] = {"exit_code": run.returncode, "summary": run.stdout.strip().splitlines()[-1:]}
        except subprocess.TimeoutExpired:
            found[name] = {"exit_code": 124, "summary": ["the stage's time was over"]}
        results.save(tests=found)
    return all(run["exit_code"] == 0 for run in found.values())


@dataclass(frozen=True)
class Trial:
    """One kernel with one tile (None: the table's) on a causal bfloat16 problem of `shape`, (B, H, S, D)."""

    kernel: str
    shape: tuple[int, int, int, int]
    device: str
    tile: Tile | None = None

    @property
    def config(self) -> Config:
        return config_for(torch.device(self.device), "bfloat16", self.shape[-1], self.shape[-1], 0, False)

    def calls(self) -> tuple[list[Call], list[torch.Tensor]]:
        """The calls of the kernel, and what they write."""
        device = torch.device(self.device)
        generator = torch.Generator(device).manual_seed(0)
        tensors = {
            name: torch.randn(self.shape, generator=generator, device=device, dtype=torch.bfloat16)
            for name in ("q", "k", "v", "do")
        }
        config = replace(self.config, **{self.kernel: self.tile}) if self.tile else self.config
        options = Options(causal=True, return_lse=True)
        forward = Problem.create({name: tensors[name] for name in "qkv"}, options)
        if self.kernel == "forward":
            return list(launch.forward_calls([forward], config)), list(forward.outputs.values())
        launch.forward([forward])  # what the gradients start from is the same for every tile
        backward = Problem.create({**tensors, **forward.outputs}, options, "backward")
        calls = list(launch.backward_calls([backward], [launch.scratch_of(backward)], config))
        for call in calls:
            if call.kernel.__name__ == "attention_delta":
                call.run()
        mine = [call for call in calls if call.kernel.__name__ == f"attention_{self.kernel}"]
        return mine, [t for name, t in backward.outputs.items() if (name == "dq") == (self.kernel == "backward_q")]

    def compile(self) -> None:
        """In a process of its own, into the cache on disk that the sweep then loads from."""
        for call in self.calls()[0]:
            call.compile()

    def time(self, repeats: int = 20) -> tuple[float, list[torch.Tensor]]:
        """(median milliseconds, the answers)."""
        calls, outputs = self.calls()
        for call in calls:
            call.args = cache(call.args)  # made once, outside the time

        def run() -> None:
            for call in calls:
                call.run()

        run()
        return median(clock_of(self.device).time(run, repeats)), outputs


def sweep_stage(results: Results) -> bool:
    trials: list[dict[str, Any]] = results.found.get("sweep", {}).get("trials", [])
    done = {(t["kernel"], t["head_dim"], t["block_m"], t["block_n"], t["num_warps"], t["num_stages"]) for t in trials}
    device = f"{DEVICE}:{torch.cuda.current_device()}"
    for kernel, dim in product(report.SWEEP, report.DIMS):
        table = Trial(kernel, (report.TOKENS // SWEEP_SEQ, report.WIDTH // dim, SWEEP_SEQ, dim), device)
        shipped: Tile = getattr(table.config, kernel)
        asked = [shipped, *(tile for tile in report.candidates(kernel) if tile != shipped)]
        asked = [tile for tile in asked if (kernel, dim, *asdict(tile).values()) not in done]
        if not asked or results.late:
            continue
        truth = table.time()[1]
        with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
            compiling = {pool.submit(Trial.compile, trial): trial for trial in (replace(table, tile=t) for t in asked)}
            for compiled in as_completed(compiling):
                trial = compiling[compiled]
                trials.append(outcome(trial, compiled, truth, trial.tile == shipped))
                best = report.proposal(trials)
                results.save(sweep={"trials": trials, "best": best, "proposed": report.configuration(best)})
                if results.late:
                    pool.shutdown(cancel_futures=True)
                    break
    print("sweep: proposed for configurations.py:", results.found["sweep"]["proposed"], sep="\n")
    return not any("wrong_by" in trial for trial in trials)


def outcome(trial: Trial, compiled: Future[None], truth: list[torch.Tensor], shipped: bool) -> dict[str, Any]:
    """A row of the sweep: milliseconds, or why there are none."""
    assert trial.tile is not None
    row = {"kernel": trial.kernel, "head_dim": trial.shape[-1], **asdict(trial.tile), "shipped": shipped, "ms": None}
    try:
        compiled.result()
        ms, answers = trial.time()
    except Exception as error:  # it does not fit, or the compiler gives up: another tile may
        return row | {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    off = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(answers, truth, strict=True))
    # A tile changes the order of sums: a few roundings of bfloat16. More, or a NaN, is a miscompilation.
    return row | ({"ms": ms} if off < 0.02 else {"wrong_by": off})


def timings_stage(results: Results) -> bool:
    rows: list[dict[str, Any]] = results.found.get("timings", {}).get("rows", [])
    done = {report.key(row) for row in rows}
    for deterministic in (False, True):
        cases = [
            case for case in report.timing_cases()
            if (not deterministic or (case.backend == "sdpa_flash" and case.direction == "backward"))
            and report.key({**asdict(case), "deterministic": deterministic}) not in done
        ]  # fmt: skip
        torch.use_deterministic_algorithms(deterministic)
        events = run_grid(cases, DEVICE, Timing(max_seconds=0.3)) if cases else iter(())
        for event in events:
            if event["type"] == "device":
                results.save(peaks=event["environment"]["peaks"])
            if event["type"] == "row":
                rows.append({**event["row"], "deterministic": deterministic})
                found = report.ratios(rows)
                results.save(timings={"rows": rows, "times_as_fast_as": found, "levels": report.levels(found)})
                if results.late:
                    break
    torch.use_deterministic_algorithms(False)
    report.plot(rows, results.found["environment"]["device"], results.path.with_suffix(".svg"))
    print(json.dumps({name: results.found["timings"][name] for name in ("times_as_fast_as", "levels")}, indent=1))
    return True


STAGES: dict[str, Callable[[Results], bool]] = {
    "compile": compile_stage,
    "tests": tests_stage,
    "sweep": sweep_stage,
    "timings": timings_stage,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "no CUDA device here: nothing was compiled, nothing was tested and nothing was timed\n")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    environment = describe(DEVICE) | {
        "commit": commit.stdout.strip() or "unknown",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / f"gpu-{report.file_name(environment['device'])}.json"
    with tempfile.TemporaryDirectory() as known:
        # Rows name the version of what they timed, and here the package need not be installed.
        metadata = Path(known) / "flashpoint-0.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: flashpoint\nVersion: 0+{environment['commit'][:10]}\n")
        sys.path.append(known)
        well = [STAGES[name](Results(path, environment)) for name in asked.stages]
    print(f"written: {path}")
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(main())
