"""With Triton, chunks of caches are pages of one memory block: it is divided correctly and read without copies."""

import gc

import numpy as np
import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch
from hypothesis import given
from hypothesis import strategies as st

from flashpoint_contract.caches import CHUNK, LayerShape, plan_cached
from flashpoint_contract.options import Options
from flashpoint_contract.tensors import TensorInfo
from flashpoint_kernels import attention, quantize, run
from flashpoint_kernels.triton_backend.host import launch
from flashpoint_server.engine.caches.attending import CachedCall, CallTensors
from flashpoint_server.engine.caches.cache import Terms
from flashpoint_server.engine.caches.pages import Block
from flashpoint_server.engine.caches.store import CacheStore
from flashpoint_server.engine.state.ledger import Ledger
from flashpoint_server.ipc.bodies import CacheRef, CacheShape
from flashpoint_server.refusal import Refusal

ALICE = Terms("alice")
HQ, HK, D, DV = 4, 2, 16, 16
SHAPE = CacheShape((HK,), (D,), (DV,), "float32")


@given(st.lists(st.tuples(st.sampled_from([48, 64, 160]), st.integers(1, 9), st.integers(0, 50)), max_size=40))
def test_pieces_of_a_block_never_overlap_and_all_of_it_comes_back(operations):
    block, taken = Block(4096, "cpu"), []
    for unit, count, choice in operations:
        if choice % 3 == 0 and taken:
            block.give_back(*taken.pop(choice % len(taken)))
            continue
        try:
            start = block.take(unit * count, unit)
        except Refusal:
            continue
        assert start % unit == 0
        assert 0 <= start <= 4096 - unit * count
        assert all(start + unit * count <= other or start >= other + size for other, size in taken)
        taken.append((start, unit * count))
    for piece in taken:
        block.give_back(*piece)
    assert block.take(4096, 1) == 0


def test_a_device_with_less_memory_has_a_smaller_block():
    block = Block.largest(1 << 50, "cpu")
    assert 1 << 26 <= len(block.memory) < 1 << 50


