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
MOST, MOST_OF_BOB = 5, 3  # items
OWNERS = ("alice", "bob")  # bob has limits of his own
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


class Item:
    """The model of a saved forward or a cache: `word` as in `Owned`; `ran` once it has its tensors."""

    def __init__(self, word, owner, size, until, saved=None):
        self.word, self.owner, self.size, self.until, self.saved = word, owner, size, until, saved
        self.ran, self.users, self.disowned = saved is None, int(saved is not None), False


class Holding(RuleBasedStateMachine):
    """Random operations on saved forwards and caches with limits in common, compared with a model.

    Calls use items at the same time as others delete them, as their keys are removed, and beyond their time to live.
    """

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.ledger = Ledger(LIMIT, self.clock, MOST)
        self.saved, self.caches = SavedStore(self.ledger, TTL), CacheStore(self.ledger, TTL)
        self.there, self.gone, self.lost = {}, {}, {}
        self.uses = []  # the serials of each call that runs

    def owned(self, owner):
        return [item for item in self.there.values() if item.owner == owner]

    def bytes(self, owner):
        return sum(item.size for item in self.owned(owner))

    def expected(self, owner, size):
        if owner == "bob" and len(self.owned(owner)) >= MOST_OF_BOB:
            return "key_limit"
        if len(self.there) >= MOST:
            return "cache_memory"
        if size > LIMIT:
            return "work_too_large"
        if owner == "bob" and self.bytes(owner) + size > QUOTA:
            return "key_limit"
        if sum(map(self.bytes, OWNERS)) + size > LIMIT:
            return "cache_memory"
        return None

    @rule(owner=st.sampled_from(OWNERS), size=st.sampled_from([200, 200, 1000, 8000, LIMIT + 1]))
    def reserve(self, owner, size):
        limits = (QUOTA, MOST_OF_BOB) if owner == "bob" else (None, None)
        request = Save(owner, limits[0], size, b"head", limits[1])
        if expected := self.expected(owner, size):
            assert code(self.saved.reserve, request) == expected
            return
        saved = self.saved.reserve(request)
        self.there[saved.serial] = Item("saved", owner, size, self.clock.now + TTL, saved)

    @rule(data=st.data(), works=st.booleans())
    def end(self, data, works):
        running = [serial for serial, item in self.there.items() if not item.ran]
        if not running:
            return
        serial = data.draw(st.sampled_from(running))
        item = self.there[serial]
        if works:
            self.saved.keep(item.saved, {"q": torch.tensor([serial])})
            item.ran = True
            self.left(serial, used=True)
        else:
            self.saved.drop(serial)
            self.gone[serial] = self.there.pop(serial).owner

    @rule(owner=st.sampled_from(OWNERS))
    def make_a_cache(self, owner):
        size = base_bytes(1)
        terms = Terms(owner, QUOTA, most=MOST_OF_BOB) if owner == "bob" else Terms(owner)
        made = (terms, SHAPE, 1, None, [None], None)
        if expected := self.expected(owner, size):
            assert code(self.caches.create, *made) == expected
            return
        self.there[self.caches.create(*made)[0].serial] = Item("cache", owner, size, self.clock.now + TTL)

    @rule(data=st.data())
    def begin_a_call(self, data):
        """A call uses one or two items, of any owner: whether it may is checked when it runs."""
        serials = [*{self.any(data), self.any(data)}]
        self.ledger.enter(serials)
        self.uses.append([serial for serial in serials if serial in self.there])
        for serial in self.uses[-1]:
            self.there[serial].users += 1

    @rule(data=st.data(), used=st.booleans(), seconds=st.sampled_from([1.5, 120.0]), removes=st.booleans())
    def call(self, data, used, seconds, removes):
        """A call of one caller, and meanwhile time passes, and others read, delete, or lose their keys."""
        self.begin_a_call(data)
        self.wait(seconds)
        for serial in [*self.uses[-1]]:
            self.read_one(self.there[serial].owner, serial)
        if removes:
            self.remove_a_key(data.draw(st.sampled_from(OWNERS)))
        else:
            self.delete(data, data.draw(st.sampled_from(OWNERS)))
        self.what_is_counted_is_what_is_held()
        self.end_of(len(self.uses) - 1, used)

    @rule(data=st.data(), used=st.booleans())
    def end_a_call(self, data, used):
        if self.uses:
            self.end_of(data.draw(st.integers(0, len(self.uses) - 1)), used)

    def end_of(self, number, used):
        serials = self.uses.pop(number)
        self.ledger.leave(serials, used=used)
        for serial in serials:
            if serial in self.there:
                self.left(serial, used)
        self.wait(1.5)

    def left(self, serial, used):
        item = self.there[serial]
        item.users -= 1
        item.until = self.clock.now + TTL if used else item.until
        if item.disowned and not item.users:
            self.lost[serial] = self.there.pop(serial).owner

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def read(self, data, owner):
        self.read_one(owner, self.any(data))

    def read_one(self, owner, serial):
        expected = self.code(owner, serial)
        assert code(self.saved.tensors, owner, serial) == expected
        if expected is None and self.there[serial].ran:
            assert self.saved.tensors(owner, serial)["q"].item() == serial
            (record,) = self.saved.execute(ask("look", owner, [serial]))
            item = self.there[serial]
            assert (record.nbytes, record.expires_in) == (item.size, max(0.0, item.until - self.clock.now))

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def delete(self, data, owner):
        serial = self.any(data)
        if serial in self.there and not self.there[serial].ran:
            return  # its id is not known before it has run
        expected = self.code(owner, serial)
        assert code(self.saved.execute, ask("delete", owner, [serial])) == expected
        if expected is None:
            self.gone[serial] = self.there.pop(serial).owner

    @rule(seconds=st.sampled_from([1.5, 60.0, 120.0]))
    def wait(self, seconds):
        self.clock.now += seconds
        self.ledger.sweep()
        for serial, item in [*self.there.items()]:
            if not item.users and self.clock.now >= item.until:
                self.lost[serial] = self.there.pop(serial).owner

    @rule(owner=st.sampled_from(OWNERS))
    def remove_a_key(self, owner):
        """Items in use are freed when their last call ends."""
        self.ledger.keep_owners({*OWNERS} - {owner})
        for serial, item in [*self.there.items()]:
            if item.owner == owner:
                item.disowned = True
                if not item.users:
                    self.lost[serial] = self.there.pop(serial).owner

    def any(self, data):
        present = self.there and data.draw(st.booleans())
        return data.draw(st.sampled_from([*self.there] if present else [*self.there, *self.gone, *self.lost, 10_000]))

    def code(self, owner, serial):
        item = self.there.get(serial)
        if item is not None and (item.word, item.owner) == ("saved", owner):
            return None
        return "saved_lost" if self.lost.get(serial) == owner else "saved_not_found"

    @invariant()
    def what_is_counted_is_what_is_held(self):
        assert self.ledger.used == sum(map(self.bytes, OWNERS)) <= LIMIT
        assert [self.ledger.owned(owner) for owner in OWNERS] == [self.bytes(owner) for owner in OWNERS]
        sizes = [item.size for item in self.there.values() if item.word == "saved"]
        assert self.ledger.usage(SavedForward) == (len(sizes), sum(sizes))
        for owner in OWNERS:
            listed = [one.serial for one in self.saved.execute(ask("list", owner, after=0))]
            assert listed == [n for n, item in sorted(self.there.items())
                              if (item.word, item.owner, item.ran) == ("saved", owner, True)]  # fmt: skip


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
