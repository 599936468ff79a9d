"""A benchmark of the caller's function judges what it times: no figure for answers that are wrong, kept or late."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashpoint_kernels.timing import Case, Timing, measure
from flashpoint_kernels.timing.checking import Turns, WrongAnswerError, compare, possible
from tests.judge.right import formula_in_float32

QUICK = Timing(max_seconds=0.05, warmup_ms=0.0)
SIZES: dict[str, Any] = {
    "batch": 1, "q_heads": 4, "kv_heads": 2, "q_len": 40, "kv_len": 56, "head_dim": 16, "dtype": "float32"
}  # fmt: skip
_KEPT: dict[Any, Tensor] = {}


def right(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    return formula_in_float32(q, k, v, causal)


def nothing(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    return torch.zeros_like(q) + 0 * (q + k.sum() + v.sum())


def kept_by_address(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    return _KEPT.setdefault(("address", q.data_ptr(), q.requires_grad, causal), right(q, k, v, causal))


def one_behind(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Answer each call with the answer of the call before."""
    o = right(q, k, v, causal)
    before, _KEPT["before"] = _KEPT.get("before", o), o
    return before


def late(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    o = torch.zeros_like(q)
    inputs = [t.detach().clone() for t in (q, k, v)]

    def fill() -> None:
        time.sleep(0.2)
        o.copy_(right(*inputs, causal))

    threading.Thread(target=fill).start()
    return o


class Lazy(Tensor):
    pass


def lazy(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    return right(q, k, v, causal).as_subclass(Lazy)


def halved_gradient(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    o = right(q, k, v, causal)
    return o / 2 + (o / 2).detach()


def in_float64(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    return right(q, k, v, causal).double()


def every_second(first: int) -> Callable[..., Any]:
    """Return a function that is wrong in every second call, from call `first` on."""
    calls = [first]

    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        calls[0] += 1
        return right(q, k, v, causal) * (1 + calls[0] % 2)

    return attention


def timed(kernel: Callable[..., Any] | None, **fields: Any) -> dict[str, Any]:
    running = measure(Case(backend="kernel" if kernel else "cpu", **(SIZES | fields)), timing=QUICK, kernel=kernel)
    while True:
        try:
            next(running)
        except StopIteration as end:
            row: dict[str, Any] = end.value
            return row


@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_right_function_and_our_own_have_figures(direction: str, causal: bool) -> None:
    for kernel in (right, None):
        row = timed(kernel, direction=direction, causal=causal)
        assert row["skipped"] is None
        assert row["ms"] > 0


@pytest.mark.parametrize(
    ("kernel", "fields", "said"),
    [
        (nothing, {}, "o of a timed call is 0"), (nothing, {"direction": "both"}, " of a timed call is "),
        (kept_by_address, {}, "o of a timed call is"), (one_behind, {}, "o of a timed call is"),
        (late, {}, "o of a timed call is 0"), (lazy, {}, "it answers with a Lazy that is no plain torch.Tensor"),
        (halved_gradient, {"direction": "backward"}, " of a timed call is "),
        (in_float64, {}, "o is float64 [1, 4, 40, 16]"),
    ],
)  # fmt: skip
def test_a_function_with_wrong_answers_has_no_figure(kernel: Any, fields: dict[str, Any], said: str) -> None:
    _KEPT.clear()
    row = timed(kernel, **fields)
    assert row["ms"] is row["tflops"] is row["roofline_percent"] is None
    assert row["skipped"].startswith("wrong: ")
    assert said in row["skipped"]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_function_that_is_wrong_in_every_second_call_never_has_a_figure(first: int, direction: str) -> None:
    for _ in range(12):
        assert timed(every_second(first), direction=direction)["ms"] is None


def test_a_rate_beyond_the_peak_is_an_error() -> None:
    possible(1.2, peak=1.0, sheet=None)
    possible(80.0, peak=1.0, sheet=100.0)
    with pytest.raises(WrongAnswerError, match=r"the time of 221 TFLOP/s, but the device's peak is 0[.]5"):
        possible(221.0, peak=0.5, sheet=None)
    with pytest.raises(WrongAnswerError, match="the device's peak is 100"):
        possible(101.0, peak=200.0, sheet=100.0)


def test_wrong_keys_and_values_of_a_large_head_are_not_compared_but_queries_are() -> None:
    case = Case(backend="kernel", batch=1, q_heads=1, q_len=5000, kv_len=4000, head_dim=16, direction="backward")
    inputs = [torch.randn(1, 1, n, 16).bfloat16() for n in (5000, 4000, 4000, 5000)]
    gradients = [torch.full((1, 1, n, 16), 9.0).bfloat16() for n in (5000, 4000, 4000)]
    with pytest.raises(WrongAnswerError, match="dq of a timed call is 9 at"):
        compare(case, inputs, gradients, random.Random(0))


def compare_often(case: Case, inputs: list[Tensor], answers: list[Tensor]) -> None:
    for seed in range(16):
        compare(case, inputs, answers, random.Random(seed))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("batch", "head"), [(0, 0), (1, 0), (0, 3), (1, 1)])
def test_each_sequence_and_head_may_be_compared(direction: str, batch: int, head: int) -> None:
    """An answer that is wrong in one head of one sequence is found by some of the draws."""
    case = Case(backend="kernel", **(SIZES | {"batch": 2, "direction": direction}))
    inputs = [torch.randn(2, h, n, 16) for h, n in ((4, 40), (2, 56), (2, 56), (4, 40))]
    leaves = [t.requires_grad_() for t in inputs[:3]]
    o = right(*leaves)
    answers = [o] if direction == "forward" else list(torch.autograd.grad(o, leaves, inputs[3]))
    inputs, answers = [t.detach() for t in inputs], [t.detach() for t in answers]
    compare_often(case, inputs, answers)
    answers[0][batch, head] += 1.0
    with pytest.raises(WrongAnswerError):
        compare_often(case, inputs, answers)


@pytest.mark.parametrize("row", [8, 50])
def test_each_query_of_a_long_sequence_may_be_compared(row: int) -> None:
    """Only some queries are compared at a time, because each sees so many keys."""
    case = Case(backend="kernel", batch=1, q_heads=1, q_len=64, kv_len=1 << 15, head_dim=8, dtype="float32")
    q, k, v, do = (torch.randn(1, 1, n, 8) for n in (64, 1 << 15, 1 << 15, 64))
    answer = right(q, k, v)
    answer[0, 0, row] += 1.0
    with pytest.raises(WrongAnswerError, match=f"row {row},"):
        compare_often(case, [q, k, v, do], [answer])


def test_answers_of_late_calls_are_kept_too() -> None:
    turns = Turns(Case(backend="kernel", **SIZES), "cpu")
    for number in range(300):
        turns.fresh()
        turns.keep(torch.full((1,), float(number)))
    assert max(answers[0].item() for _, answers in turns.kept.values()) >= 10
