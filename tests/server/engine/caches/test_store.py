"""The store of caches behaves like a model in NumPy, and counts its memory correctly."""

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flashpoint_contract.caches import CHUNK
from flashpoint_server.engine.caches.cache import StoredCache, Terms
from flashpoint_server.engine.caches.chunks import Track
from flashpoint_server.engine.caches.idempotency import IdempotencyKeys
from flashpoint_server.engine.caches.store import CacheStore
from flashpoint_server.engine.state.ledger import Ledger
from flashpoint_server.refusal import Refusal
from tests.support.cache_store import (
    BASE,
    DV,
    HEADS,
    LAYERS,
    LIMIT,
    SHAPE,
    TOKEN,
    TTL,
    Clock,
    D,
    create,
    read,
    refused,
    store_of,
    tokens,
)

pytestmark = pytest.mark.usefixtures("in_slabs")


OWNERS = ("alice", "bob")


def outcome(call, *arguments, **keywords):
    """Call a function; return (None, its result), or (error code, None) if it raises a Refusal."""
    try:
        return None, call(*arguments, **keywords)
    except Refusal as refusal:
        return refusal.code, None


class Model:
    """The expected owner, tokens, idempotency keys and expiry of a cache."""

    def __init__(self, owner, ttl_end, max_length=None, keep=None):
        self.owner, self.expires, self.max_length, self.keep = owner, ttl_end, max_length, keep
        self.layers = [np.zeros((HEADS, 0, D + DV), np.float32) for _ in range(LAYERS)]
        self.keys, self.last = [], ""

    def copy(self, end, expires):
        other = Model(self.owner, expires, self.max_length, self.keep)
        other.layers = [layer[:, :end].copy() for layer in self.layers]
        return other

    def wrote(self, key):
        self.last = key
        if key:
            self.keys = [*(one for one in self.keys if one != key), key][-64:]


