"""Our versions of flash-attn's functions equal its formula in float64, with lengths, windows, packing and caches."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashpoint_kernels import attention, available_backends, flash_attn
from flashpoint_kernels.flash_attn import flash_attn_interface
from flashpoint_kernels.flash_attn.flash_attn_interface import FlashAttnError
from tests.conftest import DEVICE
from tests.support.kernels.rotation import BOUND, check, rotated
from tests.support.kernels.solving import normal

BACKENDS = [
    pytest.param(name, marks=[pytest.mark.slow] if name == "triton" else [])  # the interpreter is slow
    for name in ("triton", "cpu", "tiled", "reference")
    if name in available_backends(DEVICE)
]
Solved = tuple[Tensor, Tensor]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Select each backend in turn, because the functions have no argument for the backend."""
    monkeypatch.setattr(flash_attn_interface, "attention", partial(attention, backend=request.param))
    name: str = request.param
    return name


def definition(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
) -> Solved:  # fmt: skip
    """Return out and lse (H, Sq) in float64 for one sequence (S, H, D), as flash-attn documents them."""
    q, k, v = (t.double().transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(len(q) // len(t), 0) for t in (k, v))
    queries, keys = q.shape[1], k.shape[1]
    scores = q @ k.transpose(1, 2) * (softmax_scale or 1 / math.sqrt(q.shape[2]))
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    place = torch.arange(queries, device=q.device)[:, None] + keys - queries
    ahead = torch.arange(keys, device=q.device) - place
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[:, None, None] * ahead.abs()
    left, right = window_size
    right = 0 if causal else right
    farthest = queries + keys
    hidden = (ahead > (right if right >= 0 else farthest)) | (ahead < -(left if left >= 0 else farthest))
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    return (weights @ v).transpose(0, 1), lse


def of_batch(q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None = None, **options: Any) -> Solved:
    solutions = [
        definition(q[b], k[b], v[b], alibi_slopes=_of(alibi_slopes, b), **options) for b in range(len(q))
    ]  # fmt: skip
    return torch.stack([o for o, _ in solutions]), torch.stack([lse for _, lse in solutions])


def _of(slopes: Tensor | None, b: int) -> Tensor | None:
    return slopes if slopes is None or slopes.ndim == 1 else slopes[b]


options = st.fixed_dictionaries(
    {
        "causal": st.booleans(), "window_size": st.sampled_from([(-1, -1), (3, 2), (0, 0), (-1, 4), (5, -1), (-7, -2)]),
        "softcap": st.sampled_from([0.0, 0.0, 2.0]), "softmax_scale": st.sampled_from([None, 0.4]),
    }
)  # fmt: skip
any_call = given(
    options=options, slopes=st.sampled_from([0, 0, 1, 2]), heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    dim=st.sampled_from([8, 16, 40]), dtype=st.sampled_from(list(BOUND)), packed=st.sampled_from([1, 2, 3]),
    lengths=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 24)), min_size=1, max_size=3),
    spare=st.integers(0, 2),
)  # fmt: skip
quietly = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def slopes_of(rank: int, batch: int, heads: int) -> Tensor | None:
    return None if rank == 0 else normal(*((batch, heads) if rank == 2 else (heads,)), seed=9).abs()


def tensors(q_shape: tuple[int, ...], k_shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    return [normal(*shape, seed=n).to(dtype) for n, shape in enumerate((q_shape, k_shape, k_shape))]


@any_call
@quietly
def test_sequences_of_equal_length(
    backend: str, options: dict[str, Any], slopes: int, heads: tuple[int, int], dim: int, dtype: torch.dtype,
    packed: int, lengths: list[tuple[int, int]], spare: int,
) -> None:  # fmt: skip
    batch, (queries, keys) = len(lengths), (max(1, n) for n in lengths[0])
    if packed == 3:
        heads, keys = (heads[0], heads[0]), queries
    q, k, v = tensors((batch, queries, heads[0], dim), (batch, keys, heads[1], dim), dtype)
    alibi = slopes_of(slopes, batch, heads[0])
    sent = options | {"alibi_slopes": alibi, "return_attn_probs": True, "deterministic": True}
    if packed == 1:
        out, lse, none = flash_attn.flash_attn_func(q, k, v, **sent)
    elif packed == 2:
        out, lse, none = flash_attn.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **sent)
    else:
        out, lse, none = flash_attn.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), **sent)
    expected = of_batch(q, k, v, alibi, **options)
    check(out, expected[0], dtype)
    check(lse, expected[1], torch.float32 if dtype == torch.float32 else dtype)
    assert none is None
    assert out.dtype == dtype


