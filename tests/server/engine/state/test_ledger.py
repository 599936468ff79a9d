"""The ledger limits the memory of each owner and of all, and knows expired entries for an hour."""

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

from flashpoint_contract.caches import CHUNK
from flashpoint_server.engine.caches.cache import StoredCache, Terms
from tests.support.cache_store import TOKEN, TTL, Clock, create, refused, store_of, tokens

pytestmark = pytest.mark.usefixtures("in_slabs")


def test_an_owner_is_held_to_a_quota_and_all_to_the_limit():
    store = store_of(limit=8 * CHUNK * TOKEN)
    (serial,) = create(store, quota=2 * CHUNK * TOKEN)
    small = Terms("alice", 2 * CHUNK * TOKEN)
    refused("key_limit", store.write, small, [serial], 0, None, [tokens(2 * CHUNK)])
    store.write(small, [serial], 0, None, [tokens(CHUNK)])
    refused("key_limit", store.fork, small, [serial], None, [])  # memory shared with the source counts in full
    (other,) = create(store, "bob")
    refused("cache_memory", store.write, Terms("bob"), [other], 0, None, [tokens(7 * CHUNK)])
    refused("work_too_large", store.write, Terms("bob"), [other], 0, None, [tokens(9 * CHUNK)])
    refused("work_too_large", create, store, max_length=100 * CHUNK)


def test_a_cache_in_use_does_not_expire_and_one_that_has_is_known_for_an_hour():
    clock = Clock()
    store = store_of(clock=clock)
    (serial,) = create(store)
    store.ledger.enter([serial])
    clock.now += 10 * TTL
    store.ledger.sweep()
    assert len(store.ledger.all(StoredCache)) == 1
    store.ledger.leave([serial], used=True)
    clock.now += TTL - 1
    assert store.look(Terms("alice"), [serial])[0].expires_in == 1.0
    clock.now += 1
    lost = refused("cache_lost", store.look, Terms("alice"), [serial])
    assert lost.detail == "the cache expired, or its engine restarted"
    refused("cache_not_found", store.look, Terms("bob"), [serial])
    clock.now += 3601
    store.ledger.sweep()
    refused("cache_not_found", store.look, Terms("alice"), [serial])
    assert store.ledger.used == 0


def test_no_owner_makes_what_another_may_ask_be_forgotten(monkeypatch):
    monkeypatch.setattr("flashpoint_server.engine.state.ledger.TOMBSTONES", 8)
    monkeypatch.setattr("flashpoint_server.engine.caches.idempotency.ANSWERS", 8)
    clock = Clock()
    store = store_of(clock=clock)
    first = create(store, "bob", key="mine")
    (lost,) = create(store, "bob", ttl=1.0)
    clock.now += 2
    for number in range(20):
        create(store, key=f"k{number}", ttl=1.0)
        clock.now += 2
        store.ledger.sweep()
    assert create(store, "bob", key="mine") == first
    refused("cache_lost", store.look, Terms("bob"), [lost])
