"""`reproduce` gives measurements and a verdict for each tested claim; slow claims run here with smaller sizes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flashpoint_kernels.reproduction import bench, claims
from flashpoint_kernels.timing import Case, Timing

CPU_ALONE = pytest.mark.skipif(torch.cuda.is_available(), reason="tests the output of a machine without a GPU")


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let claims take as long as they need: a busy machine needs longer than their limits."""
    monkeypatch.setattr(claims.Claim, "limit", math.inf)


def verdicts(*only: str) -> dict[str, dict[str, object]]:
    events = list(claims.reproduce(only))
    assert [event["type"] for event in events[:2]] == ["environment", "claim"]
    return {event["name"]: event for event in events if event["type"] == "verdict"}


def test_every_claim_has_a_name_of_its_own_and_a_source() -> None:
    assert len({claim.name for claim in claims.CLAIMS}) == len(claims.CLAIMS) == 13
    with pytest.raises(ValueError, match="claim 'fast' does not exist"):
        claims.reproduce(["fast"])


@pytest.mark.full  # and not `slow`: other tests check these kernels and how `errors` measures them
def test_the_triton_kernels_are_as_near_to_float64_as_claimed() -> None:
    verdict = verdicts("precision")["precision"]
    assert verdict["verdict"] == "PASS"
    assert "triton: " in str(verdict["measured"])


def test_the_exercises_are_within_their_bounds() -> None:
    verdict = verdicts("exercises")["exercises"]
    assert verdict["verdict"] == "PASS"
    assert [word in str(verdict["measured"]) for word in ("dropout", "not causal", "ALiBi")] == [True] * 3


@pytest.mark.slow
def test_lengths_and_traffic_measure_each_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "LENGTHS", (64, 256))
    monkeypatch.setattr(claims, "GROWING", (64, 256))
    monkeypatch.setattr(bench, "_TIMING", Timing(max_seconds=0.02, min_repeats=2, warmup_ms=1))
    events = list(claims.reproduce(["lengths", "traffic"]))
    rows = [event["row"] for event in events if event["type"] == "row"]
    assert len(rows) == 2 * 2 * 3  # lengths, directions, backends; `traffic` reuses these rows
    assert all(row["flops"] and row["bytes"] for row in rows)
    results = {event["name"]: event for event in events if event["type"] == "verdict"}
    assert "at T 256: forward" in results["lengths"]["measured"]
    assert "naive: memory ×" in results["traffic"]["measured"]


@CPU_ALONE
def test_what_needs_a_gpu_says_so() -> None:
    results = verdicts("cudnn", "flash-attn")
    assert {event["verdict"] for event in results.values()} == {"needs a GPU"}


@pytest.mark.parametrize(
    ("mark", "table", "memory"),
    [
        ({"busy": True}, "needs a quiet machine", "PASS"),
        ({"ms_p80": 3.0}, "needs a quiet machine", "PASS"),
        ({"peak_bytes_low": True}, "PASS", "not measured"),
    ],
)
def test_a_claim_on_a_marked_row_neither_passes_nor_fails(
    monkeypatch: pytest.MonkeyPatch, mark: dict[str, Any], table: str, memory: str
) -> None:
    """A claim about bytes does not depend on marks of times, nor the other way round."""
    quiet = {"ms": 1.0, "ms_p20": 1.0, "ms_p80": 1.1, "busy": False, "peak_bytes_low": False}
    measured: list[str] = []

    def row(case: Case, device: str, naive_ms: float | None = None) -> dict[str, Any]:
        measured.append(case.backend)
        marked = case.backend == "naive"
        return (
            quiet
            | {"direction": case.direction, "backend": case.backend, "q_len": case.q_len}
            | {"peak_bytes": 1 << (30 if marked else 20)}
            | (mark if marked else {})
        )

    monkeypatch.setattr(bench, "_measured", row)
    monkeypatch.setattr(claims, "peak_of", lambda device, dtype: bench)
    running = claims._reproduced(
        [claim for claim in claims.CLAIMS if claim.name in ("table", "memory", "equations")], "cpu"
    )
    results = {}
    for event in running:
        if event["type"] == "verdict":
            results[event["name"]] = event
            if len(results) == 3:
                break
    assert (results["table"]["verdict"], results["memory"]["verdict"]) == (table, memory)
    disturbed = "table" if memory == "PASS" else "memory"
    assert "forward of naive, N " in results[disturbed]["how"]
    assert results["equations"]["verdict"] == "PASS", "it times nothing"
    assert measured.count("naive") == 3 * 3, "each marked row is measured again"


def test_a_claim_whose_time_is_over_says_so_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims.Claim, "limit", property(lambda claim: 60.0 if claim.name == "equations" else 1e-9))
    results = verdicts("precision", "table", "speed", "gpt", "equations")
    over = {name: result["verdict"] for name, result in results.items() if name != "equations"}
    assert over == dict.fromkeys(("precision", "table", "speed", "gpt"), "needs more than 0 s here")
    assert results["equations"]["verdict"] == "PASS"
