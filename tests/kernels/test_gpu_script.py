"""`make gpu` where there is no GPU: it says so and times nothing; and what it plans and reports, on made-up figures."""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu, record
from benchmarks import gpu_report as report
from flashpoint_kernels.timing.case import ROW_FIELDS, Case
from flashpoint_kernels.timing.measurement import DeviceLostError
from flashpoint_kernels.triton_backend.configurations import Tile
from tests.conftest import DEVICE

ROOT = Path(__file__).parent.parent.parent


def made_up(ms: float | None, **more: Any) -> dict[str, Any]:
    """A row with figures that no device has given."""
    row = {
        "direction": "forward", "dtype": "bfloat16", "head_dim": 128, "causal": False, "q_heads": 16, "kv_heads": 16,
        "q_len": 512, "backend": "triton", "deterministic": False,
    }  # fmt: skip
    return {**row, "ms": ms, "tflops_standard": ms and 100 / ms, **more}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_exits_with_2_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path / "results")])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 2
    assert "nothing was timed" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_the_table_has_every_point_once_and_fits_a_gpu() -> None:
    cases = report.timing_cases()
    assert len({(*case.problem, case.backend) for case in cases}) == len(cases)
    ours = [case for case in cases if case.backend == "triton"]
    points = {(c.direction, c.head_dim, c.causal, c.q_len, c.kv_heads < c.q_heads) for c in ours}
    assert len(points) == 2 * 2 * 6 * (3 + 1)
    for case in cases:
        assert case.batch * case.q_len == report.TOKENS
        assert case.q_heads * case.head_dim == report.WIDTH
        scores = 2 * case.batch * case.q_heads * case.q_len * case.kv_len
        assert case.backend != "sdpa_math" or scores <= 8 << 30


def test_what_levels_are_about_is_timed_first_and_flex_last() -> None:
    for hopper in (False, True):
        passes = report.passes(hopper)
        keys = Counter(
            report.key({**asdict(case), "deterministic": each.deterministic, "hopper": each.hopper})
            for each in passes
            for case in each.cases
        )
        assert set(keys.values()) == {1}
        plain = [case for each in passes for case in each.cases if not (each.deterministic or each.hopper)]
        assert Counter(plain) == Counter(report.timing_cases())
        assert {case.backend for case in passes[0].cases} == {"triton", "sdpa_flash", "sdpa_cudnn"}
        assert passes[1].deterministic
        assert {(case.backend, case.direction) for case in passes[1].cases} == {("sdpa_flash", "backward")}
        assert {case.backend for case in passes[-1].cases} == {"flex"}
        twice = [case for each in passes if each.hopper for case in each.cases]
        assert twice == [case for case in report.timing_cases() if case.backend == "triton" and hopper]


def test_the_path_of_hopper_is_a_name_of_its_own() -> None:
    rows = [made_up(2.0), made_up(1.0, hopper=True), made_up(3.0, backend="sdpa_flash")]
    assert len({report.key(row) for row in rows}) == 3
    assert {name: each["mean"] for name, each in report.ratios(rows).items()} == {
        "forward triton hopper": pytest.approx(0.5), "forward sdpa_flash": pytest.approx(1.5),
    }  # fmt: skip
    assert {name: each["mean"] for name, each in report.ratios(rows, "triton hopper").items()} == {
        "forward triton": pytest.approx(2.0), "forward sdpa_flash": pytest.approx(3.0),
    }  # fmt: skip


