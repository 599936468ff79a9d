"""Prove, tune and time the kernels on a real GPU: `make gpu`.

In stages, each in less than nine minutes, each saving what it has as it goes and going on from there when it is started
again (`--stages sweep`), in benchmarks/results/gpu-<device>.json:

    compile   every variant of this architecture, in 16 processes, and what the compiler made of them
    tests     the kernel tests on the device, of the general path, on sm_90 of that for Hopper, and of all backends
    sweep     other tiles than the table's, each proven against it; what is fastest is proposed as a table
    timings   forward and backward beside torch's SDPA, FlexAttention, and what else can be imported; ratios and a plot

What is there of kernels that have changed since is dropped. An illegal access ends the process, for every launch after
it would fail. What it was seen in is tried again first thing in the next, and taken for the cause where that fails too.

Needs torch, triton, numpy, pytest and matplotlib alone. Exits with 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "contract"), str(ROOT / "kernels")]
if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # read when kernels are defined
    os.environ.pop("FLASHPOINT_HOPPER", None)  # asked for where it is meant

import torch  # noqa: E402

from benchmarks import gpu_report as report  # noqa: E402
from benchmarks import record  # noqa: E402
from flashpoint_kernels import Options, Problem  # noqa: E402
from flashpoint_kernels.timing import Case, Timing, describe, run_grid  # noqa: E402
from flashpoint_kernels.timing.clock import Slices, clock_of  # noqa: E402
from flashpoint_kernels.timing.device import find_peaks, is_lost  # noqa: E402
from flashpoint_kernels.timing.measurement import DeviceLostError  # noqa: E402
from flashpoint_kernels.triton_backend import aot, launch  # noqa: E402
from flashpoint_kernels.triton_backend.calls import Call  # noqa: E402
from flashpoint_kernels.triton_backend.config import chip_of, config_for, hopper_tiles, table_of  # noqa: E402
from flashpoint_kernels.triton_backend.configurations import Config, Tile  # noqa: E402
from flashpoint_kernels.triton_backend.shipped import all_of  # noqa: E402

DEVICE = "cuda"
STAGE_SECONDS = 500  # of the nine minutes that a stage may take; what it is at then is finished
PROCESSES = 16
SWEEP_SEQ = 4096  # the middle of the table's lengths

# Of tests/kernels what runs on FLASHPOINT_TEST_DEVICE; none imports more than torch, triton, numpy and pytest.
TRITON_TESTS = ("test_triton_*.py", "test_nano.py")
BACKENDS_TESTS = tuple(
    f"test_{name}.py" for name in ("torch_fused", "edges", "extremes", "backends", "functional", "ops", "verification")
)


class Results:
    """The file of one device: what a stage has found so far, saved at every step."""

    def __init__(self, path: Path, environment: dict[str, Any]) -> None:
        self.path = path
        self.found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        if self.found.get("environment", {}).get("sources") != environment["sources"]:
            self.found = {}  # of other kernels
        self.found["environment"] = environment
        self.fresh = True  # nothing has been timed in this process yet
        self.begin()

    def begin(self) -> None:
        """A stage, and its time."""
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


def sources(*folders: str) -> str:
    """One SHA-256 of all Python files below folders of the repository: results are of these, committed or not."""
    files = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    each = [f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files]
    return hashlib.sha256("\n".join(each).encode()).hexdigest()


def has_hopper() -> bool:
    return chip_of(torch.device(DEVICE)).arch == 90


def tests_stage(results: Results) -> bool:
    parts = {"general": (TRITON_TESTS, "0"), "backends": (BACKENDS_TESTS, "0")}
    if has_hopper():
        parts["hopper"] = (TRITON_TESTS, "1")
    of = sources("tests/kernels", "tests/support/kernels")
    found = {
        name: run for name, run in results.found.get("tests", {}).items() if (run["exit_code"], run["of"]) == (0, of)
    }
    for name, (patterns, hopper) in parts.items():
        if name in found:
            print(f"tests: {name} has passed already")
        elif not results.late:
            seconds = max(results.until - time.monotonic(), 1)
            found[name] = run_tests(tests_of(patterns), seconds, FLASHPOINT_HOPPER=hopper) | {"of": of}
            results.save(tests=found)
    return all(name in found and found[name]["exit_code"] == 0 for name in parts)


def tests_of(patterns: Sequence[str]) -> list[str]:
    return [str(path.relative_to(ROOT)) for name in patterns for path in sorted((ROOT / "tests/kernels").glob(name))]


def run_tests(files: Sequence[str], seconds: float, **environment: str) -> dict[str, Any]:
    """Run them on the device: pytest's exit code, 124 after `seconds`, and the last line that it has said."""
    environment = {**os.environ, "FLASHPOINT_TEST_DEVICE": "cuda", "PYTHONUNBUFFERED": "1", **environment}
    before = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "contract"), str(ROOT / "kernels"), *([before] if before else [])]
    )
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-m", "not full", *files]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        try:
            code = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False,
                timeout=seconds,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = 124
        output.seek(0)
        said = output.read()
    print(said[-6000:])
    return {"exit_code": code, "summary": said.strip().splitlines()[-1:]}


