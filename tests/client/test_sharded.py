"""The outputs and gradients of `flashpoint.sharded` equal those of one server, which computes in float64.

In most tests, three clients of one real server stand for three servers, because the requests are the same. Slow tests
have several servers. _shards/test_run.py tests servers that fail.
"""

import asyncio
import contextlib
import signal
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch

import flashpoint
import flashpoint.torch
from flashpoint import sharded
from tests.support.gated import GatedServer
from tests.support.servers import wait_for

BFLOAT16 = ml_dtypes.bfloat16


@contextlib.contextmanager
def clients_of(*servers):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(flashpoint.Client(each.url, timeout=600)) for each in servers]


@pytest.fixture(scope="module")
def clients(server):
    with clients_of(server, server, server) as clients:
        yield clients


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def near(actual, expected, bound):
    """Check that `actual` and `expected` differ by at most `bound` times the largest number, with equal infinities."""
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(expected)
    assert np.array_equal(actual[~finite], expected[~finite])
    error = np.abs(actual[finite] - expected[finite]).max(initial=0)
    assert error <= bound * max(1, np.abs(expected[finite]).max(initial=0))


SIZES = st.sampled_from((0, 1, 5, 17, 40))


@st.composite
def problems(draw):
    """Draw (q, k, v, do, keywords, grads) with any layout, rank, dtype and option that can be sharded."""
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    numbers = np.random.default_rng(draw(st.integers(0, 1000)))
    layout, dtype = pick("bhsd", "bshd", "thd"), pick(np.float32, np.float32, np.float32, np.float16, BFLOAT16)
    rank = 3 if layout == "thd" else pick(2, 3, 4, 4)
    one_head = layout != "thd" and rank < 4
    kv_heads = 1 if one_head else pick(1, 2)
    heads = kv_heads if one_head else kv_heads * pick(1, 3)
    q_len, kv_len, batch = draw(SIZES), draw(SIZES), 1 if rank == 2 else pick(1, 2, 3)
    dim, value_dim = pick((8, 8), (8, 6))
    keywords = {"layout": layout, "causal": pick(False, True), "causal_alignment": pick("bottom_right", "top_left")}
    if layout == "thd":
        for name, total in (("cu_seqlens_q", q_len), ("cu_seqlens_k", kv_len)):
            inner = draw(st.lists(st.integers(0, total), min_size=batch - 1, max_size=batch - 1))
            keywords[name] = [0, *sorted(inner), total]
    else:
        if draw(st.booleans()):
            keywords["q_lengths"] = [draw(st.integers(0, q_len)) for _ in range(batch)]
            keywords["kv_lengths"] = [draw(st.integers(0, kv_len)) for _ in range(batch)]
        full = ((batch, heads) if rank == 4 else (batch,) if rank == 3 else ()) + (q_len, kv_len)
        if mask := pick(None, "bool", "float"):
            shape = tuple(size if draw(st.booleans()) else 1 for size in full)[draw(st.integers(0, 2)) :]
            values = np.asarray(numbers.standard_normal(shape), np.float32)
            keywords["attn_mask"] = values if mask == "float" else np.asarray(values > -0.5)
    if draw(st.booleans()):
        del keywords["causal_alignment"]
        each = st.integers(-10, 50)
        keywords["offset"] = draw(each) if draw(st.booleans()) else [draw(each) for _ in range(batch)]
    keywords |= {"window": (pick(-1, 0, 3, 20), pick(-1, 0, 2, 30))} if draw(st.booleans()) else {}
    keywords |= {"softcap": 3.0} if draw(st.booleans()) else {}
    keywords |= {"scale": 0.3} if draw(st.booleans()) else {}
    keywords |= {"sinks": numbers.standard_normal(heads).astype(np.float32)} if draw(st.booleans()) else {}
    if draw(st.booleans()):
        shape = pick((heads,), (batch, heads))
        keywords["alibi_slopes"] = numbers.random(shape).astype(np.float32)

    def tensor(heads, length, dim):
        rows = (length, heads) if layout == "thd" or (layout == "bshd" and rank == 4) else (heads, length)
        shape = rows if layout == "thd" else (batch, *rows) if rank == 4 else (batch, length)[3 - rank :]
        return numbers.standard_normal((*shape, dim)).astype(dtype)

    q, do = tensor(heads, q_len, dim), tensor(heads, q_len, value_dim)
    k, v = tensor(kv_heads, kv_len, dim), tensor(kv_heads, kv_len, value_dim)
    grads = ["dv", "dq", "dk"]
    grads += ["dsinks"] if "sinks" in keywords else []
    grads += ["dattn_mask"] if "attn_mask" in keywords and keywords["attn_mask"].dtype != np.bool_ else []
    return q, k, v, do, keywords, grads


