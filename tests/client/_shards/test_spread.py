"""`flashpoint.sharded.cache`, a cache in spans at several servers that may fail, equals float64.

Three clients of one real server replace three servers: the calls and their parts are the same.
"""

import asyncio
import contextlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch

import flashpoint
from flashpoint import sharded
from flashpoint_kernels import attention
from tests.support.balancer import balancer
from tests.support.messages import ask
from tests.support.sockets import held_since

HQ, HK, D, DV = 4, 2, 8, 6
SHAPE = {"kv_heads": HK, "head_dim": D, "value_dim": DV}
BOUNDS = {np.dtype(np.float32): 4e-6, np.dtype(np.float16): 2**-9, np.dtype(ml_dtypes.bfloat16): 2**-6}


@contextlib.contextmanager
def clients_of(*servers, **how):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(flashpoint.Client(each.url, timeout=240, **how)) for each in servers]


@pytest.fixture(scope="module")
def clients(server):
    with clients_of(server, server, server) as clients:
        yield clients


@pytest.fixture
def left(server):
    return held_since(server)


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def expected(q, k, v, **options):
    """Return o and lse over all keys in float64."""
    tensors = (torch.from_numpy(np.asarray(t, np.float64)) for t in (q, k, v))
    given = {name: torch.from_numpy(t) if isinstance(t, np.ndarray) else t for name, t in options.items()}
    o, lse = attention(*tensors, backend="reference", return_lse=True, **given)
    return o.numpy(), lse.numpy()


def near(actual, wanted, bound):
    assert actual.shape == wanted.shape
    actual, wanted = actual.astype(np.float64), wanted.astype(np.float64)
    finite = np.isfinite(wanted)
    assert np.array_equal(actual[~finite], wanted[~finite])
    assert np.abs(actual[finite] - wanted[finite]).max(initial=0) <= bound * max(
        1, np.abs(wanted[finite]).max(initial=0)
    )


@st.composite
def problems(draw):
    """Draw (span, how the tokens arrive, queries of a last call that only reads, dtype, keywords)."""
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    pieces = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    total, count = sum(pieces), draw(st.integers(1, 12))
    numbers = np.random.default_rng(draw(st.integers(0, 1000)))
    keywords = {"layout": pick("bhsd", "bshd"), "causal": draw(st.booleans())}
    keywords |= {"window": (pick(-1, 0, 3, 11), pick(-1, 0, 2))} if draw(st.booleans()) else {}
    keywords |= pick({}, {"softcap": 3.0}, {"scale": 0.3}, {"backend": "tiled"})
    keywords |= {"alibi_slopes": numbers.random(HQ).astype(np.float32)} if draw(st.booleans()) else {}
    keywords |= {"sinks": numbers.standard_normal(HQ).astype(np.float32)} if draw(st.booleans()) else {}
    if mask := pick(None, None, "bool", "float"):
        shape = [size if draw(st.booleans()) else 1 for size in (HQ, count, total + pick(0, 2))]
        values = numbers.standard_normal(shape[draw(st.integers(0, 2)) :]).astype(np.float32)
        keywords["attn_mask"] = values if mask == "float" else values > -0.5
    dtype = pick(np.float32, np.float32, np.float16, ml_dtypes.bfloat16)
    return pick(3, 7, 100), pieces, count, dtype, keywords


