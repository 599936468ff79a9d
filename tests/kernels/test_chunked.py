"""Attention over keys in chunks: right against float64, and of the same bits however heads are shared out."""

import itertools

import pytest
import torch

from flashpoint_kernels import Options, verify
from flashpoint_kernels.chunked import _KEPT, attend
from flashpoint_kernels.quantization import quantize, restored
from tests.support.kernels.solving import normal

CHUNK = 1024


def pieces(k, v, start=0):
    """Chunks of k and v (Hk, n, D), each in memory of its own and of whole capacity, the first one cut at `start`."""
    for place in range(start - start % CHUNK, k.shape[1], CHUNK):
        own = []
        for t in (k, v):
            chunk = torch.full((t.shape[0], CHUNK, t.shape[2]), torch.nan, dtype=t.dtype)
            part = t[:, place : place + CHUNK]
            chunk[:, : part.shape[1]] = part
            own.append(chunk[None, :, max(start - place, 0) : part.shape[1]])
        yield max(start, place), *own


def problem(heads, kv_heads, queries, length, dim, dtype=torch.float32):
    shapes = ((heads, queries), (kv_heads, length), (kv_heads, length))
    return [normal(*shape, dim, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]


LENGTHS = [1, 7, 1023, 1024, 1025, 2500]


HEADS = [(2, 2, 64), (4, 1, 32), (6, 3, 20)]
FEW = {  # each value once; the other combinations are slow
    (torch.float32, HEADS[0], 1, False),
    (torch.bfloat16, HEADS[1], 3, True),
    (torch.float16, HEADS[2], 70, True),
}


@pytest.mark.parametrize(
    ("dtype", "sizes", "queries", "causal"),
    [
        pytest.param(*case, marks=[] if case in FEW else pytest.mark.slow)
        for case in itertools.product((torch.float32, torch.bfloat16, torch.float16), HEADS, (1, 3, 70), (False, True))
    ],
    ids=str,
)
def test_it_is_right_against_float64(dtype, sizes, queries, causal):
    heads, kv_heads, dim = sizes
    for length in LENGTHS:
        q, k, v = problem(heads, kv_heads, queries, length, dim, dtype)
        edge = length - queries
        o, lse = attend(q, pieces(k, v), dim**-0.5, edge if causal and edge < length - 1 else None)
        given = {"q": q[None], "k": k[None], "v": v[None]}
        found = verify(given, Options(causal=causal), answers={"o": o[None].to(dtype), "lse": lse[None]})
        assert found.ok, (length, found)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
def test_any_scale_and_any_first_key(scale):
    q, k, v = problem(4, 2, 2, 2100, 16)
    for start in (0, 3, 1024, 2090):
        o, lse = attend(q, pieces(k, v, start), scale, None)
        given = {"q": q[None], "k": k[None, :, start:], "v": v[None, :, start:]}
        found = verify(given, Options(scale=scale), answers={"o": o[None], "lse": lse[None]})
        assert found.ok, (start, found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (10, 5)])
def test_bits_do_not_depend_on_the_heads_beside(dtype, heads, kv_heads):
    group = heads // kv_heads
    for queries, length, dim in ((1, 3333, 64), (1, 17, 16), (5, 1040, 24), (40, 2048, 16)):
        q, k, v = problem(heads, kv_heads, queries, length, dim, dtype)
        for edge in {None, length - queries if queries > 1 else None}:
            whole = attend(q, pieces(k, v), 0.2, edge)
            for first, last in ((0, 1), (1, 3), (3, kv_heads)):
                own = slice(first * group, last * group)
                part = attend(q[own], pieces(k[first:last], v[first:last]), 0.2, edge)
                assert torch.equal(part[0], whole[0][own])
                assert torch.equal(part[1], whole[1][own])