@dataclass(frozen=True)
class Trial:
    """One kernel with one tile (None: the table's) on a causal bfloat16 problem of `shape`, (B, H, S, D)."""

    kernel: str  # as report.SWEEP has it
    shape: tuple[int, int, int, int]
    device: str
    tile: Tile | None = None

    @property
    def config(self) -> Config:
        dim = self.shape[-1]
        return config_for(torch.device(self.device), "bfloat16", dim, dim, 0, report.of_hopper(self.kernel))

    @property
    def name(self) -> str:
        """Of its tile in a Config."""
        return self.kernel.removesuffix("_hopper")

    def calls(self) -> tuple[list[Call], list[torch.Tensor]]:
        """The calls of the kernel, and what they write."""
        with path_of_hopper(report.of_hopper(self.kernel)):
            return self._calls()

    def _calls(self) -> tuple[list[Call], list[torch.Tensor]]:
        device = torch.device(self.device)
        generator = torch.Generator(device).manual_seed(0)
        tensors = {
            name: torch.randn(self.shape, generator=generator, device=device, dtype=torch.bfloat16)
            for name in ("q", "k", "v", "do")
        }
        config = replace(self.config, **{self.name: self.tile}) if self.tile else self.config
        options = Options(causal=True, return_lse=True)
        forward = Problem.create({name: tensors[name] for name in "qkv"}, options)
        if self.name == "forward":
            return list(launch.forward_calls([forward], config)), list(forward.outputs.values())
        launch.forward([forward])  # what the gradients start from is the same for every tile
        backward = Problem.create({**tensors, **forward.outputs}, options, "backward")
        calls = list(launch.backward_calls([backward], [launch.scratch_of(backward)], config))
        for call in calls:
            if call.kernel.__name__ == "attention_delta":
                call.run()
        mine = [call for call in calls if call.kernel.__name__ == f"attention_{self.kernel}"]
        return mine, [t for name, t in backward.outputs.items() if (name == "dq") == (self.name == "backward_q")]

    def compile(self) -> None:
        """In a process of its own, into the cache on disk that the sweep then loads from."""
        for call in self.calls()[0]:
            call.compile()

    def time(self, repeats: int = 20) -> tuple[float, list[torch.Tensor]]:
        """(median milliseconds, the answers), none of them left over in memory from another trial."""
        calls, outputs = self.calls()
        for output in outputs:
            output.fill_(float("nan"))
        for call in calls:
            call.args = cache(call.args)  # made once, outside the time

        def run() -> None:
            for call in calls:
                call.run()

        run()
        return median(clock_of(self.device).time(run, repeats)), outputs


