"""The limits of an API key hold in one process and over several, and a refused request does not use them up."""

import contextlib
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from flashpoint_server.access import limits
from flashpoint_server.access.admission import Admission
from flashpoint_server.access.limits import BURST, Quota, Spent
from flashpoint_server.config.key_file import KeyEntry
from flashpoint_server.config.settings import Settings
from flashpoint_server.ipc.counts import WorkerGroup
from flashpoint_server.ipc.memory import NamedMemory
from flashpoint_server.ipc.price import Price
from flashpoint_server.refusal import Refusal
from tests.support.admitted import Entered


def quota(shared=WorkerGroup(), **limits):  # noqa: B008
    return Quota(KeyEntry(sha256="0" * 64, rights={"attention"}, **limits), Spent("alice", shared))


def refused(call, *args):
    with pytest.raises(Refusal) as caught:
        call(*args)
    assert (caught.value.status, caught.value.code) == (429, "key_limit")
    return int(caught.value.headers["Retry-After"])


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock of the limits by a stopped one, and return it; a test sets its time, `clock.now`."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(limits, "time", SimpleNamespace(**vars(time) | {"monotonic": lambda: clock.now}))
    return clock


def test_requests_by_the_second(clock):
    """A key may use up to one second of its rate at once (a token bucket), which refills as time passes."""
    limited = quota(requests_per_second=64)
    for _ in range(64 * int(BURST)):
        limited.take("requests", 1)
    assert refused(limited.take, "requests", 1) == 1
    for _ in range(100):
        clock.now += 1 / 64
        limited.take("requests", 1)
        refused(limited.take, "requests", 1)
    clock.now += 1000
    for _ in range(64 * int(BURST)):
        limited.take("requests", 1)
    refused(limited.take, "requests", 1)


def test_a_big_request_is_let_in_and_paid_for_by_the_next(clock):
    limited = quota(bytes_per_second=1000, flops_per_second=10, compute_seconds_per_second=0.1)
    with Entered(Admission(Settings()), 60_000, limited) as permit:
        permit.charge(Price(5, 0.0))
        assert refused(limited.enter, 1) == 59
        permit.charge(Price(25, 0.0))
        assert refused(permit.charge, Price(1, 0.0)) == 2
        clock.now += 58.5
        assert refused(limited.enter, 1) == 1
        permit.charge(Price(1, 0.0))


def test_computing_is_limited_in_predicted_seconds_and_what_was_not_needed_is_given_back(clock):
    limited = quota(compute_seconds_per_second=0.5)
    with Entered(Admission(Settings()), 0, limited) as permit:
        permit.charge(Price(10, 30.0))
        # 30 s of computing at a rate of 0.5 take 60 s to refill. The key is refused until only BURST, 1 s, is left.
        assert refused(permit.charge, Price(1, 0.1)) == 59
        permit.correct(Price(10, 3.0))
        assert refused(permit.charge, Price(1, 0.1)) == 5
        clock.now += 5.1
        permit.charge(Price(1, 0.1))


def test_what_a_call_needed_beyond_its_price_counts_in_full_after_an_idle_time(clock):
    limited = quota(flops_per_second=10, compute_seconds_per_second=0.5)
    for idle in (0, 1000):
        clock.now += idle
        with Entered(Admission(Settings()), 0, limited) as permit:
            permit.charge(Price(0, 0.0))
            permit.settle(Price(100, 30.0))
            assert refused(permit.charge, Price(1, 0.1)) == 9  # 10 s at this rate, but for BURST
            clock.now += 9.1
            assert refused(permit.charge, Price(0, 0.1)) == 50


def test_a_price_that_one_limit_refuses_is_not_charged_to_the_other(clock):
    limited = quota(flops_per_second=10, compute_seconds_per_second=0.1)
    with Entered(Admission(Settings()), 0, limited) as permit:
        permit.charge(Price(5, 30.0))
        refused(permit.charge, Price(25, 0.1))
        permit.correct(Price(5, 0.0))
        permit.charge(Price(1, 0.1))


def test_requests_at_once_are_counted_until_they_have_left():
    limited, admission = quota(concurrent=2), Admission(Settings())
    with Entered(admission, 1, limited):
        with Entered(admission, 1, limited):
            assert refused(Entered, admission, 1, limited) == 1
            assert (admission.requests, admission.bytes) == (2, 2)
        with Entered(admission, 1, limited):
            pass


def test_what_the_queue_refuses_costs_the_key_nothing():
    limited, admission = quota(bytes_per_second=1), Admission(Settings(queue_limit=1))
    with Entered(admission, 1), pytest.raises(Refusal, match="queue is full"):
        Entered(admission, 1000, limited)
    limited.enter(1)


TAKER = """
import sys
import time
from types import SimpleNamespace
from flashpoint_server.access import limits
from flashpoint_server.config.key_file import KeyEntry
from flashpoint_server.ipc.counts import WorkerGroup
from flashpoint_server.ipc.memory import NamedMemory
from flashpoint_server.access.limits import Quota, Spent
from flashpoint_server.refusal import Refusal
from tests.support.admitted import Entered
# nothing comes back, and nobody waits too long for the lock
limits.time = SimpleNamespace(**vars(time) | {"monotonic": lambda: 1000.0})
entry = KeyEntry(sha256="0" * 64, rights={"attention"}, requests_per_second=0.5, flops_per_second=1 << 14)
quota = Quota(entry, Spent("alice", WorkerGroup(NamedMemory(int(sys.argv[1])), int(sys.argv[2]))))
quota.enter(0)
print("inside", flush=True)
sys.stdin.readline()
def taken(what):
    count = 0
    try:
        while True:
            quota.take(what, 1)
            count += 1
    except Refusal:
        return count
print(taken("requests"), taken("flops"), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def memory():
    return NamedMemory()


@pytest.fixture
def takers(memory):
    """Yield three processes that use the same limits at the same time."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with contextlib.ExitStack() as running:

        def taker(number):
            process = subprocess.Popen(
                [sys.executable, "-c", TAKER, str(memory.fd), str(number)], pass_fds=[memory.fd], **pipes
            )
            running.enter_context(process)
            running.callback(process.kill)
            return process

        yield [taker(number) for number in range(3)]


def test_processes_share_one_limit_and_the_next_one_does_not_inherit_a_dead_ones_requests(takers, memory):
    """With a stopped clock, three processes together may use one request and 16,384 FLOPs, the burst of one key.

    The count of their concurrent requests stays when they are killed, until processes with their numbers start again.
    """
    for taker in takers:
        assert taker.stdout.readline() == "inside\n"
    here = Spent("alice", WorkerGroup(memory, 3))
    assert sum(here.numbers[3:]) == 3
    for taker in takers:
        taker.stdin.write("\n")
        taker.stdin.flush()
    taken = [[int(count) for count in taker.stdout.readline().split()] for taker in takers]
    assert [sum(counts) for counts in zip(*taken, strict=True)] == [1, 1 << 14]
    for taker in takers:
        taker.kill()
        taker.communicate()
    assert sum(here.numbers[3:]) == 3  # the requests of the dead processes still count
    for n in range(3):
        Spent("alice", WorkerGroup(memory, n))
    assert sum(here.numbers[3:]) == 0


def test_a_process_that_stopped_with_the_lock_stops_no_other(memory):
    one, other = (Spent("alice", WorkerGroup(NamedMemory(memory.fd), n)) for n in range(2))
    limited = Quota(KeyEntry(sha256="0" * 64, rights={"attention"}, requests_per_second=9), other)
    with one.locked():
        assert refused(limited.take, "requests", 1) == 1
    limited.take("requests", 1)
