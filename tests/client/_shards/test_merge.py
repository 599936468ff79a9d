"""Answers of shards with NaN, infinities or no visible key are merged correctly. No server is needed."""

import numpy as np

from flashpoint._shards import merge
from flashpoint._shards.plan import plan
from flashpoint._shards.problem import problem
from flashpoint_contract.schemas.options import AttentionOptions

ZEROS = np.zeros((1, 1, 4, 8), np.float32)
ANSWER = np.ones((1, 1, 4, 8), np.float32)


def merged(answers, steps):
    """Return the result of the generator `steps`: it yields a list of requests once, and receives `answers`."""
    try:
        questions = next(steps)
        assert len(questions) == len(answers)
        steps.send(answers)
    except StopIteration as end:
        return end.value
    raise AssertionError("there were more questions")


def test_a_query_without_a_key_and_with_a_sink_of_minus_infinity_has_no_gradient_there():
    keys = np.zeros((1, 1, 0, 8), np.float32)
    lse = np.full((1, 1, 4), -np.inf, np.float32)  # no visible key, and the sink adds exp(-inf) = 0
    given = {"do": ANSWER, "q": ZEROS, "k": keys, "v": keys, "o": ZEROS, "lse": lse}
    whole = problem(
        {**given, "sinks": np.full(1, -np.inf, np.float32)}, AttentionOptions(grads=("dsinks",)), "backward"
    )
    assert merged([], merge.backward(whole, plan(whole, 2, None)))["dsinks"].tolist() == [0]


def test_infinities_and_nan_are_answered_without_a_warning():
    given = {"q": ZEROS, "k": ZEROS, "v": ZEROS, "sinks": np.full(1, np.nan, np.float32)}
    for lse in (np.inf, -np.inf, np.nan):
        whole = problem(given, AttentionOptions(return_lse=True), "forward")
        answer = [ANSWER, np.full((1, 1, 4), lse, np.float32)]
        actual = merged([answer, answer], merge.forward(whole, plan(whole, 2, (1, 2))))
        assert np.isnan(actual["o"]).all()
        assert np.isnan(actual["lse"]).all()


def test_a_sum_beyond_float16_is_infinite_as_a_servers():
    given = {"do": ZEROS, "q": ZEROS, "k": ZEROS, "v": ZEROS, "o": ZEROS}
    half = {name: t.astype(np.float16) for name, t in given.items()} | {"lse": np.zeros((1, 1, 4), np.float32)}
    whole = problem(half, AttentionOptions(grads=("dq",)), "backward")
    parts = np.full((1, 1, 4, 8), 6e4, np.float16)
    actual = merged([[parts], [parts]], merge.backward(whole, plan(whole, 2, (1, 2))))
    answer = whole.answer("dq", actual["dq"])
    assert answer.dtype == np.float16
    assert np.isposinf(answer).all()


def test_float16_answers_are_rounded_once_after_their_sum():
    random = np.random.default_rng(0)
    given = {name: np.zeros((1, 1, 64, 8), np.float16) for name in "qkv"}
    whole = problem(given, AttentionOptions(return_lse=True), "forward")
    answers = [[random.standard_normal((1, 1, 64, 8)).astype(np.float16),
                random.standard_normal((1, 1, 64)).astype(np.float32)] for _ in range(8)]  # fmt: skip
    actual = merged(answers, merge.forward(whole, plan(whole, 8, (1, 8))))
    lse = np.stack([lse.astype(np.float64) for _, lse in answers])
    weights = np.exp(lse - np.logaddexp.reduce(lse))[..., None]
    exact = (weights * np.stack([o.astype(np.float64) for o, _ in answers])).sum(0)
    spacing = np.spacing(np.abs(exact).astype(np.float16)).astype(np.float64)
    assert (np.abs(actual["o"].astype(np.float64) - exact) <= 0.51 * spacing + 1e-6).all()
