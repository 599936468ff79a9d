"""A cache gives the reason why a truncation or a write is impossible, and the memory that its deletion frees."""

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

from flashpoint_contract.caches import CHUNK
from flashpoint_server.engine.caches.cache import (
    KEYS,
    StoredCache,
    Terms,
    base_bytes,
    cut_problem,
    freeable,
    reserved_chunks,
    write_problem,
)
from tests.support.cache_store import LAYERS, TOKEN, create, store_of, tokens

ALICE = Terms("alice")


def all_visible(queries, length):
    """Return the first position that the queries see, if each sees only itself and later tokens."""
    return length - queries


def cache_of(store, serial):
    return store.ledger.get(StoredCache, serial)


def test_a_cut_or_a_write_is_refused_for_its_position():
    store = store_of()
    (one,) = create(store, max_length=3 * CHUNK, keep=[CHUNK, None])
    store.write(ALICE, [one], 0, None, [tokens(2 * CHUNK)])
    store.write(ALICE, [one], 0, None, [tokens(CHUNK // 2)])
    cache = cache_of(store, one)
    length, first = cache.tracks[0].length, cache.tracks[0].first
    assert (length, first) == (2 * CHUNK + CHUNK // 2, CHUNK)
    assert cut_problem(cache, None) is None
    assert cut_problem(cache, first) is None
    assert cut_problem(cache, first - 1)[0] == "cache_dropped"
    assert cut_problem(cache, length + 1)[0] == "cache_position"
    for layer, at, count, code in (
        (0, length, 1, None), (0, first, 1, None), (0, length + 1, 1, "cache_position"),
        (0, first - 1, 1, "cache_dropped"), (0, length, CHUNK // 2 + 1, "cache_full"),
        (1, 0, 1, None), (1, 1, 0, "cache_position"),
    ):  # fmt: skip
        problem = write_problem(cache, layer, at, count, all_visible)
        assert (problem and problem[0]) == code, (layer, at, count)
    # Here a query sees a dropped token.
    assert write_problem(cache, 0, length, 1, lambda queries, end: first - 1)[0] == "cache_dropped"


def test_the_memory_that_a_deletion_frees_is_not_shared_with_another_cache():
    store = store_of()
    (one,) = create(store)
    store.write(ALICE, [one], 0, None, [tokens(CHUNK)])
    (two,) = [record.serial for record in store.fork(ALICE, [one], None, [])]
    caches = [cache_of(store, serial) for serial in (one, two)]
    assert [freeable([cache]) for cache in caches] == [base_bytes(LAYERS)] * 2
    assert freeable(caches) == freeable([*caches, caches[0]]) == 2 * base_bytes(LAYERS) + CHUNK * TOKEN
    before = store.ledger.used
    store.delete(ALICE, [one, two])
    assert before - store.ledger.used == 2 * base_bytes(LAYERS) + CHUNK * TOKEN


def test_the_last_keys_of_writes_are_remembered():
    store = store_of()
    cache = cache_of(store, create(store)[0])
    for number in range(KEYS + 1):
        cache.written(Terms("alice", None, str(number), b"payload"))
    cache.written(Terms("alice", None, "1", b"another"))
    assert list(cache.keys) == [*map(str, range(2, KEYS + 1)), "1"]
    assert (cache.last, cache.keys["1"], cache.keys["2"]) == ("1", b"another", b"payload")
    cache.written(Terms("alice"))
    assert (cache.last, len(cache.keys)) == ("", KEYS)


@pytest.mark.parametrize(
    ("max_length", "keep", "chunks"),
    [
        (1, None, 1),
        (CHUNK, None, 1),
        (CHUNK + 1, None, 2),
        (100 * CHUNK, 1, 3),
        (100 * CHUNK, CHUNK + 1, 4),
        (CHUNK, 1, 1),
    ],
)
def test_a_layer_that_keeps_few_tokens_reserves_few_chunks(max_length, keep, chunks):
    assert reserved_chunks(max_length, keep) == chunks
