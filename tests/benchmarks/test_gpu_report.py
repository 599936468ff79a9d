"""The report of `make gpu` is right for complete and for partial records. All times are made up."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_report as report
from benchmarks.gpu_day import plan
from benchmarks.gpu_day.record import Record

HERE = {
    "device": "made up: no device", "capability": "9.0", "driver": "0", "cuda": "13", "torch": "2", "triton": "3",
    "python": "3.12", "commit": "c" * 40, "sources": "s", "measuring": "m", "tests": "t", "checks": ["forward"],
    "absent": [],
}  # fmt: skip


def made_up(ms: float | None, **more: Any) -> dict[str, Any]:
    """Return the row of a made-up timing of `ms` milliseconds, without nested objects, as `report.ratios` reads it."""
    row = {
        "direction": "forward", "dtype": "bfloat16", "head_dim": 128, "causal": False, "q_heads": 16, "kv_heads": 16,
        "batch": 32, "q_len": 512, "backend": "triton", "deterministic": False,
    }  # fmt: skip
    return {**row, "ms": ms, "tflops_standard": ms and 100 / ms, **more}


def test_the_path_of_hopper_is_a_name_of_its_own() -> None:
    rows = [made_up(2.0), made_up(1.0, hopper=True), made_up(3.0, backend="sdpa_flash")]
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
        made_up(9.0, backend="sdpa_cudnn", batch=1), made_up(None, backend="flex"),  # this backend could not run
    ]  # fmt: skip
    ratios = report.ratios(rows)
    assert ratios == {
        "forward sdpa_cudnn": {"mean": pytest.approx(0.95), "worst": 0.95, "points": 1},
        "forward sdpa_flash": {"mean": pytest.approx(3**0.5), "worst": 1.5, "points": 2},
    }
    assert report.levels(ratios) == {"forward": "goal", "backward": "not measured"}
    assert report.levels({**ratios, "forward flash_attn_3": {"mean": 0.7}})["forward"] == "goal"
    assert report.levels({**ratios, "forward sdpa_cudnn": {"mean": 1.1}})["forward"] == "stretch"
    assert report.levels({**ratios, "forward sdpa_cudnn": {"mean": 0.8}})["forward"] == "floor"
    assert report.levels({**ratios, "forward sdpa_flash": {"worst": 0.99}})["forward"] == "none"
    slow = [made_up(1.0, direction="backward"), made_up(0.8, direction="backward", backend="sdpa_cudnn")]
    slow.append(made_up(1.2, direction="backward", backend="sdpa_flash", deterministic=True))
    assert report.levels(report.ratios(slow))["backward"] == "goal"


def test_the_fastest_tile_is_proposed_beside_the_shipped_one() -> None:
    def trial(kernel: str, dim: int, m: int, ms: float | None, shipped: bool = False) -> dict[str, Any]:
        tile = {"block_m": m, "block_n": 64, "num_warps": 8, "num_stages": 2}
        return {"kernel": kernel, "head_dim": dim, **tile, "ms": ms, "shipped": shipped}

    timed = ((128, 2.0), (32, 3.0), (64, None))
    trials = [trial(kernel, 64, m, ms, m == 32) for kernel in plan.SWEEP for m, ms in timed]
    best = report.proposal([*trials, trial("forward", 128, 64, 1.0)])
    assert (best["forward"][64]["block_m"], best["forward"][64]["shipped_ms"]) == (128, 3.0)
    tile = "Tile(128, 64, 8, 2)"
    lines = [
        f"64: Config({tile}, {tile}, {tile}),",
        f'64: {{"forward": {tile}, "backward_kv": {tile}, "backward_q": {tile}}},',
    ]
    assert report.configuration(best) == "\n".join(lines), "for 128 only one kernel was timed"
    del best["backward_q_hopper"]
    assert report.configuration(best).endswith(f'64: {{"forward": {tile}, "backward_kv": {tile}}},')


def test_what_could_not_be_read_of_a_trial_is_said() -> None:
    rows = rows_of("sweep")
    for row in rows[:3]:
        row["result"]["occupancy"] = "TypeError: 'Constants' object is not a mapping"
    assert "Registers and spills could not be read in 3: TypeError: 'Constants'" in report._sweep(rows)
    assert "could not be read" not in report._sweep(rows_of("sweep"))


def rows_of(stage: str) -> list[dict[str, Any]]:
    """Return a row for every task of a stage, with the fields that benchmarks/gpu_day/record.py describes."""
    results = []
    for group in plan.groups(stage, plan.Sizes(), HERE):
        for n, task in enumerate(group.tasks):
            result: dict[str, Any] = {"ms": 1.0 + n / 100, "tflops_standard": 400.0, "gb_per_s": 4000.0}
            if isinstance(task, plan.Smoke):
                result = {"ok": True, "missing": [], "errors": {"o": [0.001, 0.002]}}
            if isinstance(task, plan.Trial):
                result |= {"shipped": task.tile is None, "registers": 255, "spills": 0}
                result |= dict(zip(TILE, task.tile or (128, 64, 8, 2), strict=True))
            names = plan.OF_OURS if task.ours else plan.OF_PEERS
            results.append(
                {
                    "key": task.key, "stage": stage, "at": "2026-01-01T00:00:00+00:00", "seconds": 1.0,
                    "clocks": {"sm_mhz": [1900, 1980]}, "of": {name: HERE[name] for name in names},
                    "environment": HERE, "task": plan.parameters(task), "result": result,
                }
            )  # fmt: skip
    return results


TILE = ("block_m", "block_n", "num_warps", "num_stages")


@pytest.mark.slow
def test_a_whole_record_makes_every_section(tmp_path: Path) -> None:
    record = Record(tmp_path / "rows.jsonl")
    for stage in plan.TIMED_STAGES:
        for row in rows_of(stage):
            record.append(row)
    message = {"outcome": "failed", "message": "assert 1 == 2"}
    for test, result in (("a", {"outcome": "passed"}), ("b", message)):
        of = {name: HERE[name] for name in (*plan.OF_OURS, "tests")}
        row = {"key": f"test hopper {test}", "stage": "tests", "of": of, "environment": HERE, "at": "2026-01-01"}
        record.append(row | {"result": result})
    record.close()
    report.write(tmp_path)
    written = (tmp_path / "report.md").read_text()
    for title in ("Progress", "Smoke tests", "Levels", "TFLOP/s", "The papers' tables", "Decode", "Sweep", "Tests"):
        assert f"\n## {title}\n" in written
    assert "| hopper | 1 | 1 | 0 |" in written
    assert "`test hopper b`: assert 1 == 2" in written
    assert "sm_mhz 1900 to 1980" in written
    assert (tmp_path / "timings.svg").read_text().count('id="axes_') == 12
    for stage in plan.TIMED_STAGES:
        planned = len({row["key"] for row in rows_of(stage)})
        assert f"| {stage} | {planned} | {planned} | 0 |" in written


def test_a_partial_record_says_what_is_there(tmp_path: Path) -> None:
    """Rows of our kernels count only if measured with the newest sources; rows of other libraries always count."""
    rows = rows_of("first")
    ours = [row for row in rows if row["key"].endswith(" triton")]
    peers = [row for row in rows if row["key"].endswith(" sdpa_cudnn")]
    older = [
        {**row, "of": row["of"] | {"sources": "older"}, "environment": HERE | {"sources": "older"}} for row in ours
    ]
    fails = {**ours[1], "failed": "no answer within 60 s"}
    del fails["result"]
    written = report.text(
        [*older, peers[0], {**rows[0], "result": {**rows[0]["result"], "ok": False}}, ours[0], fails], plan.Sizes()
    )
    assert f"4 rows, 2026-01-01T00:00:00+00:00 to 2026-01-01T00:00:00+00:00; {len(older)} more of other" in written
    assert f"| first | {len(rows)} | 4 | 2 |" in written
    assert "| forward | WRONG | o 0.001 (0.002) |" in written
    assert "| forward sdpa_cudnn | " in written
    assert f"`{fails['key']}`: no answer within 60 s" in written
    assert "## Sweep" not in written


def test_nothing_measured_is_said(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    report.write(tmp_path)
    assert "Nothing has been measured" in (tmp_path / "report.md").read_text()
    report.plot([], "made up: no device", tmp_path / "empty.svg")
    assert (tmp_path / "empty.svg").exists()