@any_call
@quietly
def test_sequences_of_any_length(
    backend: str, options: dict[str, Any], slopes: int, heads: tuple[int, int], dim: int, dtype: torch.dtype,
    packed: int, lengths: list[tuple[int, int]], spare: int,
) -> None:  # fmt: skip
    """`spare` rows after the last sequence are not read, and their answers are 0."""
    if packed == 3:
        heads, lengths = (heads[0], heads[0]), [(q, q) for q, _ in lengths]
    of_q, of_k = (torch.tensor([0, *(x[n] for x in lengths)], device=DEVICE).cumsum(0).int() for n in (0, 1))
    rows = int(of_q[-1]) + spare, int(of_k[-1]) + spare
    q, k, v = tensors((rows[0], heads[0], dim), (rows[1], heads[1], dim), dtype)
    for t, end in ((q, of_q), (k, of_k), (v, of_k)):
        t[int(end[-1]) :] = torch.nan
    alibi = slopes_of(slopes, len(lengths), heads[0])
    max_lengths = [max(x[n] for x in lengths) for n in (0, 1)]
    sent = options | {"alibi_slopes": alibi, "return_attn_probs": True}
    if packed == 1:
        out, lse, _ = flash_attn.flash_attn_varlen_func(q, k, v, of_q, of_k, *max_lengths, **sent)
    elif packed == 2:
        kv = torch.stack([k, v], 1)
        out, lse, _ = flash_attn.flash_attn_varlen_kvpacked_func(q, kv, of_q, of_k, *max_lengths, **sent)
    else:
        qkv = torch.stack([q, k, v], 1)
        out, lse, _ = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, of_q, max_lengths[0], **sent)
    for n in range(len(lengths)):
        a, b = (slice(int(x[n]), int(x[n + 1])) for x in (of_q, of_k))
        expected = definition(q[a], k[b], v[b], alibi_slopes=_of(alibi, n), **options)
        check(out[a], expected[0], dtype)
        check(lse[:, a], expected[1], dtype)
    assert not out[int(of_q[-1]) :].any()
    assert (lse[:, int(of_q[-1]) :] == -torch.inf).all()


@pytest.mark.parametrize("spare", [0, 2])
def test_pages_of_sequences_of_any_length(backend: str, spare: int) -> None:
    """Paged sequences have the lengths that `cu_seqlens_k` gives; output rows after the last query are 0."""
    of_q, of_k = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 3, 7], [0, 20, 37]))
    q, pages = normal(7 + spare, 4, 16), normal(5, 16, 2, 16, seed=1)
    table = torch.tensor([[4, 1], [0, 3]], dtype=torch.int32, device=DEVICE)
    actual = flash_attn.flash_attn_varlen_func(
        q, pages, pages, of_q, of_k, 4, 20, causal=True, block_table=table
    )  # fmt: skip
    assert isinstance(actual, Tensor)
    for b in range(2):
        keys = pages[table[b].long()].flatten(0, 1)[: int(of_k[b + 1] - of_k[b])]
        rows = slice(int(of_q[b]), int(of_q[b + 1]))
        check(actual[rows], definition(q[rows], keys, keys, causal=True)[0], torch.float32)
    assert not actual[7:].any()


