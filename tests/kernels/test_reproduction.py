"""The claims themselves, made smaller where they take long: each measures something, and has a verdict."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch

from flashpoint_kernels.reproduction import bench, claims
from flashpoint_kernels.reproduction.errors import BOUND, errors
from flashpoint_kernels.timing import Case, Timing
from tests.conftest import DEVICE

CPU_ALONE = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU says")


def verdicts(*only: str) -> dict[str, dict[str, object]]:
    events = list(claims.reproduce(only))
    assert [event["type"] for event in events[:2]] == ["environment", "claim"]
    return {event["name"]: event for event in events if event["type"] == "verdict"}


def test_every_claim_has_a_name_of_its_own_and_a_source() -> None:
    assert len({claim.name for claim in claims.CLAIMS}) == len(claims.CLAIMS) == 13
    with pytest.raises(ValueError, match="claim 'fast' does not exist"):
        claims.reproduce(["fast"])


def test_errors_are_those_from_pytorch_and_from_float64() -> None:
    found = errors(str(DEVICE))
    assert {"torch", "tiled"} <= found.keys()
    for tensors in found.values():
        assert tensors.keys() == {"o", "dq", "dk", "dv"}
        for f in tensors.values():
            assert 0 < f["exact"] <= max(BOUND, f["its"])
            assert f["torch"] <= f["exact"] + f["its"]


@pytest.mark.full  # test_triton_options.py judges these kernels, and the test above the measurement
def test_the_triton_kernels_are_as_near_to_float64_as_claimed() -> None:
    found = verdicts("precision")["precision"]
    assert found["verdict"] == "PASS"
    assert "triton: " in str(found["measured"])


def test_the_exercises_are_within_their_bounds() -> None:
    found = verdicts("exercises")["exercises"]
    assert found["verdict"] == "PASS"
    assert [word in str(found["measured"]) for word in ("dropout", "not causal", "ALiBi")] == [True] * 3


@pytest.mark.slow
def test_lengths_and_traffic_measure_each_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "LENGTHS", (64, 256))
    monkeypatch.setattr(claims, "GROWING", (64, 256))
    monkeypatch.setattr(bench, "_TIMING", Timing(max_seconds=0.02, min_repeats=2, warmup_ms=1))
    events = list(claims.reproduce(["lengths", "traffic"]))
    rows = [event["row"] for event in events if event["type"] == "row"]
    assert len(rows) == 2 * 2 * 3  # lengths, directions, backends; the traffic's are among them
    assert all(row["flops"] and row["bytes"] for row in rows)
    found = {event["name"]: event for event in events if event["type"] == "verdict"}
    assert "at T 256: forward" in found["lengths"]["measured"]
    assert "naive: memory ×" in found["traffic"]["measured"]


@CPU_ALONE
def test_what_needs_a_gpu_says_so() -> None:
    found = verdicts("cudnn", "flash-attn")
    assert {event["verdict"] for event in found.values()} == {"needs a GPU"}


def test_two_cases_are_timed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "ROUNDS", 2)
    cases = [
        Case(backend=name, batch=1, q_heads=1, q_len=64, head_dim=16, dtype="float32") for name in ("naive", "tiled")
    ]
    ratios = []

    def watched() -> Generator[dict[str, object], None, None]:
        ratios.append((yield from bench.Bench(str(DEVICE)).in_turn(*cases)))

    assert [event["what"] for event in watched()] == [f"naive and tiled in turn, {n} of 2" for n in (1, 2)]
    assert ratios[0] > 0