def in_layout(t, layout):
    return t.swapaxes(1, 2) if layout == "bshd" else t


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(problems(), st.integers(0, 100))
def test_any_problem_is_as_float64_solves_it_over_the_whole(clients, problem, seed):
    """Tokens arrive with their queries, in pieces that may cross spans; then more queries read all of them."""
    span, pieces, count, dtype, keywords = problem
    layout, total = keywords["layout"], sum(pieces)
    q = normal(1, HQ, total, D, seed=seed, dtype=dtype)
    k, v = (t.astype(dtype) for t in tokens(total, seed + 1))
    plain = {name: value for name, value in keywords.items() if name not in ("layout", "attn_mask", "backend")}
    with sharded.cache(clients, **SHAPE, dtype=np.dtype(dtype).name, span=span) as cache:
        given_ = {**plain, "layout": layout} | {name: keywords[name] for name in ("backend",) if name in keywords}
        first = 0
        for piece in pieces:
            new = [in_layout(t[:, :, first : first + piece], layout) for t in (q, k, v)]
            first += piece
            o, lse = cache.attention(*new, **given_, return_lse=True)
            wanted = expected(q[:, :, first - piece : first], k[:, :, :first], v[:, :, :first], **plain)
            near(in_layout(o, layout), wanted[0], BOUNDS[o.dtype])
            near(lse, wanted[1], 4e-6)
        assert cache.lengths == [total]
        q = normal(1, HQ, count, D, seed=seed + 3, dtype=dtype)
        (o, lse), parts = cache.attention(in_layout(q, layout), return_lse=True, with_meta=True, **keywords)
        mask = {"attn_mask": keywords["attn_mask"][..., :total]} if "attn_mask" in keywords else {}
        wanted = expected(q, k, v, **plain, **mask)
        near(in_layout(o, layout), wanted[0], BOUNDS[o.dtype])
        near(lse, wanted[1], 4e-6)
        assert all(0 <= a < b <= min(a + span, total) and a % span == 0 for a, b in (part.keys for part in parts))
        near(o, cache.attention(in_layout(q, layout), **keywords), 0)


def whole(cache, numbers, layer=0):
    """Check a layer against its tokens, k and v."""
    k, v = numbers
    q = normal(1, HQ, 1, D, seed=99)
    o, lse = cache.attention(q, layer=layer, return_lse=True)
    wanted = expected(q, k, v)
    near(o, wanted[0], 4e-6)
    near(lse, wanted[1], 4e-6)
    assert cache.lengths[layer] == k.shape[2]


def tokens(count, seed=0):
    return normal(1, HK, count, D, seed=seed), normal(1, HK, count, DV, seed=seed + 1)


def test_tokens_are_rewritten_cut_and_forked_over_the_servers(clients, left):
    made = tokens(40)
    with sharded.cache(clients, **SHAPE, layers=2, span=7) as cache:
        assert cache.append(*made) == 40
        assert cache.append(made[0][0, :, :9], made[1][0, :, :9], layer=1) == 9
        whole(cache, made)
        with cache.fork() as copy, cache.fork(16) as short:
            other = tokens(5, seed=5)
            assert cache.append(*other, at=12) == 17
            whole(cache, [np.concatenate((a[:, :, :12], b), 2) for a, b in zip(made, other, strict=True)])
            whole(cache, [t[:, :, :9] for t in made], layer=1)
            assert (short.lengths, cache.lengths, copy.lengths) == ([16, 9], [17, 9], [40, 9])
            short.truncate(8)
            whole(short, [t[:, :, :8] for t in made])
            whole(short, [t[:, :, :8] for t in made], layer=1)
            whole(copy, made)
            copy.truncate(0)
            assert copy.length == 0
            o, lse = copy.attention(normal(1, HQ, 2, D), return_lse=True)
            assert not o.any()
            assert np.isneginf(lse).all()
            copy.append(*(t[:, :, :15].swapaxes(1, 2) for t in made), layout="bshd")
            whole(copy, [t[:, :, :15] for t in made])
            q = normal(1, HQ, 3, D)
            o = copy.attention(q, *(t[:, :, :3] for t in other), at=2, causal=True)
            rewritten = [np.concatenate((a[:, :, :2], b[:, :, :3]), 2) for a, b in zip(made, other, strict=True)]
            near(o, expected(q, *rewritten, causal=True)[0], 4e-6)
            whole(copy, rewritten)
            short.renew()
    assert not left()


def test_the_asyncio_twin_does_the_same(server, left):
    async def run():
        async with contextlib.AsyncExitStack() as stack:
            twins = [await stack.enter_async_context(flashpoint.AsyncClient(server.url, timeout=240)) for _ in range(2)]
            k, v = tokens(20)
            q = normal(1, HQ, 20, D)
            async with await sharded.async_cache(twins, **SHAPE, span=6) as cache:
                o = await cache.attention(q, k, v, causal=True)
                near(o, expected(q, k, v, causal=True)[0], 4e-6)
                async with await cache.fork(10) as copy:
                    assert await copy.append(k, v) == 30
                    await copy.truncate(3)
                    await copy.renew()
                    assert (cache.length, copy.lengths) == (20, [3])
                with pytest.raises(flashpoint.InvalidInputError, match="dropout_p"):
                    await cache.attention(q, dropout_p=0.5)

    asyncio.run(run())
    assert not left()