# The largest allowed error, relative to the largest number in the answer: for float32 the bound of one server; for half
# types twice their machine epsilon, because each part is rounded before the merge, and the result after it.
BOUNDS = {np.dtype(np.float32): 4e-6, np.dtype(np.float16): 2**-9, np.dtype(BFLOAT16): 2**-6}


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(problems(), st.sampled_from((None, None, (1, 3), (3, 1), (2, 3))), st.booleans(), st.booleans())
def test_any_problem_is_as_one_server_in_float64_solves_it(clients, problem, parts, with_forward, with_dlse):
    q, k, v, do, keywords, grads = problem
    bound = BOUNDS[q.dtype]
    o, lse = clients[0].attention(q, k, v, backend="reference", return_lse=True, **keywords)
    actual = sharded.attention(clients, q, k, v, parts=parts, return_lse=True, **keywords)
    near(actual[0], o, bound)
    near(actual[1], lse, 4e-6)
    more = {"dlse": normal(*lse.shape)} if with_dlse else {}
    expected = clients[0].attention_grad(do, q, k, v, backend="reference", grads=grads, **more, **keywords)
    more |= {"o": o, "lse": lse} if with_forward else {}
    actual = sharded.attention_grad(clients, do, q, k, v, parts=parts, grads=grads, **more, **keywords)
    for gradient, wanted in zip(actual, expected, strict=True):
        near(gradient, wanted, 4 * bound)


@pytest.mark.parametrize(("dtype", "unit"), [(np.float16, 2**-11), (BFLOAT16, 2**-8)])
def test_half_answers_err_by_two_roundings_and_no_more(clients, dtype, unit):
    """With u = `unit`: |o − o₆₄| ≤ u·Σ p|v| (rounding of the parts) + u·|o| (of the merged o) + float32's rounding."""
    q, k, v = (normal(1, 4, 64, 32, dtype=dtype, seed=seed) for seed in range(3))
    wide = [t.astype(np.float64) for t in (q, k, v)]
    o = clients[0].attention(*wide)
    size = clients[0].attention(*wide[:2], np.abs(wide[2]))
    actual = sharded.attention(clients, q, k, v, parts=(1, 3)).astype(np.float64)
    assert (np.abs(actual - o) <= unit * (size + np.abs(o)) + 1e-5).all()
    once = sharded.attention(clients, *(t.astype(np.float32) for t in (q, k, v)), parts=(1, 3))
    assert np.abs(once - o).max() < 1e-5  # the same inputs as float32: no rounding to half


def check_causal_work(clients):
    """Check causal answers, and that all parts have nearly equal work. Any server may have answered any part."""
    q, k, v, do = (normal(1, 2, 600, 16, seed=seed) for seed in range(4))
    for parts in ((1, 3), (3, 1), None):
        o, actual = sharded.attention(clients, q, k, v, causal=True, parts=parts, with_meta=True)
        near(o, clients[0].attention(q, k, v, causal=True), 4e-6)
        assert sum(part.pairs for part in actual) == 2 * 600 * 601 // 2
        work = [part.pairs for part in actual]
        assert len(work) == 3
        assert max(work) < 1.02 * min(work)
        assert {part.url for part in actual} <= {client.url for client in clients}
    dq, dk, dv = sharded.attention_grad(clients, do, q, k, v, causal=True, parts=(1, 3))
    for actual, expected in zip((dq, dk, dv), clients[0].attention_grad(do, q, k, v, causal=True), strict=True):
        near(actual, expected, 8e-6)


def test_causal_work_is_cut_into_equal_parts(clients):
    check_causal_work(clients)


@pytest.mark.slow
def test_three_servers_share_causal_work(server, start_server):
    more = [start_server(ready=False) for _ in range(2)]
    with clients_of(server, *(each.wait_ready() for each in more)) as clients:
        check_causal_work(clients)


def test_one_query_over_many_keys_cuts_the_keys(clients):
    q, k, v = normal(1, 8, 1, 32), normal(1, 2, 999, 32, seed=1), normal(1, 2, 999, 32, seed=2)
    o, actual = sharded.attention(clients, q, k, v, causal=True, with_meta=True)
    near(o, clients[0].attention(q, k, v, causal=True), 4e-6)
    assert sorted(part.keys for part in actual) == [(0, 333), (333, 666), (666, 999)]


def test_float64_is_not_merged(clients):
    """The keys of a float64 problem are not cut: merging needs lse, which is float32 and would make o inexact."""
    q, k, v, do = (normal(2, 4, 90, 16, dtype=np.float64, seed=seed) for seed in range(4))
    o, parts = sharded.attention(clients, q, k, v, causal=True, with_meta=True)
    near(o, clients[0].attention(q, k, v, causal=True), 1e-14)
    assert len(parts) == 3
    expected = clients[0].attention_grad(do, q, k, v, causal=True)
    for actual, wanted in zip(sharded.attention_grad(clients, do, q, k, v, causal=True), expected, strict=True):
        near(actual, wanted, 1e-14)


