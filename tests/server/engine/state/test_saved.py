"""The store of saved forwards, which shares its memory limit with caches, behaves like a simple model."""

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flashpoint_server.engine.caches.cache import Terms, base_bytes
from flashpoint_server.engine.caches.store import CacheStore
from flashpoint_server.engine.state.ledger import Ledger
from flashpoint_server.engine.state.saved import SavedForward, SavedStore
from flashpoint_server.ipc.bodies import CacheShape, Save, SavedCall
from flashpoint_server.ipc.messages import MOST_LISTED
from flashpoint_server.refusal import Refusal

LIMIT, QUOTA, TTL = 20_000, 9_000, 100.0
OWNERS = ("alice", "bob")  # bob has a quota
SHAPE = CacheShape((1,), (4,), (4,), "float32")


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def ask(operation, owner="alice", forwards=(), after=0):
    return SavedCall(owner, operation, tuple(forwards), after)


def code(call, *given):
    """Call a function; return the code of the Refusal that it raises, or None."""
    try:
        call(*given)
    except Refusal as refusal:
        return refusal.code
    return None


class Holding(RuleBasedStateMachine):
    """Random operations on saved forwards and caches with one memory limit, compared with a model."""

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.ledger = Ledger(LIMIT, self.clock)
        self.saved, self.caches = SavedStore(self.ledger, TTL), CacheStore(self.ledger, TTL)
        self.running, self.there, self.cached, self.gone, self.lost = {}, {}, {}, {}, {}

    def owned(self, owner):
        entries = [*self.running.values(), *self.there.values(), *self.cached.values()]
        return sum(size for name, size, *_ in entries if name == owner)

    def expected(self, owner, size):
        if size > LIMIT:
            return "work_too_large"
        if owner == "bob" and self.owned(owner) + size > QUOTA:
            return "key_limit"
        if sum(map(self.owned, OWNERS)) + size > LIMIT:
            return "cache_memory"
        return None

    @rule(owner=st.sampled_from(OWNERS), size=st.integers(1000, 8000) | st.just(LIMIT + 1))
    def reserve(self, owner, size):
        self.expire()
        request = Save(owner, QUOTA if owner == "bob" else None, size, b"head")
        if expected := self.expected(owner, size):
            assert code(self.saved.reserve, request) == expected
            return
        saved = self.saved.reserve(request)
        self.running[saved.serial] = owner, size, saved

    @rule(data=st.data(), works=st.booleans())
    def end(self, data, works):
        if not self.running:
            return
        serial = data.draw(st.sampled_from([*self.running]))
        owner, size, saved = self.running.pop(serial)
        if works:
            self.saved.keep(saved, {"q": torch.tensor([serial])})
            self.there[serial] = owner, size, self.clock.now + TTL
        else:
            self.saved.drop(serial)
            self.gone[serial] = owner

    @rule(owner=st.sampled_from(OWNERS))
    def make_a_cache(self, owner):
        self.expire()
        size = base_bytes(1)
        terms = Terms(owner, QUOTA if owner == "bob" else None)
        made = (terms, SHAPE, 1, None, [None], None)
        if expected := self.expected(owner, size):
            assert code(self.caches.create, *made) == expected
            return
        self.cached[self.caches.create(*made)[0].serial] = owner, size, self.clock.now + TTL

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def use(self, data, owner):
        self.expire()
        serial = self.any(data)
        self.ledger.enter([serial])
        expected = self.code(owner, serial)
        assert code(self.saved.tensors, owner, serial) == expected
        self.ledger.leave([serial], used=True)
        for entries in (self.there, self.cached):
            if serial in entries:
                entries[serial] = (*entries[serial][:2], self.clock.now + TTL)
        if expected is None:
            assert self.saved.tensors(owner, serial)["q"].item() == serial
            assert self.saved.execute(ask("look", owner, [serial]))[0].expires_in == TTL

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def delete(self, data, owner):
        self.expire()
        serial = self.any(data)
        expected = self.code(owner, serial)
        assert code(self.saved.execute, ask("delete", owner, [serial])) == expected
        if expected is None:
            del self.there[serial]
            self.gone[serial] = owner

    @rule(seconds=st.sampled_from([1.5, 60.0, 120.0]))
    def wait(self, seconds):
        self.clock.now += seconds
        self.ledger.sweep()
        self.expire()

    @rule(owner=st.sampled_from(OWNERS))
    def remove_a_key(self, owner):
        self.expire()
        self.ledger.keep_owners({*OWNERS} - {owner})
        for entries in (self.there, self.cached):
            for serial in [one for one, (name, *_) in entries.items() if name == owner]:
                del entries[serial]
                self.lost[serial] = owner
        for serial in [one for one, (name, *_) in self.running.items() if name == owner]:
            self.saved.keep(self.running.pop(serial)[2], {"q": torch.zeros(1)})  # the forward ends, and is freed then
            self.lost[serial] = owner

    def any(self, data):
        return data.draw(st.sampled_from([*self.there, *self.cached, *self.gone, *self.lost, 10_000]))

    def code(self, owner, serial):
        if serial in self.there and self.there[serial][0] == owner:
            return None
        return "saved_lost" if self.lost.get(serial) == owner else "saved_not_found"

    def expire(self):
        for entries in (self.there, self.cached):
            for serial in [one for one, (*_, until) in entries.items() if self.clock.now >= until]:
                self.lost[serial] = entries.pop(serial)[0]

    @invariant()
    def what_is_counted_is_what_is_held(self):
        self.ledger._swept = 0.0
        self.ledger.sweep()
        self.expire()
        assert self.ledger.used == sum(map(self.owned, OWNERS)) <= LIMIT
        assert [self.ledger.owned(owner) for owner in OWNERS] == [self.owned(owner) for owner in OWNERS]
        sizes = [size for _, size, *_ in (*self.running.values(), *self.there.values())]
        assert self.ledger.usage(SavedForward) == (len(sizes), sum(sizes))
        for owner in OWNERS:
            listed = [one.serial for one in self.saved.execute(ask("list", owner, after=0))]
            assert listed == [one for one, (name, *_) in sorted(self.there.items()) if name == owner]


TestHolding = Holding.TestCase
TestHolding.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_list_goes_on_behind_the_last_of_the_one_before():
    store = SavedStore(Ledger(1 << 20), TTL)
    serials = []
    for _ in range(MOST_LISTED + 3):
        saved = store.reserve(Save("alice", None, 100, b""))
        store.keep(saved, {"q": torch.zeros(1)})
        serials.append(saved.serial)
    first = [one.serial for one in store.execute(ask("list", after=0))]
    assert first + [one.serial for one in store.execute(ask("list", after=first[-1]))] == serials


def test_a_gradient_that_runs_keeps_the_tensors_of_a_forward_that_is_freed():
    store = SavedStore(Ledger(1 << 20), TTL)
    saved = store.reserve(Save("alice", None, 100, b""))
    store.keep(saved, {"q": torch.ones(3)})
    tensors = store.tensors("alice", saved.serial)
    store.drop(saved.serial)
    assert torch.equal(tensors["q"], torch.ones(3))
