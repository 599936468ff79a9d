"""Chunks, the memory blocks of a cache's layer: 8-bit scales, dropping by `keep`, alignment, and no old data."""

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch

from flashpoint_contract.caches import CHUNK
from flashpoint_kernels import dequantize, quantize
from flashpoint_server.engine.caches.cache import Terms
from flashpoint_server.engine.caches.chunks import TokenSize, Track
from flashpoint_server.engine.caches.slabs import HUGE
from flashpoint_server.ipc.bodies import CacheShape
from tests.support.cache_store import DV, HEADS, D, create, read, refused, store_of, tokens

pytestmark = pytest.mark.usefixtures("in_slabs")


def test_tokens_before_the_last_are_freed_where_a_layer_keeps_so_many():
    store = store_of()
    (serial,) = create(store, keep=[100, None])
    for seed in range(3):
        store.write(Terms("alice"), [serial], 0, None, [tokens(CHUNK, seed)])
    record = store.look(Terms("alice"), [serial])[0]
    assert (record.lengths, record.firsts) == ([3 * CHUNK, 0], [CHUNK, 0])
    refused("cache_dropped", store.write, Terms("alice"), [serial], 0, [5], [tokens(1)])
    refused("cache_dropped", store.truncate, Terms("alice"), serial, 5)
    refused(
        "cache_dropped", store.write, Terms("alice"), [serial], 0, None, [tokens(1)], lambda queries, length: CHUNK - 1
    )


def test_memory_that_changes_hands_shows_nothing_of_its_last_owner():
    store = store_of()
    for owner, canary in (("alice", 7777.0), ("bob", 1.0)):
        (serial,) = create(store, owner, max_length=CHUNK)
        k, v = torch.full((HEADS, 900, D), canary), torch.full((HEADS, 900, DV), canary)
        if owner == "bob":
            assert read(store, owner, serial, 0)[1].size == 0
            k, v = k[:, :5], v[:, :5]
        store.write(Terms(owner), [serial], 0, None, [(k, v)])
        assert (read(store, owner, serial, 0)[1] == canary).all()
        store.truncate(Terms(owner), serial, 2)
        assert read(store, owner, serial, 0)[1].shape[1] == 2
        store.delete(Terms(owner), [serial])


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_8_bits_have_a_scale_for_each_token_and_head(dtype):
    store = store_of()
    shape = CacheShape((HEADS,), (D,), (DV,), str(dtype).removeprefix("torch."))
    (record,) = store.create(Terms("alice"), shape, 1, None, [None], None)
    base = store.ledger.used
    k, v = tokens(CHUNK + 5)
    store.write(Terms("alice"), [record.serial], 0, None, [(k[:, :7], v[:, :7])])  # the next write enlarges this chunk
    store.write(Terms("alice"), [record.serial], 0, None, [(k[:, 7:], v[:, 7:])])
    assert store.ledger.used - base == (CHUNK + 16) * HEADS * (D + DV + 8)
    store.fork(Terms("alice"), [record.serial], [CHUNK - 1], [])
    (cache,) = store.find(Terms("alice"), [record.serial])
    track = cache.tracks[0]
    for name, given in (("k", k), ("v", v)):
        values, scale = quantize(given, dtype)
        pieces = [getattr(piece, name)[0] for piece in track.pieces(0, track.length)]
        assert torch.equal(torch.cat(pieces, 1), dequantize(values, scale))
        assert torch.equal(torch.cat([getattr(run, name)[0] for run in track.scales(0, track.length)], 1), scale)
        (part,) = track.pieces(3, 9)
        assert torch.equal(getattr(part, name)[0], dequantize(values, scale)[:, 3:9])


def test_chunks_as_large_as_a_huge_page_begin_on_one():
    for heads, dtype in ((8, torch.float32), (8, torch.bfloat16), (1, torch.float32), (9, torch.int8)):
        size = TokenSize(heads, 64, 72, dtype, "cpu")
        chunk = Track(size).new_chunk(0, CHUNK, None)
        assert (chunk.k.shape, chunk.v.shape) == ((1, heads, CHUNK, 64), (1, heads, CHUNK, 72))
        if heads * (64 + 72) * CHUNK * dtype.itemsize >= HUGE:
            assert chunk.k.data_ptr() % HUGE == 0
        for t in (chunk.k, chunk.v):
            assert t.is_contiguous()
            assert t.data_ptr() % 64 == 0
            t.fill_(1)
        assert bool((chunk.k == 1).all())