class Stateful(RuleBasedStateMachine):
    """Random operations on the store and on models of its caches, whose results are compared."""

    paged = False

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.store = store_of(clock=self.clock, paged=self.paged)
        self.there, self.lost, self.gone = {}, {}, {}
        self.payloads = {}  # of each owner's idempotency keys
        self.seed = 0

    def expected(self, owner, serial):
        """Return the expected error code of a call with this cache, or None."""
        if serial in self.there and self.there[serial].owner == owner:
            return None
        return "cache_lost" if self.lost.get(serial) == owner else "cache_not_found"

    def some(self, data):
        serials = [*self.there, *self.lost, *self.gone] or [999]
        return data.draw(st.sampled_from(serials))

    @rule(
        owner=st.sampled_from(OWNERS), count=st.integers(1, 2), max_length=st.sampled_from([None, None, 1500]),
        keep=st.sampled_from([None, None, 300]),
    )  # fmt: skip
    def create(self, owner, count, max_length, keep):
        code, made = outcome(create, self.store, owner, count, max_length=max_length, keep=[keep] * LAYERS)
        assert code in (None, "cache_memory")
        for serial in made or ():
            self.there[serial] = Model(owner, self.clock.now + TTL, max_length, keep)

    @rule(
        data=st.data(), owner=st.sampled_from(OWNERS), layer=st.integers(0, LAYERS - 1), count=st.integers(0, 1100),
        back=st.none() | st.integers(-2, 1300), key=st.sampled_from(["", *"abcdef"]),
    )  # fmt: skip
    def write(self, data, owner, layer, count, back, key):
        serial = self.some(data)
        model, code = self.there.get(serial), self.expected(owner, serial)
        at = None
        payload = f"layer {layer} of {serial}".encode()
        if key and self.payloads.get((owner, key), payload) != payload:
            code = "idempotency_key_reused"
        if code is None:
            length = model.layers[layer].shape[1]
            at = None if back is None else max(0, length - back)
            place = length if at is None else at
            if key and model.last == key:
                code = "repeats"
            elif key and key in model.keys:
                code = "cache_stale"
            elif place > length:
                code = "cache_position"
            elif place < (first := read(self.store, owner, serial, layer)[0]):
                assert first
                code = "cache_dropped"
            elif model.max_length is not None and place + count > model.max_length:
                code = "cache_full"
        self.seed += 1
        k, v = tokens(count, self.seed)
        places = None if at is None else [at]
        error, _ = outcome(self.store.write, Terms(owner, None, key, payload), [serial], layer, places, [(k, v)])
        assert error in ((None, "cache_memory") if code is None else (None,) if code == "repeats" else (code,))
        if error is not None:
            return
        if code == "repeats":
            self.store.ledger.enter([serial])
            self.store.ledger.leave([serial], used=True)
        model.expires = self.clock.now + TTL
        if code is None:
            new = np.concatenate((k.numpy(), v.numpy()), -1)
            model.layers[layer] = np.concatenate((model.layers[layer][:, :place], new), 1)
            model.wrote(key)
            self.payloads[owner, key] = payload

    @rule(data=st.data(), owner=st.sampled_from(OWNERS), end=st.none() | st.integers(0, 2500), free=st.booleans())
    def fork(self, data, owner, end, free):
        serials = [self.some(data) for _ in range(2)]
        freed = [self.some(data)] if free else []
        codes = [self.expected(owner, serial) for serial in [*serials, *freed]]
        code = next((one for one in codes if one), None)
        if code is None and end is not None:
            longest = [max(layer.shape[1] for layer in self.there[s].layers) for s in serials]
            code = "cache_position" if any(end > one for one in longest) else None
        lengths = None if end is None else [end] * 2
        error, made = outcome(self.store.fork, Terms(owner), serials, lengths, freed)
        assert error in ((None, "cache_memory", "cache_dropped") if code is None else (code, "cache_dropped"))
        if error is not None:
            return
        for serial, record in zip(serials, made, strict=True):
            self.there[record.serial] = self.there[serial].copy(end, self.clock.now + TTL)
        for serial in freed:
            self.gone[serial] = self.there.pop(serial)

    @rule(data=st.data(), owner=st.sampled_from(OWNERS), end=st.integers(0, 2500))
    def truncate(self, data, owner, end):
        serial = self.some(data)
        code = self.expected(owner, serial)
        if code is None and end > max(layer.shape[1] for layer in self.there[serial].layers):
            code = "cache_position"
        error, _ = outcome(self.store.truncate, Terms(owner), serial, end)
        assert error in (code, "cache_dropped")
        if error is not None:
            return
        model = self.there[serial]
        model.layers = [layer[:, :end] for layer in model.layers]
        model.wrote("")

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def delete(self, data, owner):
        serial = self.some(data)
        if code := self.expected(owner, serial):
            refused(code, self.store.delete, Terms(owner), [serial])
            return
        self.store.delete(Terms(owner), [serial])
        self.gone[serial] = self.there.pop(serial)

    @rule(seconds=st.sampled_from([1.0, 60.0, 120.0]))
    def wait(self, seconds):
        self.clock.now += seconds
        for serial, model in list(self.there.items()):
            if self.clock.now >= model.expires:
                self.lost[serial] = self.there.pop(serial).owner

    @precondition(lambda self: self.there)
    @rule(owner=st.sampled_from(OWNERS))
    def remove_a_key(self, owner):
        self.store.ledger.keep_owners(set(OWNERS) - {owner})
        for serial, model in list(self.there.items()):
            if model.owner == owner:
                self.lost[serial] = self.there.pop(serial).owner

    @invariant()
    def holds_what_was_written(self):
        for serial, model in self.there.items():
            for layer, expected in enumerate(model.layers):
                first, stored = read(self.store, model.owner, serial, layer)
                np.testing.assert_array_equal(stored, expected[:, first:])
                assert model.keep is not None or not first

    @invariant()
    def counts_what_it_holds(self):
        self.store.ledger.sweep()
        chunks = {}
        caches = self.store.ledger.all(StoredCache)
        for cache in caches:
            nbytes = BASE
            for track in cache.tracks:
                for chunk in (*track.chunks, *track.spares):
                    if chunk is not None:
                        chunks.setdefault(chunk, [0])[0] += 1
                        nbytes += chunk.nbytes
            assert cache.nbytes == nbytes
        assert all(chunk.holders == count for chunk, (count,) in chunks.items())
        assert self.store.ledger.used == sum(chunk.nbytes for chunk in chunks) + BASE * len(caches)
        for owner in OWNERS:
            assert self.store.ledger.owned(owner) == sum(c.nbytes for c in caches if c.owner == owner)


class PagedStateful(Stateful):
    """`Stateful` with pages as chunks: no page belongs to two chunks, and all unused pages are free."""

    paged = True

    @invariant()
    def pages_have_one_chunk(self):
        if self.store._block is None:
            return
        tracks = [track for cache in self.store.ledger.all(StoredCache) for track in cache.tracks]
        chunks = {chunk for track in tracks for chunk in (*track.chunks, *track.spares) if chunk is not None}
        pages = [page for chunk in chunks for page in range(chunk.place, chunk.place + len(chunk.k))]
        assert len(set(pages)) == len(pages)
        free = sum(end - start for start, end in self.store._block._free)
        assert free == len(self.store._block.memory) - sum(chunk.nbytes for chunk in chunks)