def sweep_stage(results: Results) -> bool:
    trials = [trial for trial in results.found.get("sweep", {}).get("trials", []) if not trial.get("again")]
    done = {(t["kernel"], t["head_dim"], t["block_m"], t["block_n"], t["num_warps"], t["num_stages"]) for t in trials}
    for kernel, dim in product(report.SWEEP, report.DIMS):
        table = Trial(kernel, (report.TOKENS // SWEEP_SEQ, report.WIDTH // dim, SWEEP_SEQ, dim), DEVICE)
        if report.of_hopper(kernel) and not (has_hopper() and table.name in hopper_tiles(dim, dim)):
            continue
        shipped: Tile = getattr(table.config, table.name)
        asked = [shipped, *(tile for tile in report.candidates(kernel) if tile != shipped)]
        asked = [tile for tile in asked if (kernel, dim, *asdict(tile).values()) not in done]
        if any(t["shipped"] and "error" in t for t in trials if (t["kernel"], t["head_dim"]) == (kernel, dim)):
            continue  # there is nothing to prove the others against
        if not asked or results.late:
            continue
        truth = cache(table.time)
        for trial, compiled in compiled_ahead([replace(table, tile=tile) for tile in asked]):
            trials.append(outcome(trial, compiled, truth, trial.tile == shipped, results.fresh))
            results.fresh = False
            best = report.proposal(trials)
            results.save(sweep={"trials": trials, "best": best, "proposed": report.configuration(best)})
            if "error" in trials[-1] and is_lost(DEVICE):
                raise DeviceLostError({**trials[-1], "skipped": trials[-1]["error"]})
            if results.late:
                break
    print("sweep: proposed for configurations.py:", results.found.get("sweep", {}).get("proposed"), sep="\n")
    return not any("wrong_by" in trial or (trial["shipped"] and "error" in trial) for trial in trials)


def compiled_ahead(trials: Sequence[Trial]) -> list[tuple[Trial, Future[None]]]:
    """Every trial with how its compiling ended. The processes that did it are gone: what is timed has the GPU alone."""
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        return [(trial, pool.submit(Trial.compile, trial)) for trial in trials]


def outcome(
    trial: Trial, compiled: Future[None], truth: Callable[[], tuple[float, list[torch.Tensor]]], shipped: bool,
    fresh: bool,
) -> dict[str, Any]:  # fmt: skip
    """A row of the sweep: milliseconds, or why there are none; `fresh`: it is the first of its process.

    To be tried `again` where another may be to blame: what ran before in this process, or in the one that compiled.
    """
    assert trial.tile is not None
    row = {"kernel": trial.kernel, "head_dim": trial.shape[-1], **asdict(trial.tile), "shipped": shipped, "ms": None}
    try:
        compiled.result()
        exact = truth()[1]
        ms, answers = trial.time()
    except Exception as error:  # it does not fit, or the compiler gives up: another tile may
        row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        elsewhere = isinstance(compiled.exception(), (torch.AcceleratorError, BrokenExecutor))
        return row | ({"again": True} if elsewhere or (not fresh and is_lost(trial.device)) else {})
    off = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(answers, exact, strict=True)]
    # A tile changes the order of sums: a few roundings of bfloat16. More, or a NaN, is a miscompilation.
    wrong = [each for each in off if not each < 0.02]
    return row | ({"wrong_by": wrong[0]} if wrong else {"ms": ms})


def timings_stage(results: Results) -> bool:
    rows = [row for row in results.found.get("timings", {}).get("rows", []) if not row.get("again")]
    done = {report.key(row) for row in rows}
    for _ in find_peaks(DEVICE, "bfloat16", Slices(20)):  # cuBLAS refuses to work while it is asked to be deterministic
        pass
    for each in report.passes(has_hopper()):
        marks = {"deterministic": each.deterministic, "hopper": each.hopper}
        cases = [case for case in each.cases if report.key({**asdict(case), **marks}) not in done]
        if not cases or results.late:
            continue
        with asked_for(**marks):
            for row in timed(results, cases):
                rows.append({**row, **marks})
                found = report.ratios(rows)
                on_hopper = report.ratios(rows, "triton hopper")
                results.save(
                    timings={
                        "rows": rows, "times_as_fast_as": found, "levels": report.levels(found),
                        "hopper": {"times_as_fast_as": on_hopper, "levels": report.levels(on_hopper)},
                    }
                )  # fmt: skip
    report.plot(rows, results.found["environment"]["device"], results.path.with_suffix(".svg"))
    print(json.dumps({name: x for name, x in results.found.get("timings", {}).items() if name != "rows"}, indent=1))
    return True


@contextmanager
def path_of_hopper(asked: bool) -> Iterator[None]:
    os.environ["FLASHPOINT_HOPPER"] = str(int(asked))
    try:
        yield
    finally:
        del os.environ["FLASHPOINT_HOPPER"]


@contextmanager
def asked_for(deterministic: bool, hopper: bool) -> Iterator[None]:
    """What is asked of torch and of our own backend, for a while."""
    torch.use_deterministic_algorithms(deterministic)
    memory: Any = torch.utils.deterministic  # whose property mypy does not see
    memory.fill_uninitialized_memory = False  # with NaN, within what is timed
    try:
        with path_of_hopper(hopper):
            yield
    finally:
        memory.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(False)


def timed(results: Results, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """A row a case, while there is time. Raises DeviceLostError after the row of the case that lost it."""
    try:
        for event in run_grid(cases, DEVICE, Timing(max_seconds=0.3)):
            if event["type"] == "device":
                results.save(peaks=event["environment"]["peaks"])
            if event["type"] == "row":
                yield event["row"]
                results.fresh = False
                if results.late:
                    return
    except DeviceLostError as lost:
        yield lost.row if results.fresh else lost.row | {"again": True}
        raise


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
    environment = describe(DEVICE) | {
        "commit": record.commit(),
        "sources": sources("kernels/flashpoint_kernels"),
        "date": record.now(),
    }
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / f"gpu-{record.file_name(environment['device'])}.json"
    with tempfile.TemporaryDirectory() as known:
        # Rows name the version of what they timed, and here the package need not be installed.
        metadata = Path(known) / "flashpoint-0.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: flashpoint\nVersion: 0+{environment['commit'][:10]}\n")
        sys.path.append(known)
        well = run_stages(asked.stages, Results(path, environment))
    print(f"written: {path}")
    return 0 if well else 1


def run_stages(names: Sequence[str], results: Results) -> bool:
    """Whether all went well. None is begun after the device is lost."""
    well = True
    for name in names:
        results.begin()
        try:
            well &= STAGES[name](results)
        except DeviceLostError as lost:
            print(f"{name}: the device is lost to this process; start it again to go on\n  {lost}")
            return False
    return well


if __name__ == "__main__":
    sys.exit(main())
