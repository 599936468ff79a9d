"""Two cases are timed alternately in rounds, and rounds during which other programs run do not count."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from flashpoint_kernels.reproduction import bench
from flashpoint_kernels.timing import Case
from tests.conftest import DEVICE


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


def test_rounds_beside_other_programs_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (
        Case(backend=name, batch=1, q_heads=1, q_len=64, head_dim=16, dtype="float32") for name in ("naive", "tiled")
    )

    def ratio(rounds: list[tuple[float, bool]]) -> tuple[float, list[str]]:
        left = iter(rounds)

        def row(case: Case, device: str) -> dict[str, Any]:
            ms, busy = next(left) if case is a else (1.0, False)
            return {"ms": ms, "busy": busy}

        monkeypatch.setattr(bench, "_measured", row)
        runner, made = bench.Bench("cpu"), []

        def watched() -> Generator[dict[str, object], None, None]:
            made.append((yield from runner.in_turn(a, b)))

        list(watched())
        return made[0], runner.marks

    assert ratio([(3.0, False), (90.0, True), (4.0, False), (5.0, False), (80.0, True)]) == (4.0, [])
    times, marks = ratio([(3.0, False), (90.0, True), (4.0, False), (70.0, True), (80.0, True)])
    assert (times, marks) == (70.0, ["3 of 5 rounds of naive and tiled, busy"])
