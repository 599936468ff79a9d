"""Admission and the limits of API keys agree with a model: a refused or ended request leaves no count and no charge."""

import time
from types import SimpleNamespace
from typing import get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flashpoint_server.access import admission, limits
from flashpoint_server.access.admission import FREE, Admission
from flashpoint_server.access.limits import BURST, Quota, Spent
from flashpoint_server.config.key_file import KeyEntry
from flashpoint_server.config.settings import Settings
from flashpoint_server.ipc.counts import Counts, WorkerGroup
from flashpoint_server.ipc.memory import NamedMemory
from flashpoint_server.ipc.price import Price
from flashpoint_server.refusal import Refusal
from tests.support.admitted import Entered

# All numbers are multiples of powers of two, so that sums are exact in any order.
QUEUE = {"queue_limit": 5, "queue_bytes": 64, "queue_flops": 64, "queue_seconds": 16}
RATES = {"bytes": 8, "flops": 16, "seconds": 0.5}
CONCURRENT = 2
PRICES = st.builds(Price, st.sampled_from([0, 4, 24, 40]), st.sampled_from([0.0, 0.25, 1.0, 7.0]))
PROCESSES = (0, 1)
KEYS = ("", "bob")  # bob's key has limits


class Admitting(RuleBasedStateMachine):
    """Random requests in two HTTP processes, with and without a limited key."""

    def __init__(self):
        super().__init__()
        self.now = 1000.0
        self.patch = pytest.MonkeyPatch()
        for module in (admission, limits):
            self.patch.setattr(module, "time", SimpleNamespace(**vars(time) | {"monotonic": lambda: self.now}))
        memory = NamedMemory()
        groups = [WorkerGroup(memory, n, len(PROCESSES)) for n in PROCESSES]
        self.counts = [Counts(group) for group in groups]
        self.processes = [Admission(Settings(**QUEUE), counts) for counts in self.counts]
        entry = KeyEntry(
            sha256="0" * 64, rights={"attention"}, concurrent=CONCURRENT, bytes_per_second=RATES["bytes"],
            flops_per_second=RATES["flops"], compute_seconds_per_second=RATES["seconds"],
        )  # fmt: skip
        self.spent = [Spent("bob", group) for group in groups]
        self.quotas = [Quota(entry, spent) for spent in self.spent]
        self.inside = []  # the model: a namespace for each request
        self.full = dict.fromkeys(RATES, 0.0)  # the model's buckets: when each is full again

    def teardown(self):
        self.patch.undo()

    def total(self, what):
        return sum(getattr(one, what) for one in self.inside)

    def empty(self, what):
        return self.full[what] - self.now >= BURST

    def pay(self, what, cost):
        self.full[what] = max(self.full[what], self.now) + cost / RATES[what]

    def some(self, data):
        return data.draw(st.sampled_from(self.inside)) if self.inside else None

    def agrees(self, expected, call, *arguments):
        """Call a function, and assert that it raises a Refusal with the expected code, or none."""
        if expected is None:
            return call(*arguments)
        with pytest.raises(Refusal) as caught:
            call(*arguments)
        assert caught.value.code == expected
        return None

    @rule(process=st.sampled_from(PROCESSES), key=st.sampled_from(KEYS), nbytes=st.sampled_from([0, 4, 30, 100]))
    def enter(self, process, key, nbytes):
        expected = None
        full = self.inside and self.total("nbytes") + nbytes > QUEUE["queue_bytes"]
        if full or len(self.inside) >= QUEUE["queue_limit"]:
            expected = "queue_full"
        elif key and (sum(bool(one.key) for one in self.inside) >= CONCURRENT or self.empty("bytes")):
            expected = "key_limit"
        quota = self.quotas[process] if key else None
        permit = self.agrees(expected, Entered, self.processes[process], nbytes, quota)
        if permit is not None:
            if key:
                self.pay("bytes", nbytes)
            self.inside.append(
                SimpleNamespace(process=process, key=key, nbytes=nbytes, flops=0, seconds=0.0, permit=permit)
            )

    @rule(data=st.data(), price=PRICES)
    def charge(self, data, price):
        if (one := self.some(data)) is not None and one.permit.price is FREE:
            self.charged(one, price)

    @rule(process=st.sampled_from(PROCESSES), prices=st.lists(PRICES, min_size=1, max_size=4))
    def call(self, process, prices):
        """Whole requests of the limited key, one after another."""
        for price in prices:
            before = len(self.inside)
            self.enter(process, "bob", 0)
            if len(self.inside) > before:
                one = self.inside[-1]
                self.charged(one, price)
                one.permit.leave()
                self.inside.remove(one)

    def charged(self, one, price):
        expected = None
        full = (self.total(what) + getattr(price, what) > QUEUE[f"queue_{what}"] for what in ("flops", "seconds"))
        if len(self.inside) > 1 and any(full):
            expected = "queue_full"
        elif one.key and (self.empty("flops") or self.empty("seconds")):
            expected = "key_limit"
        self.agrees(expected, one.permit.charge, price)
        if expected is None:
            one.flops, one.seconds = price.flops, price.seconds
            if one.key:
                self.pay("flops", price.flops)
                self.pay("seconds", price.seconds)

    @rule(data=st.data(), share=st.sampled_from([0.0, 0.5, 1.0]))
    def correct(self, data, share):
        """The lengths of the sequences are known: the price is lower, and the key gets the rest back."""
        if (one := self.some(data)) is None:
            return
        price = Price(int(one.flops * share), one.seconds * share)
        one.permit.correct(price)
        for what in ("flops", "seconds"):
            if one.key:
                self.full[what] -= (getattr(one, what) - getattr(price, what)) / RATES[what]
            setattr(one, what, getattr(price, what))

    @rule(data=st.data(), price=PRICES)
    def settle(self, data, price):
        """The true price may be higher than the predicted one, and is paid even so."""
        if (one := self.some(data)) is None:
            return
        one.permit.settle(price)
        for what in ("flops", "seconds"):
            more = getattr(price, what) - getattr(one, what)
            if one.key and more:
                self.pay(what, more)
            setattr(one, what, getattr(price, what))

    @rule(data=st.data(), nbytes=st.sampled_from([4, 40]), charged=st.booleans())
    def grow(self, data, nbytes, charged):
        if (one := self.some(data)) is None:
            return
        one.nbytes += nbytes  # counts until the request ends, also if it is refused now
        expected = None
        if len(self.inside) > 1 and self.total("nbytes") > QUEUE["queue_bytes"]:
            expected = "queue_full"
        elif charged and one.key and self.empty("bytes"):
            expected = "key_limit"
        self.agrees(expected, one.permit.hold if charged else one.permit.grow, nbytes)
        if expected is None and charged and one.key:
            self.pay("bytes", nbytes)

    @rule(data=st.data())
    def leave(self, data):
        if (one := self.some(data)) is not None:
            one.permit.leave()
            self.inside.remove(one)

    @rule(seconds=st.sampled_from([0.25, 1.0, 64.0]))
    def wait(self, seconds):
        self.now += seconds

    @invariant()
    def counts_are_those_of_the_requests_inside(self):
        for process, of in zip(PROCESSES, self.processes, strict=True):
            mine = [one for one in self.inside if one.process == process]
            assert (of.requests, of.bytes) == (len(mine), sum(one.nbytes for one in mine))
            assert (of.flops, of.seconds) == (sum(one.flops for one in mine), sum(one.seconds for one in mine))
            assert self.spent[process].inside[process] == sum(bool(one.key) for one in mine)

    @invariant()
    def keys_pay_what_they_used(self):
        for what, full in self.full.items():
            assert max(self.spent[0].numbers[get_args(limits.What).index(what)], self.now) == max(full, self.now)


TestAdmitting = Admitting.TestCase
TestAdmitting.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
