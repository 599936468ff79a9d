"""A query's row of o and lse has the bits of a prefill of all queries, whatever queries and layout the call has."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashpoint_kernels import attention, attention_backward, native, quantize
from tests.kernels.conftest import LEVELS
from tests.support.kernels.serving import in_pages
from tests.support.kernels.solving import normal

Tensors = dict[str, Tensor]
F8 = torch.float8_e4m3fn
QUERIES, KEYS = 16, 64  # the block size of block masks


def prefill(kv_heads: int, group: int, length: int, dim: int, value_dim: int, dtype: torch.dtype, seed: int) -> Tensors:
    q = normal(1, kv_heads * group, length, dim, seed=seed) * 2
    k, v = (normal(1, kv_heads, length, d, seed=seed + n) for n, d in ((1, dim), (2, value_dim)))
    return {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}


def rows_of(t: Tensors, start: int, stop: int) -> Tensors:
    """Return a call for queries [start, stop) of a causal prefill, with keys up to the last of these queries."""
    call = {"q": t["q"][:, :, start:stop]}
    for name in t.keys() & {"k", "v", "k_scale", "v_scale"}:
        call[name] = t[name][:, :, :stop]
    if "attn_mask" in t:
        call["attn_mask"] = t["attn_mask"][..., start:stop, :stop]
    if "block_mask" in t:
        call["block_mask"] = t["block_mask"][..., start // QUERIES : -(-stop // QUERIES), : -(-stop // KEYS)]
    return call | {name: t[name] for name in t.keys() & {"alibi_slopes", "sinks"}}


def answers(t: Tensors, **options: Any) -> tuple[Tensor, Tensor]:
    o, lse = attention(**t, causal=True, return_lse=True, backend="cpu", **options)
    return o, lse


def with_neighbours(t: Tensors) -> Tensors:
    """Return a batch of three sequences: `t` is the second, between sequences of 3e4 and of 0."""
    batched = {name: x for name, x in t.items() if name not in ("alibi_slopes", "sinks")}
    return {
        name: torch.cat([torch.full_like(x.float(), 3e4).to(x.dtype), x, torch.zeros_like(x)])
        for name, x in batched.items()
    } | {name: t[name] for name in t.keys() & {"alibi_slopes", "sinks"}}


def one_head(t: Tensors, head: int, group: int) -> Tensors:
    """Return the call of one query head and its key/value head."""
    call = {name: x[:, head : head + 1] for name, x in t.items() if name in ("q", "attn_mask", "block_mask")}
    call |= {n: x[:, head // group : head // group + 1] for n, x in t.items() if n in ("k", "v", "k_scale", "v_scale")}
    return call | {name: t[name][head : head + 1] for name in t.keys() & {"alibi_slopes", "sinks"}}


def transposed(t: Tensors) -> Tensors:
    return {n: x.transpose(1, 2).contiguous() if n in ("q", "k", "v") else x for n, x in t.items()}


any_row = given(
    kv_heads=st.integers(1, 2), group=st.sampled_from([1, 2, 4, 7]), length=st.sampled_from([1, 40, 300, 700, 1300]),
    dim=st.sampled_from([1, 16, 40, 64, 128]), value_dim=st.sampled_from([5, 64, 96]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    kind=st.sampled_from([None, None, F8, torch.int8]),
    window=st.sampled_from([(-1, -1), (0, 0), (37, -1), (600, -1)]), softcap=st.sampled_from([0.0, 0.0, 3.0]),
    alibi=st.booleans(), sinks=st.booleans(), mask=st.sampled_from(["", "", "bool", "float", "blocks"]),
    place=st.floats(0, 1), count=st.sampled_from([1, 1, 2, 5, 17, 64, 400]),
    way=st.sampled_from(["alone", "neighbours", "head", "bshd", "pages", "threads", "offset"]),
    page=st.sampled_from([1, 16, 100]),
)  # fmt: skip


@any_row
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_have_the_bits_of_the_full_prefill(
    level: str, kv_heads: int, group: int, length: int, dim: int, value_dim: int, dtype: torch.dtype,
    kind: torch.dtype | None, window: tuple[int, int], softcap: float, alibi: bool, sinks: bool, mask: str,
    place: float, count: int, way: str, page: int,
) -> None:  # fmt: skip
    heads = kv_heads * group
    t = prefill(kv_heads, group, length, dim, value_dim, dtype, seed=length)
    if kind is not None:
        for name in "kv":
            t[name], t[f"{name}_scale"] = quantize(t[name], kind)
    if alibi:
        t["alibi_slopes"] = normal(heads).abs() / 16
    if sinks:
        t["sinks"] = normal(heads)
    options: dict[str, Any] = {"window": window, "softcap": softcap}
    if mask == "blocks":
        t["block_mask"] = normal(1, heads, -(-length // QUERIES), -(-length // KEYS)) > -0.5
        options["block_size"] = (QUERIES, KEYS)
    elif mask:
        numbers = normal(1, heads, length, length)
        t["attn_mask"] = numbers > -1 if mask == "bool" else numbers
    o, lse = answers(t, **options)
    start = int(place * (length - 1))
    if "block_mask" in t:
        start -= start % QUERIES
    stop = min(length, start + count)
    call, before = rows_of(t, start, stop), torch.get_num_threads()
    expected = o[:, :, start:stop], lse[:, :, start:stop]
    if way == "neighbours":
        actual = tuple(x[1:2] for x in answers(with_neighbours(call), **options))
    elif way == "head":
        actual = answers(one_head(call, heads - 1, group), **options)
        expected = tuple(x[:, -1:] for x in expected)
    elif way == "bshd" and kind is None:
        found_o, found_lse = answers(transposed(call), layout="bshd", **options)
        actual = found_o.transpose(1, 2), found_lse
    elif way == "pages" and not mask and kind is None:
        actual = answers(in_pages(call | {"kv_lengths": torch.tensor([stop])}, "bhsd", page), **options)
    elif way == "offset" and "block_mask" not in t:  # the call has keys after its last query
        masked = {"attn_mask": t["attn_mask"][..., start:stop, :]} if "attn_mask" in t else {}
        actual = answers(t | {"q": call["q"], "offset": start} | masked, **options)
    else:
        torch.set_num_threads(1 if way == "threads" else before)
        try:
            actual = answers(call, **options)
        finally:
            torch.set_num_threads(before)
    for name, x, y in zip(("o", "lse"), actual, expected, strict=True):
        assert torch.equal(x, y), name


@given(
    kv_heads=st.integers(1, 2), group=st.sampled_from([1, 2, 3]), length=st.sampled_from([1, 40, 300, 700]),
    dim=st.sampled_from([16, 40, 64, 128]), value_dim=st.sampled_from([5, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    options=st.sampled_from([{}, {"window": (37, -1)}, {"softcap": 3.0}]),
    extra=st.sampled_from(["", "alibi_slopes", "sinks", "attn_mask", "block_mask"]),
    place=st.floats(0, 1), count=st.sampled_from([1, 2, 5, 64, 200]),
)  # fmt: skip
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_of_dq_have_the_bits_of_the_full_gradient(
    level: str, kv_heads: int, group: int, length: int, dim: int, value_dim: int, dtype: torch.dtype,
    options: dict[str, Any], extra: str, place: float, count: int,
) -> None:  # fmt: skip
    heads = kv_heads * group
    t = prefill(kv_heads, group, length, dim, value_dim, dtype, seed=length)
    if extra == "block_mask":
        t[extra] = normal(1, heads, -(-length // QUERIES), -(-length // KEYS)) > -0.5
        options = options | {"block_size": (QUERIES, KEYS)}
    elif extra:
        t[extra] = normal(heads, length, length) if extra == "attn_mask" else normal(heads).abs() / 16
    o, lse = answers(t, **options)
    do = normal(1, heads, length, value_dim, seed=9).to(dtype)
    options = options | {"causal": True, "grads": ["dq"], "backend": "cpu"}
    whole = attention_backward(do, t["q"], t["k"], t["v"], o, lse, **rest(t), **options)[0]
    start = int(place * (length - 1))
    if "block_mask" in t:
        start -= start % QUERIES
    stop = min(length, start + count)
    call = rows_of(t, start, stop)
    q, k, v = (call[name] for name in "qkv")
    do, o, lse = (x[:, :, start:stop] for x in (do, o, lse))
    assert torch.equal(attention_backward(do, q, k, v, o, lse, **rest(call), **options)[0], whole[:, :, start:stop])


def rest(t: Tensors) -> Tensors:
    return {name: x for name, x in t.items() if name not in ("q", "k", "v")}


def test_rows_differ_where_the_order_of_sums_does() -> None:
    """The comparison detects different bits: a softmax over keys in another order changes some bits."""
    t = prefill(1, 1, 300, 64, 64, torch.float32, seed=1)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    actual = attention(t["q"], t["k"], t["v"], backend="cpu")
    other = attention(t["q"], t["k"][:, :, order], t["v"][:, :, order], backend="cpu")
    torch.testing.assert_close(actual, other, rtol=1e-5, atol=1e-6)
    assert (actual != other).any(-1).sum() > 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_a_row_may_not_see_never_reaches_it(level: str, dtype: torch.dtype) -> None:
    """Infinities and NaN in later or masked keys and values do not change a row; in visible keys they do."""
    t = prefill(2, 2, 300, 64, 64, dtype, seed=2)
    mask = normal(1, 1, 300, 300) > -1
    mask[..., 150] = False
    for extra in ({}, {"attn_mask": mask}):
        expected, _ = answers(t | extra)
        for bad in (torch.nan, torch.inf, -torch.inf):
            spoilt = {name: x.clone() for name, x in t.items()}
            for name in "kv":
                spoilt[name][:, :, 200:, ::3] = bad
                if extra:
                    spoilt[name][:, :, 150] = bad
            actual, _ = answers(spoilt | extra)
            assert torch.equal(actual[:, :, :200], expected[:, :, :200])
            assert not actual[:, :, 205:].isfinite().all(-1).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"scale": 3.0}])
def test_finite_inputs_give_finite_answers(level: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Finite inputs give finite answers: products beyond float32's range become its largest number, with sign."""
    t = prefill(1, 2, 200, 64, 64, dtype, seed=3)
    t["q"][:, :, ::2] *= 1e30
    t["k"][:, :, ::3] *= 1e30
    o, lse = answers(t, **options)
    assert o.isfinite().all()
    assert lse.isfinite().all()
    alone, _ = answers(rows_of(t, 150, 151), **options)
    assert torch.equal(alone, o[:, :, 150:151])


def test_levels_have_equal_bits_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    t = prefill(2, 3, 700, 40, 72, torch.float32, seed=4) | {"alibi_slopes": normal(6).abs() / 8}
    results = []
    for name in LEVELS:
        functions = native.level(name)
        monkeypatch.setattr(native, "library", lambda library=functions: library)
        results.append(answers(t, softcap=4.0, dropout_p=0.2, dropout_seed=9)[0])
    assert all(torch.equal(x, results[0]) for x in results)
