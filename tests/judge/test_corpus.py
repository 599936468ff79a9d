"""The judge catches and names the corpus's wrong kernels, and does not blame its right kernels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import flashpoint_kernels
from flashpoint_kernels.judging.cases import random_case
from tests.judge.corpus import RIGHT, WRONG
from tests.judge.seeds import verdicts_of

SHAPE = {"q_heads": 4, "kv_heads": 2, "q_len": 33, "kv_len": 77, "head_dim": 64, "causal": True}
QUICK_WRONG = ("finite_start", "clipped_gradient", "top_left")
QUICK_RIGHT = ("online", "ours")
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


@pytest.mark.parametrize("name", QUICK_WRONG)
def test_a_wrong_kernel_is_caught_and_named(name):
    _caught(name, only=SHAPE, dtype="float32")


def test_a_mistake_is_told_from_one_that_is_equal_in_the_smallest_case():
    """Without keys to the left of the window, a missing window equals a window without a right side."""
    report = flashpoint_kernels.judge(WRONG["window_of_future"].function, quick=True, dtype="float32")
    assert [cause.code for cause in report.causes] == ["window-right"]


def with_scale(scale: Callable[[int, int], float]) -> Callable[..., Tensor]:
    """Return attention whose scale depends on D and Sk in its own way."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        s = q.float() @ k.float().mT * scale(q.shape[3], k.shape[2])
        return (s.softmax(-1) @ v.float()).to(q.dtype)

    return attention


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        (lambda d, m: m**-0.5, "1/sqrt(Sk), not 1/sqrt(D): scores are sqrt(D/Sk) times the right ones"),
        (lambda d, m: (d + 1) ** -0.5, "1/sqrt(D + 1), not 1/sqrt(D): scores are sqrt(D/(D + 1)) times the right ones"),
        (lambda d, m: 1.3 * d**-0.5, "scores are 1.3 times the right ones"),
        (lambda d, m: (1.1 + m / 500) * d**-0.5, "times the right ones, which differs from case to case"),
    ],
)
def test_a_factor_of_the_scores_is_found_with_its_formula(scale: Callable[[int, int], float], said: str) -> None:
    report = flashpoint_kernels.judge(with_scale(scale), quick=True, dtype="float32", layout="bhsd")
    assert [(cause.code, cause.confirmed) for cause in report.causes] == [("scale", True)], report.lines()
    assert said in report.causes[0].text


def wrong_with_two_keys(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    o = RIGHT["formula_in_float32"](q, k, v, causal)
    return o * (1.25 if k.shape[2] < 3 else 1.0)  # type: ignore[no-any-return]


def test_no_cause_is_confirmed_by_cases_of_one_or_two_keys() -> None:
    """Too many mistakes give the numbers of such cases."""
    report = flashpoint_kernels.judge(wrong_with_two_keys, quick=True, dtype="float32")
    assert report.verdict == "wrong"
    assert [cause.confirmed for cause in report.causes] == [False]


@pytest.mark.parametrize("name", QUICK_RIGHT)
def test_a_right_kernel_is_not_blamed(name):
    report = flashpoint_kernels.judge(RIGHT[name], quick=True, only=SHAPE, dtype="bfloat16", seed=1)
    assert report.verdict in ("right", "imprecise"), report.lines()
    assert report.gradients


def test_a_right_kernel_keeps_every_relation():
    """All cases and relations of one type are judged, also those that need several shapes."""
    report = flashpoint_kernels.judge(RIGHT["half_weights"], quick=True, dtype="float32", seed=4)
    assert report.verdict == "right", report.lines()
    assert report.race is not None
    assert report.calls > report.cases > 100


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in RIGHT if n not in QUICK_RIGHT])
def test_each_right_kernel_is_not_blamed(name):
    """One shape in all types is judged; `python -m tests.judge.measure` judges all cases."""
    report = flashpoint_kernels.judge(RIGHT[name], quick=True, only=SHAPE, seed=2)
    assert report.verdict in ("right", "imprecise"), report.lines()


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 50, 10))
def test_no_right_kernel_is_blamed_on_random_cases(first: int) -> None:
    """Each gets the random cases of ten seeds; `python -m tests.judge.seeds` takes 500 seeds."""
    failures = [failure for _, _, failure in verdicts_of(list(RIGHT), range(first, first + 10))]
    assert [each for each in failures if each is not None] == []


def test_a_random_case_finds_a_wrong_kernel() -> None:
    """So the judgement of random cases can fail."""
    case = random_case(4, ("causal",)).to_dict()
    assert flashpoint_kernels.judge(WRONG["no_rescale"].function, only=case | {"kv_len": 300}).verdict == "wrong"


# Wrong only beside other calls: they refuse inputs that they accept elsewhere, add to or repeat an answer, or race.
BESIDE_OTHERS = {"raises_at_some", "added_gradients", "replay", "gradient_race", "race"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        name
        for name, row in _rows().items()
        if row["wrong"] and row["relation"] == "accuracy" and name not in BESIDE_OTHERS
    ],
)
def test_each_measured_case_fails_again(name):
    """The smallest failing case of the record fails alone, as `--case` runs it."""
    report = flashpoint_kernels.judge(WRONG[name].function, quick=True, only=_rows()[name]["case"])
    assert report.verdict == "wrong", report.lines()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["same_buffer", "do_strides"])
def test_a_mistake_that_no_single_call_shows_is_named(name):
    _caught(name)