def test_ratios_compare_the_same_point_alone_and_levels_follow_from_them() -> None:
    rows = [
        made_up(1.0), made_up(2.0, q_len=1024),
        made_up(2.0, backend="sdpa_flash"), made_up(3.0, q_len=1024, backend="sdpa_flash"),
        made_up(0.95, backend="sdpa_cudnn"), made_up(9.0, backend="sdpa_cudnn", causal=True),
        made_up(None, backend="flex"),  # could not run
    ]  # fmt: skip
    found = report.ratios(rows)
    assert found == {
        "forward sdpa_cudnn": {"mean": pytest.approx(0.95), "worst": 0.95, "points": 1},
        "forward sdpa_flash": {"mean": pytest.approx(3**0.5), "worst": 1.5, "points": 2},
    }
    assert report.levels(found) == {"forward": "goal", "backward": "not measured"}
    assert report.levels({**found, "forward flash_attn_3": {"mean": 0.7}})["forward"] == "goal"
    assert report.levels({**found, "forward sdpa_cudnn": {"mean": 1.1}})["forward"] == "stretch"
    assert report.levels({**found, "forward sdpa_cudnn": {"mean": 0.8}})["forward"] == "floor"
    assert report.levels({**found, "forward sdpa_flash": {"worst": 0.99}})["forward"] == "none"
    slow = [made_up(1.0, direction="backward"), made_up(0.8, direction="backward", backend="sdpa_cudnn")]
    slow.append(made_up(1.2, direction="backward", backend="sdpa_flash", deterministic=True))
    assert report.levels(report.ratios(slow))["backward"] == "goal"


def test_the_fastest_tile_is_proposed_beside_the_shipped_one() -> None:
    def trial(kernel: str, dim: int, m: int, ms: float | None, shipped: bool = False) -> dict[str, Any]:
        tile = {"block_m": m, "block_n": 64, "num_warps": 8, "num_stages": 2}
        return {"kernel": kernel, "head_dim": dim, **tile, "ms": ms, "shipped": shipped}

    timed = ((128, 2.0), (32, 3.0), (64, None))
    trials = [trial(kernel, 64, m, ms, m == 32) for kernel in report.SWEEP for m, ms in timed]
    best = report.proposal([*trials, trial("forward", 128, 64, 1.0)])
    assert (best["forward"][64]["block_m"], best["forward"][64]["shipped_ms"]) == (128, 3.0)
    tile = "Tile(128, 64, 8, 2)"
    lines = [
        f"64: Config({tile}, {tile}, {tile}),",
        f'64: {{"forward": {tile}, "backward_kv": {tile}, "backward_q": {tile}}},',
    ]
    assert report.configuration(best) == "\n".join(lines), "of 128 one kernel alone was timed"
    del best["backward_q_hopper"]
    assert report.configuration(best).endswith(f'64: {{"forward": {tile}, "backward_kv": {tile}}},')


@pytest.mark.parametrize(
    "kernel",
    [kernel if kernel == "forward" else pytest.param(kernel, marks=pytest.mark.slow) for kernel in report.SWEEP],
)
def test_a_trial_runs_its_kernel_with_its_tile_and_a_wrong_answer_is_no_time(kernel: str) -> None:
    table = gpu.Trial(kernel, (1, 1, 4, 16), DEVICE)
    tried = replace(table, tile=Tile(16, 32))
    ran = [call for call in tried.calls()[0] if call.programs]
    assert {call.constants.BLOCK_M for call in ran} == {16}
    assert [call.kernel.__name__ for call in ran] == [f"attention_{kernel}"]
    truth = table.time(1)
    compiled: Future[None] = Future()
    compiled.set_result(None)
    assert gpu.outcome(tried, compiled, lambda: truth, False, True)["ms"] > 0
    wrong = gpu.outcome(tried, compiled, lambda: (0.0, [t + 1 for t in truth[1]]), False, True)
    assert (wrong["ms"], wrong["wrong_by"] > 0.02) == (None, True)
    refused: Future[None] = Future()
    refused.set_exception(RuntimeError("out of resource: shared memory"))
    row = gpu.outcome(tried, refused, lambda: truth, False, True)
    assert row["error"] == "RuntimeError: out of resource: shared memory"
    assert "again" not in row


