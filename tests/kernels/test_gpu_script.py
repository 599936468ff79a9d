"""`make gpu` where there is no GPU: it says so and times nothing; and what it plans and reports, on made-up figures."""

import subprocess
import sys
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks import gpu_report as report
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
def test_without_a_gpu_it_exits_with_2_and_writes_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--out", str(tmp_path / "results")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "nothing was timed" in run.stderr
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
    line = "64: Config(Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(128, 64, 8, 2)),"
    assert report.configuration(best) == line, "of 128 one kernel alone was timed"


@pytest.mark.parametrize("kernel", report.SWEEP)
def test_a_trial_runs_its_kernel_with_its_tile_and_a_wrong_answer_is_no_time(kernel: str) -> None:
    table = gpu.Trial(kernel, (1, 1, 20, 16), DEVICE)
    tried = replace(table, tile=Tile(16, 32))
    assert {call.constants["BLOCK_M"] for call in tried.calls()[0] if call.programs} == {16}
    truth = table.time(1)[1]
    compiled: Future[None] = Future()
    compiled.set_result(None)
    assert gpu.outcome(tried, compiled, truth, False)["ms"] > 0
    wrong = gpu.outcome(tried, compiled, [t + 1 for t in truth], False)
    assert (wrong["ms"], wrong["wrong_by"] > 0.02) == (None, True)
    refused: Future[None] = Future()
    refused.set_exception(RuntimeError("out of resource: shared memory"))
    assert gpu.outcome(tried, refused, truth, False)["error"] == "RuntimeError: out of resource: shared memory"


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