@pytest.mark.parametrize(("queries", "kept"), [(1, _KEPT), (3, _KEPT), (40, _KEPT), (3, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_do_not_depend_on_which_chunks_share_a_call(queries, kept, dtype, monkeypatch):
    monkeypatch.setattr("flashpoint_kernels.chunked._KEPT", kept)
    q, k, v = problem(4, 2, queries, 7 * 64 + 5, 16, dtype)
    together = [torch.stack(t[:, : 7 * 64].split(64, 1)) for t in (k, v)]
    last = 7 * 64, k[None, :, 7 * 64 :], v[None, :, 7 * 64 :]
    for edge in (None, 7 * 64 + 5 - queries, 100):
        alone = None
        for cuts in ((0, 1, 2, 3, 4, 5, 6, 7), (0, 7), (0, 3, 7), (0, 1, 6, 7)):
            runs = [(64 * a, *(t[a:b] for t in together)) for a, b in itertools.pairwise(cuts)]
            found = attend(q, [*runs, last], 0.2, edge)
            alone = found if alone is None else alone
            assert torch.equal(found[0], alone[0])
            assert torch.equal(found[1], alone[1])
    given = {"q": q[None], "k": k[None], "v": v[None]}
    found = attend(q, [(0, *together), last], 0.2, None)
    assert verify(given, Options(scale=0.2), answers={"o": found[0][None].to(dtype), "lse": found[1][None]}).ok


@pytest.mark.parametrize(
    ("dtype", "largest", "rms", "of_lse"),
    [
        (torch.float32, 2e-6, 1e-6, 3e-6), (torch.float16, 1e-3, 6e-4, 3e-4), (torch.bfloat16, 8e-3, 5e-3, 2e-3),
        (torch.int8, 1.5e-2, 1e-2, 6e-3), (torch.float8_e4m3fn, 7e-2, 4e-2, 2e-2),
    ],
    ids=str,
)  # fmt: skip
def test_errors_over_caches(dtype, largest, rms, of_lse):
    """The table of docs/numerics.md."""
    for length in (64, 4096):
        q, k, v = problem(8, 8, 1, length, 64)
        s = q.double() @ k.double().mT / 8.0
        o, lse = s.softmax(-1) @ v.double(), s.logsumexp(-1)
        if dtype.itemsize == 1:
            found, sums = attend(q, pieces(*(restored(*quantize(t, dtype)) for t in (k, v))), 0.125, None)
        else:
            found, sums = attend(q.to(dtype), pieces(k.to(dtype), v.to(dtype)), 0.125, None)
            found = found.to(dtype)
        off = found.double() - o
        assert off.abs().max() <= largest * o.abs().max()
        assert off.square().mean().sqrt() <= rms * o.square().mean().sqrt()
        assert (sums.double() - lse).abs().max() <= of_lse


def test_answers_of_many_pieces_are_merged_on_the_way():
    queries, length, dim = 600, 4000, 64
    assert queries * dim * -(-length // CHUNK) < _KEPT < queries * dim * 8
    q, k, v = problem(1, 1, queries, 8 * CHUNK, dim)
    o, lse = attend(q, pieces(k, v), 0.125, 8 * CHUNK - queries)
    given = {"q": q[None], "k": k[None], "v": v[None]}
    found = verify(given, Options(causal=True), answers={"o": o[None], "lse": lse[None]})
    assert found.ok, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_see_nothing_or_a_nan(dtype):
    q, k, v = problem(2, 1, 4, 1500, 16, dtype)
    o, lse = attend(q, pieces(k, v), 0.25, -2)  # the first two queries see no key
    assert not o[:, :2].any()
    assert (lse[:, :2] == -torch.inf).all()
    assert torch.isfinite(lse[:, 2:]).all()
    k[0, 1400, 0] = torch.nan
    o, lse = attend(q, pieces(k, v), 0.25, None)
    assert o.isnan().all()
    assert lse.isnan().all()
    k[0] = 0.0  # scores of 0: an lse of 0 that is right, of one key
    o, lse = attend(q[:, :1], pieces(k[:, :1], v[:, :1]), 0.25, None)
    assert not lse.any()
    assert torch.equal(o, v[:, :1].expand(2, -1, -1))
    q[:, 0] = torch.inf  # every score is −∞, in each piece
    k[0] = -1.0
    o, lse = attend(q[:, :1], pieces(k, v), 0.25, None)
    assert not o.any()
    assert (lse == -torch.inf).all()
