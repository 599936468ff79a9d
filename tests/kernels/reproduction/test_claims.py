"""`reproduce` gives measurements and a verdict for each tested claim; slow claims run here with smaller sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashpoint_kernels.reproduction import bench, claims
from flashpoint_kernels.timing import Case, Timing

CPU_ALONE = pytest.mark.skipif(torch.cuda.is_available(), reason="tests the output of a machine without a GPU")


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


@pytest.mark.parametrize("mark", [{"busy": True}, {"ms_p80": 3.0}, {"peak_bytes_low": True}])
def test_a_claim_on_a_marked_row_neither_passes_nor_fails(
    monkeypatch: pytest.MonkeyPatch, mark: dict[str, Any]
) -> None:
    quiet = {"ms": 1.0, "ms_p20": 1.0, "ms_p80": 1.1, "busy": False, "peak_bytes_low": False, "peak_bytes": 1 << 20}
    measured: list[str] = []

    def row(case: Case, device: str, naive_ms: float | None = None) -> dict[str, Any]:
        measured.append(case.backend)
        marked = case.backend == "naive"
        return (
            quiet
            | {"direction": case.direction, "backend": case.backend, "q_len": case.q_len}
            | (mark if marked else {})
        )

    monkeypatch.setattr(bench, "_measured", row)
    monkeypatch.setattr(claims, "peak_of", lambda device, dtype: bench)
    running = claims._reproduced([claim for claim in claims.CLAIMS if claim.name in ("table", "equations")], "cpu")
    results = {}
    for event in running:
        if event["type"] == "verdict":
            results[event["name"]] = event
            if len(results) == 2:
                break
    assert results["table"]["verdict"] == "needs a quiet machine"
    assert "forward of naive, N 512, " in results["table"]["how"]
    assert results["equations"]["verdict"] == "PASS", "it times nothing"
    assert measured.count("naive") == 2 * 3, "each marked row is measured again"