@pytest.mark.parametrize("unwritten", [0, 1])
def test_what_a_trial_leaves_unwritten_is_no_answer(unwritten: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory may hold the right answers of the trial before."""
    right = [torch.ones(4), torch.ones(4)]
    left = [t.clone() for t in right]
    call = SimpleNamespace(args=tuple, run=lambda: left[1 - unwritten].copy_(right[0]))
    monkeypatch.setattr(gpu.Trial, "calls", lambda self: ([call], left))
    trial = gpu.Trial("backward_kv", (1, 1, 20, 16), "cpu", Tile(16, 32))
    compiled: Future[None] = Future()
    compiled.set_result(None)
    row = gpu.outcome(trial, compiled, lambda: (0.0, right), False, True)
    assert row["ms"] is None
    assert math.isnan(row["wrong_by"])


@pytest.fixture
def results(tmp_path: Path) -> Iterator[gpu.Results]:
    yield begun(tmp_path)
    torch.use_deterministic_algorithms(False)


def begun(folder: Path, sources: str = "a") -> gpu.Results:
    """As a process that is started begins."""
    return gpu.Results(folder / "gpu.json", {"sources": sources, "device": "made up: no device"})


def test_results_are_of_the_kernels_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(tmp_path).save(sweep={"trials": [1]})
    assert begun(tmp_path).found["sweep"] == {"trials": [1]}
    assert "sweep" not in begun(tmp_path, sources="b").found
    kernels = tmp_path / "kernels"
    (kernels / "deep").mkdir(parents=True)
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    seen = [gpu.sources("kernels")]
    for path in ("deep/a.py", "b.py"):
        (kernels / path).write_text("x = 1\n")
        seen.append(gpu.sources("kernels"))
    (kernels / "b.py").write_text("x = 2\n")
    seen.append(gpu.sources("kernels"))
    assert len(set(seen)) == len(seen)
    (kernels / "c.pyc").write_text("no source")
    assert gpu.sources("kernels") == seen[-1]


def test_a_tree_without_git_is_of_an_unknown_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "ROOT", tmp_path)
    assert record.commit() == "unknown"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert record.commit() == "unknown"


def test_the_tests_of_every_backend_run_on_the_device_and_what_has_passed_is_not_run_again(
    results: gpu.Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[list[str], str]] = []
    codes = iter([0, 1, 124, 0, 0])

    def run(files: list[str], seconds: float, *, FLASHPOINT_HOPPER: str) -> dict[str, Any]:
        assert 0 < seconds <= gpu.STAGE_SECONDS
        ran.append((files, FLASHPOINT_HOPPER))
        return {"exit_code": next(codes), "summary": []}

    monkeypatch.setattr(gpu, "run_tests", run)
    monkeypatch.setattr(gpu, "has_hopper", lambda: True)
    assert not gpu.tests_stage(results)
    assert gpu.tests_stage(begun(tmp_path))
    general, backends, hopper = ran[:3]
    assert ran[3:] == [backends, hopper]
    assert (general[1], backends[1], hopper[1]) == ("0", "0", "1")
    assert general[0] == hopper[0]
    assert {"test_triton_device.py", "test_nano.py"} < {Path(name).name for name in general[0]}
    assert "test_torch_fused.py" in {Path(name).name for name in backends[0]}
    assert len(backends[0]) == len(gpu.BACKENDS_TESTS)
    assert gpu.tests_stage(begun(tmp_path)), "nothing is left"
    assert len(ran) == 5


# Packages that a GPU machine may lack.
ABSENT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("hypothesis", "httpx", "pydantic", "ml_dtypes", "fastapi", "jax", "transformers"):
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Absent())
"""


@pytest.mark.slow
def test_the_tests_that_run_on_a_device_need_no_package_but_those_named(tmp_path: Path) -> None:
    (tmp_path / "absent.py").write_text(ABSENT)
    files = gpu.tests_of([*gpu.TRITON_TESTS, *gpu.BACKENDS_TESTS])
    command = [sys.executable, "-m", "pytest", "-p", "absent", "--collect-only", "-q", "-p", "no:cacheprovider"]
    more = {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "contract"), str(ROOT / "kernels")]),
    }
    run = subprocess.run(
        [*command, *files], cwd=ROOT, env={**os.environ, **more}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout
    assert "test_torch_fused.py" in run.stdout


def test_what_tests_have_said_is_shown_when_their_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The time of a run begins to pass only once its second test hangs, however long pytest takes to start."""
    hangs = tmp_path / "hangs"
    (tmp_path / "test_made_up.py").write_text(
        "import os, pathlib, time\n"
        "def test_passes(): assert os.environ['PYTHONPATH'].endswith(os.pathsep + 'mine')\n"
        "def test_hangs():\n"
        "    if os.environ['FLASHPOINT_HOPPER'] == '1':\n"
        f"        pathlib.Path({str(hangs)!r}).touch()\n"
        "        time.sleep(3600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", "mine")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    file = str(tmp_path / "test_made_up.py")
    assert gpu.run_tests([file], 600, FLASHPOINT_HOPPER="0")["exit_code"] == 0
    capsys.readouterr()
    monkeypatch.setattr(subprocess, "_time", lambda: 1000.0 if hangs.exists() else 0.0)
    cut_off = gpu.run_tests([file], 8, FLASHPOINT_HOPPER="1")
    assert cut_off["exit_code"] == 124
    assert "test_passes PASSED" in capsys.readouterr().out
    assert "test_hangs" in cut_off["summary"][0]


class Lost:
    """A device that is lost by one case, and with it to all that this process runs after."""

    def __init__(self, culprit: Any) -> None:
        self.culprit, self.gone = culprit, False
        self.ran: list[Any] = []

    def __call__(self, what: Any) -> None:
        self.ran.append(what)
        self.gone |= what == self.culprit
        if self.gone:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


class Pool:
    """A pool of processes that is done at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.log.append("begins")

    def submit(self, compile_: Any, trial: gpu.Trial) -> Future[None]:
        self.log.append(trial.tile)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.log.append("ends")

    log: list[Any] = []  # noqa: RUF012


TILES = [Tile(m, 32, warps, stages) for m in (16, 32) for warps in (4, 8) for stages in (1, 2, 3)]


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The sweep of one kernel at one head dimension, on a device that is made up; what its pools have done."""
    Pool.log = []
    monkeypatch.setattr(gpu, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(report, "SWEEP", {"forward": ((16, 32), (32, 32))})
    monkeypatch.setattr(report, "DIMS", (16,))
    return Pool.log


def swept(device: Lost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is timed from here on is on `device`."""

    def time(trial: gpu.Trial) -> tuple[float, list[torch.Tensor]]:
        Pool.log.append(("timed", trial.tile))
        device(trial.tile)
        return 1.0, [torch.ones(2)]

    monkeypatch.setattr(gpu.Trial, "time", time)
    monkeypatch.setattr(gpu, "is_lost", lambda name: device.gone)


def test_nothing_is_timed_while_others_compile(
    sweep: list[Any], results: gpu.Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept(Lost("none"), monkeypatch)
    assert gpu.sweep_stage(results)
    ends = sweep.index("ends")
    assert not any(isinstance(what, tuple) for what in sweep[:ends])
    shipped = gpu.Trial("forward", (1, 1, 1, 16), "cpu").config.forward
    assert {what[1] for what in sweep[ends + 1 :]} == {None, shipped, *TILES}


def test_a_lost_device_ends_the_sweep_and_blames_a_tile_that_fails_alone(
    sweep: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    culprit = TILES[3]
    for _ in range(2):  # the second time it is the first of its process
        swept(Lost(culprit), monkeypatch)
        assert not gpu.run_stages(["sweep", "timings"], begun(tmp_path)), "no stage comes after"
        saved = json.loads((tmp_path / "gpu.json").read_text())["sweep"]["trials"]
        assert "illegal memory access" in saved[-1]["error"]
    assert "again" not in saved[-1]
    assert all(row["ms"] == 1.0 for row in saved[:-1])
    swept(Lost(culprit), monkeypatch)
    assert gpu.sweep_stage(begun(tmp_path))
    saved = json.loads((tmp_path / "gpu.json").read_text())["sweep"]["trials"]
    assert [row["ms"] for row in saved].count(None) == 1
    assert len(saved) == len({tuple(row.values())[:6] for row in saved}) == len(TILES) + 1


def test_a_tile_whose_compiling_process_was_lost_is_tried_again(
    sweep: list[Any], results: gpu.Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept(Lost("none"), monkeypatch)
    lost: Future[None] = Future()
    lost.set_exception(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))
    trial = gpu.Trial("forward", (1, 1, 20, 16), "cpu", TILES[0])
    assert gpu.outcome(trial, lost, trial.time, False, True)["again"]


@pytest.fixture
def grid(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    cases = [
        Case(backend=backend, batch=1, q_heads=1, q_len=n, head_dim=16, direction="backward")
        for n in (16, 32)
        for backend in ("triton", "sdpa_flash")
    ]
    monkeypatch.setattr(report, "timing_cases", lambda: cases)
    monkeypatch.setattr(report, "plot", lambda *_: None)
    monkeypatch.setattr(gpu, "has_hopper", lambda: True)
    monkeypatch.setattr(gpu, "find_peaks", lambda *_: [])
    return cases


def timed_on(device: Lost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every case takes a millisecond on `device`, and is named by what was asked of torch and of us beside it."""

    def run(cases: list[Case], *_: Any) -> Iterator[dict[str, Any]]:
        for case in cases:
            row = {**dict.fromkeys(ROW_FIELDS), **asdict(case)}
            asked = torch.are_deterministic_algorithms_enabled(), os.environ["FLASHPOINT_HOPPER"]
            filled: Any = torch.utils.deterministic
            assert not filled.fill_uninitialized_memory
            try:
                device((case, *asked))
            except torch.AcceleratorError as error:
                raise DeviceLostError(row | {"skipped": str(error)}) from error
            yield {"type": "row", "row": {**row, "ms": 1.0}}

    monkeypatch.setattr(gpu, "run_grid", run)


def test_ours_is_timed_on_both_paths_and_flash_also_when_it_is_deterministic(
    grid: list[Case], results: gpu.Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLASHPOINT_HOPPER", raising=False)
    device = Lost("none")
    timed_on(device, monkeypatch)
    assert gpu.timings_stage(results)
    plain = [(case, False, "0") for case in grid]
    alone = [(case, True, "0") for case in grid if case.backend == "sdpa_flash"]
    hopper = [(case, False, "1") for case in grid if case.backend == "triton"]
    assert device.ran == [*plain, *alone, *hopper]
    assert "FLASHPOINT_HOPPER" not in os.environ
    found = results.found["timings"]
    assert set(found["times_as_fast_as"]) == {
        "backward sdpa_flash", "backward sdpa_flash deterministic", "backward triton hopper",
    }  # fmt: skip
    assert "backward triton" in found["hopper"]["times_as_fast_as"]
    assert gpu.timings_stage(results)
    assert len(device.ran) == 8, "nothing is left"


def test_a_lost_device_ends_the_timings_and_blames_a_case_that_fails_alone(
    grid: list[Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    culprit = (grid[1], False, "0")
    begins = []
    for ended in (False, False, True):
        device = Lost(culprit)
        timed_on(device, monkeypatch)
        assert gpu.run_stages(["timings"], begun(tmp_path)) is ended
        begins.append(device.ran[0])
    assert begins == [(case, False, "0") for case in grid[:3]]
    rows = json.loads((tmp_path / "gpu.json").read_text())["timings"]["rows"]
    assert [row["ms"] for row in rows].count(None) == 1
    assert len(rows) == 8
    assert not any("again" in row for row in rows)


def test_the_plot_has_a_panel_a_direction_head_dimension_and_mask(tmp_path: Path) -> None:
    rows = [
        made_up(ms, q_len=n, backend=backend, head_dim=dim, direction=direction)
        for n, ms in ((512, 1.0), (1024, 0.8))
        for backend in ("triton", "sdpa_flash")
        for dim in (64, 128)
        for direction in ("forward", "backward")
    ]
    report.plot(rows, "made up: no device", tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert drawn.count('id="axes_') == 6
    report.plot([], "made up: no device", tmp_path / "empty.svg")
