"""For the plain calls that it takes, the path of plain.py has the bits, gradients and errors of the path of ops.py."""

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from flashpoint_kernels import ProblemError, attention
from flashpoint_kernels.operators import plain
from tests.support.kernels.routes import forget
from tests.support.kernels.solving import MEMORY, normal, qkv, restrided


def long_way(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(plain, "attention", lambda *_: None)
        return call()


def drawn(
    kv_heads: int, group: int, q_len: int, kv_len: int, dim: int, dtype: torch.dtype, layout: str
) -> list[Tensor]:
    t = qkv(2, kv_heads * group, q_len, kv_len, dim, kv_heads=kv_heads, dtype=dtype)
    return [(x.transpose(1, 2).contiguous() if layout == "bshd" else x).requires_grad_() for x in (t[n] for n in "qkv")]


@given(
    kv_heads=st.integers(1, 3), group=st.integers(1, 2), q_len=st.integers(1, 300), kv_len=st.integers(1, 300),
    dim=st.sampled_from([8, 16, 40, 64]), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    layout=st.sampled_from(["bhsd", "bshd"]), causal=st.booleans(), square=st.booleans(),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_bits_and_gradients_are_those_of_the_long_way(
    kv_heads: int, group: int, q_len: int, kv_len: int, dim: int, dtype: torch.dtype, layout: str, causal: bool,
    square: bool,
) -> None:  # fmt: skip
    kv_len = q_len if square else kv_len
    leaves = drawn(kv_heads, group, q_len, kv_len, dim, dtype, layout)
    options: dict[str, Any] = {"layout": layout, "causal": causal}

    def answers() -> list[Tensor]:
        o, lse = attention(*leaves, **options, return_lse=True)
        alone = attention(*(x.detach() for x in leaves), **options)
        return [o, lse, alone, *torch.autograd.grad(o.float().cos().sum(), leaves)]

    with pytest.MonkeyPatch.context() as monkeypatch:
        expected = long_way(monkeypatch, answers)
    for n, (actual, right) in enumerate(zip(answers(), expected, strict=True)):
        assert torch.equal(actual, right), n
        assert actual.dtype == right.dtype
        assert n > 2 or actual.is_contiguous() or n == 1


@given(
    history=st.lists(
        st.tuples(st.integers(1, 3), st.sampled_from(["bhsd", "bshd"]), st.booleans(), st.integers(0, 1 << 20)),
        min_size=2, max_size=8,
    ),
    kv_heads=st.integers(1, 4), q_len=st.sampled_from([1, 7, 130]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_a_repeated_call_reads_its_own_tensors_whatever_came_before(
    history: list[tuple[int, str, bool, int]], kv_heads: int, q_len: int, dtype: torch.dtype
) -> None:
    """A call that reuses a cached `plain.Route` reads its own tensors, for any strides, addresses and thread counts."""
    before = torch.get_num_threads()
    try:
        for threads, layout, apart, seed in history:
            torch.set_num_threads(threads)
            t = [normal(2, 2 * kv_heads if n == "q" else kv_heads, 150 if n in "kv" else q_len, 40, seed=seed + ord(n))
                 for n in "qkv"]  # fmt: skip
            if layout == "bshd":
                t = [x.transpose(1, 2).contiguous() for x in t]
            if apart:  # rows are not adjacent
                t = [torch.cat([x, x], -1)[..., :40] for x in t]
            leaves = [x.to(dtype).requires_grad_() for x in t]

            def answers(leaves: list[Tensor] = leaves, layout: Any = layout) -> list[Tensor]:
                o, lse = attention(*leaves, layout=layout, return_lse=True)
                return [o, lse, *torch.autograd.grad(o.float().cos().sum(), leaves)]

            with pytest.MonkeyPatch.context() as monkeypatch:
                expected = long_way(monkeypatch, answers)
            for actual, right in zip(answers(), expected, strict=True):
                assert torch.equal(actual, right)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_call_after_one_in_another_memory_form_reads_its_own_tensors(name: str, dtype: torch.dtype) -> None:
    """The calls differ in the memory of one tensor alone, and each has numbers of its own."""
    for seed, memory in enumerate(form for other in MEMORY[1:] for form in ("plain", other, "plain")):
        t = qkv(2, 2, 9, 33, 24, dtype=dtype, seed=4 * seed)
        t[name] = restrided(t[name], memory)
        leaves, do = [t[n].requires_grad_() for n in "qkv"], t["do"]

        def answers(leaves: list[Tensor] = leaves, do: Tensor = do) -> list[Tensor]:
            o, lse = attention(*leaves, return_lse=True)
            return [o, lse, *torch.autograd.grad(o, leaves, do)]

        with pytest.MonkeyPatch.context() as monkeypatch:
            expected = long_way(monkeypatch, answers)
        for n, (actual, right) in enumerate(zip(answers(), expected, strict=True)):
            assert torch.equal(actual, right), (memory, n)


def test_a_plain_call_has_a_route(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = drawn(2, 2, 16, 20, 64, torch.float32, "bhsd")
    forget()
    planned, made = Mock(wraps=plain.plan), Mock(wraps=plain.Route)
    monkeypatch.setattr(plain, "plan", planned)
    monkeypatch.setattr(plain, "Route", made)
    attention(q, k, v)
    plans = planned.call_count
    attention(q, k, v)
    assert (made.call_count, planned.call_count) == (1, plans)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 8, 256, 64), torch.float32), ((2, 4, 600, 64), torch.bfloat16), ((1, 2, 700, 24), torch.float32),
     ((40, 2, 200, 16), torch.float32), ((1, 1, 1100, 40), torch.float32), ((1, 4, 1, 64), torch.float32)],
)  # fmt: skip
def test_calls_of_more_than_one_part_have_the_bits_of_the_long_way(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """plain.py and ops.py give the same bits for calls cut by heads or sequences, and for one head or one query."""
    t = qkv(*shape[:3], max(shape[2], 1100 if shape[2] == 1 else 0), shape[3], dtype=dtype)
    leaves = [t[n].requires_grad_() for n in "qkv"]

    def answers() -> list[Tensor]:
        o = attention(*leaves)
        return [o, *torch.autograd.grad(o, leaves, t["do"])]

    with pytest.MonkeyPatch.context() as monkeypatch:
        expected = long_way(monkeypatch, answers)
    for actual, right in zip(answers(), expected, strict=True):
        assert torch.equal(actual, right)


@pytest.mark.parametrize("wrong", [{"causal": 1}, {"window": (True, 0)}, {"window": (-1.0, -1.0)}, {"scale": [1.0]}])
def test_an_option_that_equals_a_right_one_is_refused(wrong: dict[str, Any]) -> None:
    t = qkv(1, 1, 4, 4, 8)
    right = {"causal": True, "window": (-1, -1), "scale": 1.0}
    attention(t["q"], t["k"], t["v"], **{name: right[name] for name in wrong})  # type: ignore[arg-type]
    with pytest.raises(ProblemError, match=next(iter(wrong))):
        attention(t["q"], t["k"], t["v"], **wrong)


def test_what_is_wrong_with_tensors_is_named() -> None:
    with pytest.raises(ProblemError, match="batch"):
        attention(normal(1, 1, 4, 8), normal(2, 1, 4, 8), normal(1, 1, 4, 8))
    with pytest.raises(ProblemError, match="k: must be a torch tensor"):
        attention(normal(1, 1, 4, 8), [1.0], normal(1, 1, 4, 8))  # type: ignore[arg-type]


def test_rows_without_a_sum_are_put_right() -> None:
    """Rows with scores of NaN and −∞ have the same answers and gradients on the paths of plain.py and ops.py."""
    t = {name: normal(1, 2, 20, 16, seed=n) for n, name in enumerate("qkv")}
    t["q"][0, 0, 3] = torch.inf
    t["k"][0, 0] = -t["k"][0, 0].abs()
    t["q"][0, 1, 5, 2] = torch.nan
    leaves = [x.requires_grad_() for x in t.values()]

    def answers() -> list[Tensor]:
        o, lse = attention(*leaves, return_lse=True)
        return [o, lse, *torch.autograd.grad(o.sum(), leaves)]

    with pytest.MonkeyPatch.context() as monkeypatch:
        expected = long_way(monkeypatch, answers)
    for actual, right in zip(answers(), expected, strict=True):
        assert torch.equal(actual.nan_to_num(7.0), right.nan_to_num(7.0))
    assert expected[1][0, 0, 3] == -torch.inf


def test_gradients_that_are_not_plain() -> None:
    """Gradients of q alone are right through o, through lse and through both."""
    q, k, v = (x.detach() for x in drawn(2, 1, 20, 20, 16, torch.float32, "bhsd"))
    q.requires_grad_()
    o, lse = attention(q, k, v, return_lse=True)
    (through_lse,) = torch.autograd.grad(lse.sum(), q, retain_graph=True)
    (through_o,) = torch.autograd.grad(o.sum(), q, retain_graph=True)
    (through_both,) = torch.autograd.grad(o.sum() + lse.sum(), q, retain_graph=True)
    torch.testing.assert_close(through_both, through_o + through_lse)


def test_what_watches_sees_the_operator_of_the_library() -> None:
    """Calls with a dispatch mode, autocast or a tensor subclass take the path of ops.py, whose operator these see."""
    q, k, v = (x.detach() for x in drawn(2, 1, 20, 20, 16, torch.float32, "bhsd"))
    expected = attention(q, k, v)
    seen: list[str] = []

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watching():
        assert torch.equal(attention(q, k, v), expected)
    assert seen[0] == "flashpoint.attention.default"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = attention(q, k, v)
    assert torch.equal(actual, attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))
    with FlopCounterMode(display=False):
        attention(q, k, v)

    class Own(Tensor):
        pass

    assert type(attention(q.as_subclass(Own), k, v)) is Own