def test_answers_are_the_same_bits_every_time(clients):
    """Parts are merged in a fixed order, regardless of the order in which their answers arrive."""
    q, k, v, do = (normal(1, 2, 200, 16, seed=seed) for seed in range(4))
    runs = [sharded.attention_grad(clients, do, q, k, v, parts=(2, 4), causal=True) for _ in range(3)]
    for run in runs[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_a_nan_stays_in_its_own_rows(clients):
    q, k, v = (normal(1, 2, 30, 8, seed=seed) for seed in range(3))
    clean = sharded.attention(clients, q, k, v, parts=(1, 3))
    q[0, 1, 4] = np.nan
    o = sharded.attention(clients, q, k, v, parts=(1, 3))
    assert np.isnan(o[0, 1, 4]).all()
    o[0, 1, 4] = clean[0, 1, 4]
    near(o, clean, 1e-6)


def test_derivatives_in_torch_over_all_servers(clients):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 33, 8), torch.randn(2, 2, 33, 8), torch.randn(2, 2, 33, 8)
    mask, sinks, do, dlse = torch.randn(4, 33, 33), torch.randn(4), torch.randn(2, 4, 33, 8), torch.randn(2, 4, 33)
    results = []
    for client in (clients[0], clients):
        leaves = [t.clone().requires_grad_() for t in (q, k, v, mask, sinks)]
        options = {"attn_mask": leaves[3], "sinks": leaves[4], "causal": True, "return_lse": True}
        o, lse = flashpoint.torch.attention(*leaves[:3], client=client, **options)
        ((o * do).sum() + (lse * dlse).sum()).backward()
        results.append([o.detach(), lse.detach(), *(leaf.grad for leaf in leaves)])
    for one, all_of_them in zip(*results, strict=True):
        torch.testing.assert_close(all_of_them, one, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(flashpoint.torch.attention(q, k, v, client=clients), sharded.attention(clients, q, k, v))


def test_the_asynchronous_form(clients):
    q, k, v, do = (normal(1, 2, 50, 8, seed=seed) for seed in range(4))

    async def run():
        async with contextlib.AsyncExitStack() as stack:
            twins = [await stack.enter_async_context(flashpoint.AsyncClient(each.url)) for each in clients]
            return await asyncio.gather(
                sharded.async_attention(twins, q, k, v, parts=(1, 3)),
                sharded.async_attention_grad(twins, do, q, k, v, parts=(1, 3)),
            )

    o, grads = asyncio.run(run())
    assert np.array_equal(o, sharded.attention(clients, q, k, v, parts=(1, 3)))
    for actual, expected in zip(grads, sharded.attention_grad(clients, do, q, k, v, parts=(1, 3)), strict=True):
        assert np.array_equal(actual, expected)


@pytest.fixture(scope="module")
def survivor(start_server, tmp_path_factory):
    return GatedServer(start_server, tmp_path_factory.mktemp("survivor"), interpret=True)


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_part_of_a_killed_server_is_answered_by_another(server, survivor, start_server, tmp_path, direction):
    """Both servers wait until each has a part. Then one is killed, and the other answers both parts."""
    victim = GatedServer(start_server, tmp_path, interpret=True)
    survivor.gate("gate").unlink(missing_ok=True)
    q, k, v, do = (normal(1, 2, 40, 16, seed=seed) for seed in range(4))
    name = f"gate-{direction}"
    how = {"parts": (1, 2), "with_meta": True, "request_id": name, "backend": "triton"}
    with clients_of(server, victim.server, survivor.server) as (one, *two), ThreadPoolExecutor() as pool:
        o, lse = one.attention(q, k, v, return_lse=True)
        if direction == "forward":
            call = pool.submit(lambda: sharded.attention(two, q, k, v, return_lse=True, **how))
            expected = [o, lse]
        else:
            expected = one.attention_grad(do, q, k, v)
            call = pool.submit(lambda: sharded.attention_grad(two, do, q, k, v, o=o, lse=lse, **how))
        try:
            for gated in (victim, survivor):
                wait_for(lambda: gated.begun(name) or call.done(), lambda: "no part for a server")  # noqa: B023
            assert not call.done(), call.result()
            victim.server.process.send_signal(signal.SIGKILL)
            assert victim.server.wait_exit() == -signal.SIGKILL
        finally:
            survivor.gate("gate").touch()
        actual, parts = call.result()
    for answer, wanted in zip(actual, expected, strict=True):
        near(answer, wanted, 8e-6)
    assert {part.url for part in parts} == {survivor.server.url}
    assert sum(part.meta.retries for part in parts) >= 1
