"""The judge catches and names the corpus's wrong kernels, and does not blame its right kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import flashpoint_kernels
from tests.judge.corpus import RIGHT, WRONG

SHAPE = {"q_heads": 4, "kv_heads": 2, "q_len": 33, "kv_len": 77, "head_dim": 64, "causal": True}
QUICK_WRONG = ("finite_start", "top_left")
QUICK_RIGHT = ("online",)
MEASURED = Path(__file__).parents[2] / "benchmarks/results/judge-corpus.json"


def _rows() -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(MEASURED.read_text())["rows"]}


def _caught(name: str, **arguments: Any) -> None:
    wrong = WRONG[name]
    report = flashpoint_kernels.judge(wrong.function, quick=True, **arguments)
    codes = [cause.code for cause in report.causes]
    assert report.verdict == "wrong", f"{name} ({wrong.text}) was not caught: {report.lines()}"
    assert set(codes) & set(wrong.codes), f"{name} was named {codes}, not {wrong.codes}"


def test_the_corpus_is_as_large_as_the_page_says():
    assert len([name for name in WRONG if not name.endswith("_half")]) >= 40
    assert any(name.endswith("_half") for name in WRONG)
    assert len(RIGHT) >= 15


@pytest.mark.parametrize("name", [*QUICK_WRONG, pytest.param("clipped_gradient", marks=pytest.mark.slow)])
def test_a_wrong_kernel_is_caught_and_named(name):
    _caught(name, only=SHAPE, dtype="float32")


@pytest.mark.parametrize("name", [*QUICK_RIGHT, pytest.param("ours", marks=pytest.mark.slow)])
def test_a_right_kernel_is_not_blamed(name):
    report = flashpoint_kernels.judge(RIGHT[name], quick=True, only=SHAPE, dtype="bfloat16", seed=1)
    assert report.verdict in ("right", "imprecise"), report.lines()
    assert report.gradients


def _thirds(names: list[str]) -> list[Any]:
    """Return a pytest parameter for each name: every third is marked `slow`, and runs in CI; the others `full`."""
    return [pytest.param(name, marks=pytest.mark.full if n % 3 else pytest.mark.slow) for n, name in enumerate(names)]


@pytest.mark.parametrize("name", _thirds([n for n in RIGHT if n not in (*QUICK_RIGHT, "ours")]))
def test_each_right_kernel_is_not_blamed(name):
    """On one shape, in all types, no right kernel is judged wrong; `python -m tests.judge.measure` runs all cases."""
    only = SHAPE | {"causal": name != "dropout"}  # which has no parameter causal
    report = flashpoint_kernels.judge(RIGHT[name], quick=True, only=only, seed=2)
    assert report.verdict in ("right", "imprecise"), report.lines()


# A single call may not show the mistake of these kernels: they fail for some inputs, keep state between calls, or race.
BESIDE_OTHERS = {"raises_at_some", "added_gradients", "replay", "gradient_race", "race"}


@pytest.mark.parametrize(
    "name",
    _thirds(
        [
            name
            for name, row in _rows().items()
            if row["wrong"] and row["relation"] == "accuracy" and name not in BESIDE_OTHERS
        ]
    ),
)
def test_each_measured_case_fails_again(name):
    """The smallest failing case of each kernel in judge-corpus.json fails again alone, as with `verify --case`."""
    report = flashpoint_kernels.judge(WRONG[name].function, quick=True, only=_rows()[name]["case"])
    assert report.verdict == "wrong", report.lines()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["same_buffer", "do_strides"])
def test_a_mistake_that_no_single_call_shows_is_named(name):
    _caught(name)