def normal(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def call_of(store, serials, q, tokens=None, dtype="float32", **options):
    """Return (call over caches, its output tensor o). `tokens`: k and v of new tokens, or None."""
    tensors = {"q": q} | (dict(zip("kv", tokens, strict=True)) if tokens else {})
    if "attn_mask" in options:
        tensors["attn_mask"] = options.pop("attn_mask")
    infos = {name: TensorInfo(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}
    spec = plan_cached(infos, Options(**options), LayerShape(HK, D, DV, dtype), len(serials))
    o = torch.empty(*q.shape[:3], DV, dtype=q.dtype)
    caches = CacheRef("alice", serials, 0, None, "", None, -1)
    return CachedCall(CallTensors.of(spec, tensors, {"o": o}), caches), o


def create(store, count, keep=None, dtype="float32"):
    shape = CacheShape((HK,), (D,), (DV,), dtype)
    return [record.serial for record in store.create(ALICE, shape, count, None, [keep], None)]


def attended(paged, lengths, q, cut=None, keep=None, in_pages=None, **options):
    """Return o over caches of these lengths, by the backend `tiled`.

    With `cut`, first truncate each cache to `cut` tokens, then to all but one, and each time write the rest again.
    Assert that the keys are read in place if and only if `in_pages`, or by default `paged`, is true.
    """
    store = CacheStore(Ledger(1 << 26), 100.0, paged=paged)
    serials = create(store, len(lengths), keep)
    for n, (serial, length) in enumerate(zip(serials, lengths, strict=True)):
        k, v = normal(HK, length, D, seed=n), normal(HK, length, DV, seed=n + 100)
        store.write(ALICE, [serial], 0, None, [(k, v)])
        for at in (cut, length - 1) if cut is not None else ():
            store.truncate(ALICE, serial, at)
            store.write(ALICE, [serial], 0, None, [(k[:, at:], v[:, at:])])
    call, o = call_of(store, serials, q, **options)
    problem = call.problem(call.write(store))
    in_place = problem.tensors["k"].shape[0] == len(store._block.memory) // (16 * HK * (D + DV) * 4) if paged else False
    assert in_place == (paged if in_pages is None else in_pages)
    run([problem], "tiled")
    return o


@pytest.mark.parametrize(
    "options",
    [
        {}, {"causal": True}, {"window": (20, -1)}, {"softcap": 3.0, "layout": "bshd"},
        {"attn_mask": torch.arange(130) % 3 > 0},
    ],
    ids=["plain", "causal", "window", "bshd", "mask"],
)  # fmt: skip
def test_pages_are_read_in_place_with_the_bits_of_a_copy(options):
    q = normal(3, HQ, 5, D, seed=7)
    if options.get("layout") == "bshd":
        q = q.transpose(1, 2).contiguous()
    lengths = [130, 17, 64]
    in_place, copied = attended(True, lengths, q, cut=9, **options), attended(False, lengths, q, **options)
    if "window" in options:  # a copy begins at the first visible key, so its tiles and roundings differ
        torch.testing.assert_close(in_place, copied, rtol=0, atol=1e-6)
        copied = attended(True, lengths, q, **options)
    assert torch.equal(in_place, copied)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("backend", ["triton", "tiled"])
def test_8_bit_pages_are_read_in_place_with_their_scales(dtype, backend):
    """8-bit pages are read in place, after a fork has copied a page, with a mask, and with NaN in a key.

    If tokens were dropped, as in the case for `tiled`, a mask, which also has columns for them, causes a copy.
    """
    store, name = CacheStore(Ledger(1 << 26), 100.0, paged=True), str(dtype).removeprefix("torch.")
    lengths = [130, 17] if backend == "triton" else [2 * CHUNK + 30, 17]
    serials = create(store, 2, keep=100, dtype=name)
    q, tokens = normal(2, HQ, 3, D, seed=7), []
    for n, (serial, length) in enumerate(zip(serials, lengths, strict=True)):
        k, v = normal(HK, length, D, seed=n), normal(HK, length, DV, seed=n + 100)
        tokens.append([quantize(t, dtype) for t in (k, v)])
        store.write(ALICE, [serial], 0, None, [(k, v)])
        (fork,) = store.fork(ALICE, [serial], [length - 3], [])
        store.write(ALICE, [fork.serial], 0, None, [(k[:, -3:], v[:, -3:])])
        serials[n] = fork.serial
    for track in (cache.tracks[0] for cache in store.find(ALICE, serials)):
        assert track.chunks[-1].nbytes == track.chunks[-1].capacity * HK * (D + DV + 8)
    mask = torch.arange(max(lengths)) % 3 > 0
    for more in ({}, {"layout": "bshd"}, {"attn_mask": mask}):
        options = {"window": (40, 0), **more}
        bshd = options.get("layout") == "bshd"
        call, o = call_of(store, serials, q.transpose(1, 2).contiguous() if bshd else q, dtype=name, **options)
        problem = call.problem(call.write(store))
        in_place = problem.tensors["k"].data_ptr() == store._block.memory.data_ptr()
        assert in_place == ("attn_mask" not in options or backend == "triton")
        run([problem], backend)
        for n, ((k, k_scale), (v, v_scale)) in enumerate(tokens):
            per_sequence = dict(options, layout="bhsd")
            if "attn_mask" in per_sequence:
                per_sequence["attn_mask"] = mask[: lengths[n]]
            expected = attention(
                q[n : n + 1],
                k[None],
                v[None],
                k_scale=k_scale[None],
                v_scale=v_scale[None],
                backend="reference",
                **per_sequence,
            )
            actual = o[n].transpose(0, 1) if bshd else o[n]
            torch.testing.assert_close(actual, expected[0], rtol=0, atol=2e-6)
    nothing = torch.full((HK, 1, D), torch.nan), normal(HK, 1, DV)
    store.write(ALICE, serials[1:], 0, None, [nothing])
    call, o = call_of(store, serials, q, dtype=name, window=(40, 0))
    run([call.problem(call.write(store))], backend)
    assert o[1, :, -1].isnan().all()
    assert not o[0].isnan().any()


def test_forks_share_pages_until_one_writes_and_kernels_read_both():
    store = CacheStore(Ledger(1 << 26), 100.0, paged=True)
    (serial,) = create(store, 1)
    k, v = normal(HK, 40, D), normal(HK, 40, DV, seed=1)
    store.write(ALICE, [serial], 0, None, [(k, v)])
    (fork,) = [record.serial for record in store.fork(ALICE, [serial], [33], [])]
    tracks = [cache.tracks[0] for cache in store.find(ALICE, [serial, fork])]
    assert torch.equal(tracks[0].numbers(0)[:3], tracks[1].numbers(0))
    new = normal(HK, 1, D, seed=2), normal(HK, 1, DV, seed=3)
    store.write(ALICE, [fork], 0, None, [new])
    assert not set(tracks[0].numbers(0).tolist()) & set(tracks[1].numbers(0).tolist())
    q = normal(2, HQ, 1, D, seed=4)
    call, o = call_of(store, [serial, fork], q)
    run([call.problem(call.write(store))], "triton")
    for n, (keys, values) in enumerate(
        [(k, v), [torch.cat((t[:, :33], n), 1) for t, n in zip((k, v), new, strict=True)]]
    ):
        expected = attention(q[n : n + 1].double(), keys[None].double(), values[None].double(), backend="reference")
        torch.testing.assert_close(o[n : n + 1].double(), expected, rtol=0, atol=2e-6)


def test_a_kernel_reads_the_pages_of_forks_once_with_the_bits_of_each_alone():
    store = CacheStore(Ledger(1 << 26), 100.0, paged=True)
    (serial,) = create(store, 1)
    store.write(ALICE, [serial], 0, None, [(normal(HK, CHUNK + 9, D), normal(HK, CHUNK + 9, DV, seed=1))])
    serials = [serial, *(record.serial for record in store.fork(ALICE, [serial] * 2, [CHUNK + 9, CHUNK + 5], []))]
    new = [(normal(HK, 1, D, seed=n), normal(HK, 1, DV, seed=n + 9)) for n in serials]
    store.write(ALICE, serials, 0, None, new)
    q = normal(3, HQ, 1, D, seed=4)
    call, o = call_of(store, serials, q)
    problem = call.problem(call.write(store))
    assert "attention_cascade" in {c.kernel.__name__ for c in launch.forward_calls([problem]) if c.programs}
    run([problem], "triton")
    for n, one in enumerate(serials):
        alone, of_one = call_of(store, [one], q[n : n + 1])
        run([alone.problem(alone.write(store))], "triton")
        assert torch.equal(o[n : n + 1], of_one)


def test_tokens_that_a_layer_no_longer_keeps_are_not_read():
    """Tokens that `keep` has dropped are not read, in place or in a copy.

    With a mask, which has columns for dropped tokens, too, the remaining keys are copied.
    """
    length, q = 2 * CHUNK + 30, normal(1, HQ, 2, D, seed=7)
    for options, in_pages in (({}, True), ({"attn_mask": torch.arange(length) % 3 > 0}, False)):
        call_options = {"window": (40, 0), **options}
        actual = attended(True, [length], q, keep=50, in_pages=in_pages, cut=length - 5, **call_options)
        assert torch.equal(actual, attended(True, [length], q, **call_options))


def test_a_block_without_a_free_piece_is_said_and_nothing_is_lost():
    store = CacheStore(Ledger(1 << 20), 100.0, paged=True)  # fits 4 chunks of 1,024 tokens and a little more
    first, second = create(store, 2)
    tokens = normal(HK, CHUNK, D), normal(HK, CHUNK, DV)
    store.write(ALICE, [first], 0, None, [tokens])
    block = store._block
    free = list(block._free)
    taken = block.take(sum(end - start for start, end in free) - 4096, 1)  # as if other caches used this memory
    with pytest.raises(Refusal, match="no free piece"):
        store.write(ALICE, [second], 0, None, [tokens])
    assert store.look(ALICE, [second])[0].lengths == [0]
    with pytest.raises(Refusal, match="no free piece"):
        store.create(ALICE, SHAPE, 1, CHUNK, [None], None)
    block.give_back(taken, sum(end - start for start, end in free) - 4096)
    assert block._free == free
    assert len(store.listed(ALICE)) == 2


def test_pools_of_shapes_that_no_cache_has_are_forgotten():
    store = CacheStore(Ledger(1 << 20), 100.0, paged=True)
    serials = create(store, 1)
    for dim in range(1, 50):
        shape = CacheShape((HK,), (dim,), (DV,), "float32")
        (record,) = store.create(ALICE, shape, 1, None, [None], None)
        store.delete(ALICE, [record.serial])
    gc.collect()
    assert len(store._pools) == 1
    store.delete(ALICE, serials)