TestStateful, TestPagedStateful = Stateful.TestCase, PagedStateful.TestCase


TestStateful.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


TestPagedStateful.settings = TestStateful.settings


def test_forks_share_memory_until_one_writes():
    store = store_of()
    (serial,) = create(store)
    store.write(Terms("alice"), [serial], 0, None, [tokens(4 * CHUNK)])
    before = store.ledger.used
    store.fork(Terms("alice"), [serial] * 64, None, [])
    assert store.ledger.used - 64 * BASE == before
    assert store.ledger.used <= 1.1 * before + 64 * BASE
    copy = store.listed(Terms("alice"))[-1].serial
    store.write(Terms("alice"), [copy], 0, [4 * CHUNK - 1], [tokens(1, 5)])
    assert store.ledger.used - 64 * BASE == before + CHUNK * TOKEN  # only the last chunk is copied
    assert not np.array_equal(read(store, "alice", copy, 0)[1], read(store, "alice", serial, 0)[1])


@pytest.mark.parametrize("paged", [False, True])
def test_a_fork_has_the_bounds_the_time_and_the_tokens_of_its_source(paged):
    clock = Clock()
    store, terms = store_of(clock=clock, paged=paged), Terms("alice")
    (source,) = create(store, max_length=5 * CHUNK, keep=[CHUNK, None], ttl=TTL / 4)
    for layer in range(LAYERS):
        for n in range(4):
            store.write(terms, [source], layer, None, [tokens(CHUNK, n)])
    (of_source,) = store.look(terms, [source])
    assert of_source.firsts[0]  # the layer has dropped tokens
    (fork,) = store.fork(terms, [source], None, [])
    for name in ("shape", "max_length", "keep", "ttl", "lengths", "firsts", "expires_in"):
        assert getattr(fork, name) == getattr(of_source, name), name
    for layer in range(LAYERS):
        (first, stored), (there, expected) = (read(store, "alice", one, layer) for one in (fork.serial, source))
        assert first == there
        np.testing.assert_array_equal(stored, expected)
    refused("cache_full", store.write, terms, [fork.serial], 0, None, [tokens(CHUNK + 1)])
    clock.now += TTL / 4
    refused("cache_lost", store.look, terms, [fork.serial])


@pytest.mark.parametrize("fails", range(3 * LAYERS))
def test_a_creation_that_runs_out_of_memory_leaves_nothing(fails, monkeypatch):
    """The memory of each chunk of three caches in turn cannot be had."""
    ledger, made = Ledger(LIMIT, Clock(), 1 << 16), []
    store = CacheStore(ledger, TTL)

    def new_chunk(*arguments, right=Track.new_chunk):
        if len(made) == fails:
            raise MemoryError
        made.append(right(*arguments))
        return made[-1]

    with monkeypatch.context() as scarce:
        scarce.setattr(Track, "new_chunk", new_chunk)
        with pytest.raises(MemoryError):
            create(store, count=3, max_length=CHUNK)
    assert (store.listed(Terms("alice")), ledger.used, ledger.owned("alice")) == ([], 0, 0)
    assert len(create(store, count=3, max_length=CHUNK)) == 3


def test_a_fork_counts_the_memory_of_the_caches_that_it_deletes():
    chunk = CHUNK * TOKEN
    store = store_of(limit=2 * chunk + 3 * BASE)
    one, two, empty = create(store, count=3)
    store.write(Terms("alice"), [one, two], 0, None, [tokens(CHUNK), tokens(CHUNK, 1)])
    assert store.ledger.used == store.ledger.limit
    refused("cache_memory", store.fork, Terms("alice"), [one], None, [])
    refused("cache_memory", store.fork, Terms("alice"), [one, two], None, [empty])  # over the limit by one `BASE`
    (copy,) = [record.serial for record in store.fork(Terms("alice"), [one], None, [empty, empty])]
    refused("cache_memory", store.fork, Terms("alice"), [one] * 3, None, [one, copy])  # the forks keep the chunk
    made = store.fork(Terms("alice"), [one] * 3, None, [two, two])  # frees the memory of `two`
    assert store.ledger.used == chunk + 5 * BASE
    for record in made:
        np.testing.assert_array_equal(read(store, "alice", record.serial, 0)[1], read(store, "alice", one, 0)[1])


def test_a_write_over_several_caches_happens_on_all_or_on_none():
    store = store_of()
    one, two = create(store, count=2)
    store.write(Terms("alice"), [one], 0, None, [tokens(3)])
    detail = refused("cache_position", store.write, Terms("alice"), [one, two], 0, [2, 2], [tokens(1)] * 2)
    assert detail.errors == (("caches.1", "cache_position: position 2 is beyond the end, 0"),)
    assert [record.lengths for record in store.look(Terms("alice"), [one, two])] == [[3, 0], [0, 0]]