@given(
    options=options, slopes=st.sampled_from([0, 1, 2]), heads=st.sampled_from([(2, 2), (4, 2)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]), q_len=st.sampled_from([1, 3]),
    new=st.sampled_from([0, 1, 3]), before=st.lists(st.integers(0, 40), min_size=2, max_size=2),
    half=st.sampled_from([0, 4, 8]), interleaved=st.booleans(), page=st.sampled_from([0, 16]), picked=st.booleans(),
    pad=st.booleans(), number=st.booleans(),
)  # fmt: skip
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_cache_is_appended_to_in_place_and_attended(
    backend: str, options: dict[str, Any], slopes: int, heads: tuple[int, int], dtype: torch.dtype, q_len: int,
    new: int, before: list[int], half: int, interleaved: bool, page: int, picked: bool, pad: bool, number: bool,
) -> None:  # fmt: skip
    batch, dim, capacity = 2, 16, 48
    picked, pad = picked and not page, pad and not page
    lengths = [before[0]] * 2 if number else before
    lengths = [n if new else max(n, 1) for n in lengths]
    q = normal(batch, q_len, heads[0], dim, seed=1).to(dtype)
    added = [normal(batch, new, heads[1], dim, seed=n).to(dtype) for n in (2, 3)]
    whole = [normal(batch, capacity, heads[1], dim, seed=n).to(dtype) for n in (4, 5)]
    rows, table = [0, 1], None
    if page:  # pages are in any order
        table = torch.randperm(2 * capacity // page, generator=torch.Generator().manual_seed(1)).view(2, -1).int()
        caches = [torch.empty(len(table.flatten()), page, heads[1], dim, dtype=dtype) for _ in whole]
        for cache, t in zip(caches, whole, strict=True):
            cache[table.long()] = t.view(2, -1, page, heads[1], dim)
        table = table.to(DEVICE)
    elif picked:
        rows = [2, 0]
        caches = [torch.zeros(3, capacity, heads[1], dim, dtype=dtype) for _ in whole]
        for cache, t in zip(caches, whole, strict=True):
            cache[rows] = t
    else:
        caches = [t.clone() for t in whole]
    cos, sin = (f(normal(64, half, seed=6)) if half and new else None for f in (torch.cos, torch.sin))
    padding = torch.tensor([0, 3], dtype=torch.int32, device=DEVICE) if pad else None
    alibi = slopes_of(slopes, batch, heads[0])
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, *caches, *(added if new else ()), rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved,
        cache_seqlens=lengths[0] if number else torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        cache_batch_idx=torch.tensor(rows, dtype=torch.int32, device=DEVICE) if picked else None, cache_leftpad=padding,
        block_table=table, alibi_slopes=alibi, num_splits=3, return_softmax_lse=True, **options,
    )  # fmt: skip
    for b in range(batch):
        prefixes = [t[b, : lengths[b]] for t in whole]
        fresh = [t[b] for t in added]
        mine = q[b].double()
        if cos is not None and sin is not None:
            fresh[0] = rotated(fresh[0], cos, sin, lengths[b], interleaved).to(dtype)
            moving = options["causal"] or max(options["window_size"]) >= 0
            mine = rotated(q[b], cos, sin, lengths[b], interleaved, step=int(moving)).to(dtype).double()
        keys, values = (torch.cat([a, x]) for a, x in zip(prefixes, fresh, strict=True))
        for cache, expected in zip(caches, (keys, values), strict=True):
            stored = cache[table[b].long()].flatten(0, 1) if table is not None else cache[rows[b]]
            torch.testing.assert_close(stored[: len(expected)], expected, atol=2e-2 if half else 0, rtol=2e-2)
        skipped = min(int(padding[b]), len(keys)) if padding is not None else 0
        expected = definition(mine, keys[skipped:], values[skipped:], alibi_slopes=_of(alibi, b), **options)
        check(out[b], expected[0], torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
        check(lse[b], expected[1], torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)


def test_gradients_flow_through_packed_tensors_and_lse() -> None:
    qkv = normal(2, 9, 3, 2, 16).requires_grad_()
    out, lse, _ = flash_attn.flash_attn_qkvpacked_func(qkv, causal=True, return_attn_probs=True)
    (actual,) = torch.autograd.grad(out.square().sum() + lse.sin().sum(), qkv)
    exact = qkv.detach().double().requires_grad_()
    o, expected_lse = of_batch(*exact.unbind(2), causal=True)
    (expected,) = torch.autograd.grad(o.square().sum() + expected_lse.sin().sum(), exact)
    check(actual, expected, torch.float32)


def test_dropout_keeps_the_mean_and_follows_torchs_seed() -> None:
    q, v = normal(1, 64, 2, 16), torch.ones(1, 64, 2, 16, device=DEVICE)
    torch.manual_seed(3)
    actual = flash_attn.flash_attn_func(q, q, v, dropout_p=0.3)
    torch.manual_seed(3)
    assert torch.equal(actual, flash_attn.flash_attn_func(q, q, v, dropout_p=0.3))
    assert not torch.equal(actual, flash_attn.flash_attn_func(q, q, v, dropout_p=0.3))
    assert abs(float(actual.mean()) - 1) < 0.05


Q = normal(2, 3, 2, 16)
CACHE = normal(2, 8, 2, 16)


def paged(**given: Any) -> Any:
    pages = torch.tensor([[1, 0]], dtype=torch.int32, device=Q.device)
    return flash_attn.flash_attn_with_kvcache(Q[:1], CACHE.clone(), CACHE.clone(), block_table=pages, **given)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: flash_attn.flash_attn_func(Q, Q[..., :8], Q), "k: "),
        (lambda: flash_attn.flash_attn_func(Q, Q, Q, softmax_scale=math.nan), "softmax_scale: "),
        (lambda: flash_attn.flash_attn_kvpacked_func(Q, Q), r"kv: must have shape \(B, S, 2, heads, D\)"),
        (lambda: flash_attn.flash_attn_with_kvcache(Q, CACHE, CACHE, k=Q, cache_seqlens=1), "v: must be given with k"),
        (lambda: flash_attn.flash_attn_with_kvcache(Q, CACHE, CACHE, Q, Q), "cache_seqlens: must be given with k"),
        (lambda: flash_attn.flash_attn_with_kvcache(Q, CACHE, CACHE, Q, Q, cache_seqlens=6), "k: 9 keys do not fit"),
        (lambda: paged(cache_seqlens=17), "block_table: its 2 pages of 8 keys have no room for 17"),
        (lambda: paged(k=Q[:1], v=Q[:1], cache_seqlens=14), "block_table: its 2 pages of 8 keys have no room for 17"),
        (lambda: flash_attn.flash_attn_with_kvcache(Q[:1], CACHE, CACHE), "k_cache: has 2 sequences"),
        (lambda: flash_attn.flash_attn_with_kvcache(Q, CACHE, CACHE, rotary_cos=Q), "rotary_sin: must be given"),
    ],
)
def test_an_error_is_a_runtime_error_that_names_the_argument(call: Any, message: str) -> None:
    with pytest.raises(FlashAttnError, match=message) as error:
        call()
    assert isinstance(error.value, RuntimeError)