def test_torch_tensors_come_back_as_torch_tensors(clients):
    q, k, v = (torch.from_numpy(t).bfloat16() for t in (normal(1, HQ, 9, D), *tokens(9)))
    with sharded.cache(clients, **SHAPE, dtype="bfloat16", span=4) as cache:
        o = cache.attention(q, k, v, causal=True)
        assert o.dtype == torch.bfloat16
        torch.testing.assert_close(o, attention(q, k, v, causal=True, backend="tiled"), rtol=2**-6, atol=2**-6)
        assert cache.append(k[:, :, :1], v[:, :, :1], at=1) == 2  # this also cuts the later spans
        assert cache.attention(q[:, :, :1], with_meta=True)[1][0].keys == (0, 2)


def test_a_server_that_fails_is_named_and_what_it_left_is_mended(server, left):
    up = {"up": True}

    def choose(_):
        if not up["up"]:
            raise ConnectionError
        return server

    made = tokens(20)
    with (
        balancer(choose) as failing, clients_of(server, failing, retries=0) as pair,
        sharded.cache(pair, **SHAPE, span=8) as cache,
    ):  # fmt: skip
        cache.append(*(t[:, :, :6] for t in made))
        cache.append(*(t[:, :, 6:10] for t in made))  # the second server has a part now
        up["up"] = False
        for call in (
            lambda: cache.attention(normal(1, HQ, 1, D)), lambda: cache.append(*tokens(20)),
            lambda: cache.append(*tokens(9), at=3), lambda: cache.fork(), lambda: cache.renew(),
        ):  # fmt: skip
            with pytest.raises(flashpoint.ConnectionFailedError, match=failing.url):
                call()
        assert cache.length == 3  # the tokens before the place of the last write
        assert len(left()) == 2  # no fork remains
        up["up"] = True
        whole(cache, [t[:, :, :3] for t in made])
        cache.append(*(t[:, :, 3:] for t in made))
        whole(cache, made)
        with pytest.raises(flashpoint.DeadlineExceededError, match="http://"):
            cache.attention(normal(1, HQ, 1, D), timeout=1e-6)
    for each in left():
        ask(server, f"/caches/{each}", "DELETE")


@pytest.mark.parametrize(
    ("keywords", "field"),
    [
        ({"dropout_p": 0.1}, "dropout_p"), ({"layout": "thd"}, "layout"), ({"q_lengths": [1]}, "q_lengths"),
        ({"causal": True, "causal_alignment": "top_left"}, "causal_alignment"), ({"at": 0}, "at"),
        ({"layer": 1}, "layer"),
        ({"attn_mask": np.ones((1, 2), bool)}, "attn_mask"), ({"sinks": np.ones(3, np.float32)}, "sinks"),
        ({"cu_seqlens_q": [0, 1]}, "cu_seqlens_q"), ({"k": tokens(1)[0]}, "v"), ({"grads": ["dq"]}, "grads"),
        ({"k": tokens(2)[0], "v": tokens(2)[1]}, "k"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)  # fmt: skip
def test_what_no_server_alone_can_do_is_refused_by_name(clients, keywords, field):
    with sharded.cache(clients, **SHAPE, span=3) as cache:
        cache.append(*tokens(5))
        with pytest.raises(flashpoint.InvalidInputError) as error:
            cache.attention(normal(1, HQ, 1, D), **keywords)
        assert [problem.field for problem in error.value.errors] == [field]
        assert cache.length == 5


@pytest.mark.parametrize(
    "given",
    [
        {"span": 0},
        {"keep": 3},
        {"max_length": 5},
        {"beside": "x"},
        {"kvheads": 1},
        {"layers": "x"},
        {"layers": None},
        {"layers": 0},
    ],
    ids=str,
)
def test_sizes_that_it_does_not_take_are_refused_by_name(clients, given):
    with pytest.raises(flashpoint.InvalidInputError, match=next(iter(given))):
        sharded.cache(clients, **given)


def test_sizes_may_be_numpys_numbers(clients):
    k, v = tokens(5)
    heads, dim = (np.int64(SHAPE[name]) for name in ("kv_heads", "head_dim"))
    with sharded.cache(
        clients, **{**SHAPE, "kv_heads": heads, "head_dim": dim, "layers": np.int64(1)}, span=3
    ) as cache:
        cache.append(k, v)
        cache.append(k, v, at=1)
        assert cache.length == 6