def test_a_late_copy_of_a_write_is_refused_and_the_last_one_repeats():
    store = store_of()
    (serial,) = create(store)

    def write(key, seed):
        store.write(Terms("alice", None, key), [serial], 0, None, [tokens(1, seed)])
        return [store.look(Terms("alice"), [serial])[0].lengths[0]]

    assert [write("a", 1), write("a", 1), write("b", 2), write("b", 2)] == [[1], [1], [2], [2]]
    refused("cache_stale", write, "a", 1)
    for n in range(64):
        write(f"k{n}", n)
    assert write("a", 1) == [67]  # written again: the store remembers the last 64 idempotency keys only


def test_creations_and_forks_repeat_their_first_answer():
    store = store_of()
    first = create(store, count=2, key="k")
    assert create(store, count=2, key="k") == first
    assert create(store, "bob", count=2, key="k") != first
    forked = store.fork(Terms("alice", None, "f"), [first[0]], None, [first[1]])
    assert store.fork(Terms("alice", None, "f"), [first[0]], None, [first[1]]) == forked


def test_a_key_of_another_payload_is_refused_before_anything_else():
    """Also beside the stored answer of a creation, when its caches are gone, and by what a cache itself remembers."""
    store = store_of()

    def terms(key, payload, owner="alice"):
        return Terms(owner, None, key, payload)

    def make(payload, count=1):
        return store.create(terms("c", payload), SHAPE, count, None, [None] * LAYERS, None)

    (serial,) = (record.serial for record in make(b"one"))
    assert [record.serial for record in make(b"one")] == [serial]
    refused("idempotency_key_reused", make, b"two", 2)
    refused("idempotency_key_reused", store.fork, terms("c", b"three"), [serial], None, [])
    store.write(terms("w", b"tokens"), [serial], 0, None, [tokens(2)])
    for call, *arguments in (
        (store.write, [serial], 0, None, [tokens(2, 5)]),
        (store.truncate, serial, 1),
        (store.renew, [serial]),
        (store.delete, [serial]),
        (store.fork, [serial], None, []),
    ):
        refused("idempotency_key_reused", call, terms("w", b"other"), *arguments)
    assert store.look(Terms("alice"), [serial])[0].lengths[0] == 2
    store._keys = IdempotencyKeys()  # as after many calls of other owners
    refused("idempotency_key_reused", store.write, terms("w", b"other"), [serial], 0, None, [tokens(2, 5)])
    store.delete(terms("d", b"gone"), [serial])
    refused("idempotency_key_reused", store.delete, terms("d", b"another"), [serial])
    refused("cache_not_found", store.delete, terms("d", b"gone"), [serial])
    assert store.create(terms("d", b"his", "bob"), SHAPE, 1, None, [None] * LAYERS, None)


def test_the_number_of_caches_is_limited_for_the_server_and_for_each_key():
    store = store_of(most=4)
    refused("work_too_large", create, store, count=5)
    made = create(store, count=2, most=2)
    refused("key_limit", create, store, most=2)
    create(store, "bob", count=2)
    refused("cache_memory", create, store, "bob")
    refused("cache_memory", store.fork, Terms("alice"), [made[0]], None, [])
    assert store.fork(Terms("alice", most=2), [made[0]], None, [made[1]])
    assert len(store.listed(Terms("alice"))) == 2
    store.ledger.clock.now += TTL
    assert create(store, count=4)  # all others have expired


def test_a_list_has_pages_of_the_owners_own_caches():
    store = store_of()
    made = [create(store, owner)[0] for owner in ("alice", "bob") * 5]
    store.delete(Terms("alice"), [made[4]])
    mine = [serial for serial in made[::2] if serial != made[4]]
    assert [one.serial for one in store.listed(Terms("alice"), 0, 3)] == mine[:3]
    assert [one.serial for one in store.listed(Terms("alice"), mine[2], 3)] == mine[3:]
    assert store.listed(Terms("carol"), 0, 3) == []


def test_a_reserved_cache_takes_its_memory_at_once_and_keeps_it():
    store = store_of()
    (serial,) = create(store, max_length=2 * CHUNK)
    taken = store.ledger.used
    assert taken == BASE + LAYERS * 2 * CHUNK * TOKEN
    store.write(Terms("alice"), [serial], 0, None, [tokens(2 * CHUNK)])
    refused("cache_full", store.write, Terms("alice"), [serial], 0, None, [tokens(1)])
    store.truncate(Terms("alice"), serial, 0)
    assert store.ledger.used == taken