LENGTHS = torch.tensor([5, 9], dtype=torch.int32)
CUT = torch.tensor([0, 5, 12], dtype=torch.int32)
PAGES = torch.tensor([[0, 2], [3, 1]], dtype=torch.int32)
ANGLES = normal(20, 8, seed=6)
COMPILED: dict[str, Any] = {
    "varlen": lambda q, k, v: flash_attn.flash_attn_varlen_func(q, k, v, CUT, CUT, 7, 7, causal=True),
    "varlen and lse": lambda q, k, v: flash_attn.flash_attn_varlen_func(
        q, k, v, CUT, CUT, 7, 7, window_size=(3, 1), return_attn_probs=True
    )[:2],
    "varlen kvpacked": lambda q, k, v: flash_attn.flash_attn_varlen_kvpacked_func(
        q, torch.stack([k, v], 1), CUT, CUT, 7, 7
    ),
    "varlen qkvpacked": lambda q, k, v: flash_attn.flash_attn_varlen_qkvpacked_func(
        torch.stack([q, k, v], 1), CUT, 7, causal=True
    ),
    "varlen pages": lambda q, k, v: flash_attn.flash_attn_varlen_func(
        q, k.view(4, 3, 2, 16), v.view(4, 3, 2, 16), CUT, torch.tensor([0, 4, 10], dtype=torch.int32), 7, 7,
        block_table=PAGES,
    ),
    "cache": lambda q, k, v: _after(q, k, v),
    "cache that grows": lambda q, k, v: _after(q, k, v, k=q[:2, None], v=q[2:4, None]),
    "cache with rotary embedding": lambda q, k, v: _after(
        q, k, v, k=q[:2, None], v=q[2:4, None], rotary_cos=ANGLES.cos(), rotary_sin=ANGLES.sin()
    ),
    "rows of a cache": lambda q, k, v: _after(
        q, k, v, cache_batch_idx=torch.tensor([1, 0], dtype=torch.int32), k=q[:2, None], v=q[2:4, None]
    ),
    "a cache padded at its start": lambda q, k, v: _after(q, k, v, cache_leftpad=torch.tensor([1, 2])),
}  # fmt: skip


def _after(q: Tensor, k: Tensor, v: Tensor, /, **more: Any) -> tuple[Tensor, ...]:
    """Return attention over caches made from k and v, and the caches after the call."""
    caches = [torch.cat([t, t]).view(2, 12, 2, 16).clone() for t in (k, v)]
    o = flash_attn.flash_attn_with_kvcache(q[4:6, None], *caches, cache_seqlens=LENGTHS, causal=True, **more)
    assert isinstance(o, Tensor)
    return o, *caches


@pytest.mark.parametrize("name", COMPILED)
def test_functions_compile_as_one_graph(name: str) -> None:
    call = COMPILED[name]
    q, k, v = (normal(12, 2, 16, seed=n).requires_grad_(name.startswith("varlen") and "pages" not in name)
               for n in range(3))  # fmt: skip
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected, actual = (_listed(each(q, k, v)) for each in (call, compiled))
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)
    if q.requires_grad:
        wanted, found = (torch.autograd.grad(o[0].square().sum(), (q, k, v)) for o in (expected, actual))
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(a, b)


def _listed(answer: Any) -> tuple[Tensor, ...]:
    return answer if isinstance(answer, tuple) else (answer,)


def test_a_compiled_program_refuses_what_it_cannot_do() -> None:
    """It reads no values, so the operator and torch's indexing find these mistakes: no answer is wrong."""
    q, k, v = (normal(13, 2, 16, seed=n) for n in range(3))
    compiled = torch.compile(COMPILED["varlen"], fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="cu_seqlens_q"):
        compiled(q, k, v)  # a row after the last sequence
    full = torch.tensor([12, 3], dtype=torch.int32)
    caches = normal(2, 12, 2, 16), normal(2, 12, 2, 16)
    one = normal(2, 1, 2, 16)
    grown = torch.compile(flash_attn.flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"index|out of bounds"):
        grown(one, *caches, one, one, cache_seqlens=full)
