"""The scheduler chooses the right next task and answers at the right time, with a fake device and no sockets."""

import itertools
import math
import mmap
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

from flashpoint_contract.caches import LayerShape
from flashpoint_contract.options import Options
from flashpoint_server.engine.caches.cache import Terms
from flashpoint_server.engine.caches.store import CacheStore
from flashpoint_server.engine.scheduling import scheduler as module
from flashpoint_server.engine.scheduling.engine_request import EngineRequest, Worker
from flashpoint_server.engine.scheduling.scheduler import Scheduler
from flashpoint_server.engine.scheduling.tasks import Ask, BenchmarkSlice, Compute, Launch, Split
from flashpoint_server.engine.scheduling.waiting import Budget
from flashpoint_server.engine.state.ledger import Ledger
from flashpoint_server.ipc.bodies import (
    SLOT,
    CacheCall,
    CacheRef,
    CacheShape,
    LookAtCaches,
    PlacedTensor,
    PlannedCall,
    VerifyCall,
    encode,
)
from flashpoint_server.ipc.messages import Submit
from flashpoint_server.ipc.price import PASSED

BUDGET = Budget(1 << 60, 1 << 60, 0.0)
NUMBERS = itertools.count()
SHORT, LONG = 0.001, 1.0  # predicted seconds of a request


class Resources:
    """A fake device with two cores, on which each sequence is a part.

    Calls whose cache numbers have the same last digit are kin: their caches share the first keys. 0 has no kin.
    """

    shares_cores = True
    cores = 2
    launches = 1

    def __init__(self):
        self.compiling = None

    def cuts(self, backend):
        return backend != "triton"

    def rows(self, job):
        return job.spec.rows({})

    def parts(self, job):
        return [SimpleNamespace(rows=[row], first_head=0, seed=None) for row in self.rows(job)]

    def compile(self, job):
        return self.compiling

    def kin(self, job):
        return job.submit.cache_ref.caches[0] % 10 or None


class Plugin:
    suspect = False
    active = True
    due = math.inf

    def __init__(self):
        self.wanted = False
        self.calls = []

    def wants(self, now, *, waiting, running):
        return self.wanted

    def postpone(self, now):
        self.calls.append("postpone")
        self.wanted = False

    def begin(self):
        self.calls.append("begin")


def submit(body, number, *, seconds=SHORT, rank=0.0, deadline=None, cache_ref=None):
    """Return a message to an engine, whose slot begins at byte 64 of segment 0."""
    return Submit(
        id=number, request_id=f"r{number}", body=body, segment=0, start=64, mark=0, flops=1, seconds=seconds, rank=rank,
        deadline=deadline, cache_ref=cache_ref,
    )  # fmt: skip


class Bench:
    """A scheduler with the fake device, and records of its answers and wake-ups."""

    def __init__(self, plugins=()):
        self.device = Resources()
        self.answered, self.woken = [], 0
        self.scheduler = Scheduler(self.device, BUDGET, self.answer, self.wake, plugins)
        self.peer = Worker(channel=None, pinning=None, segments={0: mmap.mmap(-1, 4096)})

    def answer(self, request):
        self.answered.append((request.submit.id, request.failure and request.failure.code))

    def wake(self):
        self.woken += 1

    def put(self, message, peer):
        self.scheduler.admit(EngineRequest.of(message, peer, self.device.cuts))

    def admit(self, sequences=1, *, backend="cpu", seconds=SHORT, deadline=None, rank=0.0):
        number = next(NUMBERS)
        shape = (sequences, 1, 4, 8)
        q, k, v, o = (PlacedTensor(name, "float32", shape, SLOT, 0) for name in "qkvo")
        body = encode(PlannedCall("forward", Options(), backend, (q, k, v), (o,)))
        self.put(submit(body, number, seconds=seconds, rank=rank, deadline=deadline), self.peer)
        return number

    def take(self, kind=Compute):
        task = self.scheduler.take()
        assert isinstance(task, kind), task
        return task

    def finish(self, *tasks, failure=None):
        return [self.scheduler.finish(task, failure) for task in tasks]


@pytest.fixture
def bench():
    return Bench()


def test_cores_share_the_parts_of_a_request_and_its_last_part_answers_it(bench):
    number = bench.admit(sequences=3, seconds=3 * LONG)
    first, second = bench.take(), bench.take()
    assert bench.scheduler.take() is None  # both cores are busy
    assert bench.peer.running == 3  # two parts and the request itself
    bench.finish(first)
    third = bench.take()
    bench.finish(second)
    assert bench.answered == []
    bench.finish(third)
    assert (bench.answered, bench.peer.running) == ([(number, None)], 0)


def test_the_last_parts_of_a_long_request_are_not_passed_by_a_longer_one(bench):
    """A request of 4 s of which 1 s is left runs before a request of 2 s, although both arrived at the same time."""
    first = bench.admit(sequences=4, seconds=4 * LONG, rank=PASSED * 4 * LONG)
    began = [bench.take(), bench.take()]
    bench.finish(*began)
    third = bench.take()
    second = bench.admit(sequences=2, seconds=2 * LONG, rank=PASSED * 2 * LONG)
    last = bench.take()
    assert (last.requests[0].submit.id, bench.scheduler.take()) == (first, None)
    bench.finish(third, last)
    assert bench.answered == [(first, None)]
    shorter = bench.admit(seconds=LONG, rank=PASSED * LONG)
    assert [bench.take().requests[0].submit.id for _ in range(2)] == [shorter, second]


def test_a_short_part_runs_beside_long_ones_on_every_core(bench):
    bench.admit(sequences=3, seconds=3 * LONG)
    running = [bench.take(), bench.take()]
    number = bench.admit()
    short = bench.take()
    assert (short.requests[0].submit.id, short.long, [task.long for task in running]) == (number, False, [True, True])
    assert bench.scheduler.take() is None
    bench.finish(short, *running)


def test_one_short_part_more_runs_than_there_are_cores(bench):
    numbers = [bench.admit() for _ in range(4)]
    tasks = [bench.take() for _ in range(3)]
    assert bench.scheduler.take() is None
    bench.finish(tasks[0])
    assert bench.take().requests[0].submit.id == numbers[3]


def test_short_parts_do_not_pass_a_long_one_for_ever(bench):
    """If a long part is first in the queue, no later short part starts before it: it gets the next free core."""
    for _ in range(3):
        bench.admit(rank=0.0)
    tasks = [bench.take() for _ in range(3)]
    long = bench.admit(seconds=LONG, rank=1.0)
    bench.admit(rank=2.0)
    bench.finish(tasks[0])
    assert bench.scheduler.take() is None
    bench.finish(tasks[1])
    assert bench.take().requests[0].submit.id == long


def test_nobody_need_listen_during_a_small_part_when_nothing_else_waits(bench):
    bench.admit()
    bench.admit()
    assert [bench.take().brief, bench.take().brief] == [False, True]


def test_a_request_that_is_cancelled_ends_between_two_parts(bench):
    number = bench.admit(sequences=4, seconds=4 * LONG)
    running = bench.take()
    bench.scheduler.cancel(bench.peer, number)
    assert bench.scheduler.take() is None
    assert bench.answered == []  # a running part still writes to the request's memory
    bench.finish(running)
    assert bench.answered == [(number, "deadline_exceeded")]


def test_a_verification_that_runs_is_told_that_nobody_waits(bench):
    """If a running verification is cancelled, `failure` is set; the executor checks this between blocks and stops."""
    cancelled, gone = [submit(VerifyCall(b"{}"), next(NUMBERS), seconds=LONG) for _ in range(2)]
    bench.put(cancelled, bench.peer)
    launch = bench.take(Launch)
    assert launch.requests[0].failure is None
    bench.scheduler.cancel(bench.peer, cancelled.id)
    assert launch.requests[0].failure.code == "deadline_exceeded"
    bench.finish(launch)
    bench.put(gone, bench.peer)
    launch = bench.take(Launch)
    bench.scheduler.forget(bench.peer)
    assert launch.requests[0].failure.code == "deadline_exceeded"
    bench.finish(launch)
    assert bench.peer.running == 0


def test_a_part_that_fails_ends_its_request(bench):
    number = bench.admit(sequences=4, seconds=4 * LONG)
    bench.finish(bench.take(), failure=module.out_of_time())
    assert bench.answered == [(number, "deadline_exceeded")]
    assert bench.scheduler.take() is None


def test_a_late_request_is_answered_without_having_begun(bench):
    number = bench.admit(deadline=0.0)
    assert bench.scheduler.take() is None
    assert bench.answered == [(number, "deadline_exceeded")]
    assert bench.peer.segments[0][0] == 0


def test_many_sequences_are_cut_in_a_task_of_its_own(bench):
    cancelled, number = bench.admit(sequences=100), bench.admit(sequences=100)
    cuts = [bench.take(Split), bench.take(Split)]
    bench.scheduler.cancel(bench.peer, cancelled)
    for cut in cuts:
        cut.requests[0].cut(bench.device.parts, BUDGET)
    none, first = bench.finish(*cuts)
    assert (none, bench.answered) == (None, [(cancelled, "deadline_exceeded")])
    assert isinstance(first, Compute)  # the request's next part runs at once
    assert (first.requests[0].submit.id, bench.peer.running) == (number, 2)


def test_requests_that_share_a_key_share_a_launch(bench):
    for _ in range(3):
        bench.admit(backend="triton")
    launch = bench.take(Launch)
    bench.admit(backend="triton")
    assert (len(launch.requests), bench.peer.running, bench.scheduler.take()) == (3, 3, None)
    bench.finish(launch)
    assert (len(bench.take(Launch).requests), bench.woken) == (1, 1)


def test_a_request_waits_aside_for_its_kernels(bench):
    bench.device.compiling = Future()
    waiting, cancelled = bench.admit(backend="triton"), bench.admit(backend="triton")
    other = bench.admit()
    assert bench.take().requests[0].submit.id == other
    assert bench.scheduler.take() is None
    bench.scheduler.cancel(bench.peer, cancelled)
    bench.device.compiling.set_result(None)
    (request,) = bench.take(Launch).requests
    assert (request.submit.id, bench.woken) == (waiting, 1)
    assert bench.answered == [(cancelled, "deadline_exceeded")]


def test_the_requests_of_a_process_that_is_gone_are_dropped(bench):
    number = bench.admit(sequences=4, seconds=4 * LONG)
    bench.admit()
    running = bench.take()
    bench.scheduler.forget(bench.peer)
    assert bench.scheduler.take() is None
    bench.finish(running)
    assert (bench.answered, bench.peer.running) == ([(number, "deadline_exceeded")], 0)


class Calls(Bench):
    """A scheduler for calls over caches, from two HTTP processes. Each call has a separate cache."""

    def __init__(self):
        super().__init__()
        self.scheduler = Scheduler(
            self.device, BUDGET, self.answer, self.wake, holder=SimpleNamespace(
                enter=lambda serials: None, leave=lambda serials, used: None, due=math.inf
            )
        )  # fmt: skip
        self.peers = [self.peer, Worker(channel=None, pinning=None, segments={0: mmap.mmap(-1, 4096)})]

    def call(self, kin, *, peer=0, seconds=SHORT, deadline=None):
        number = next(NUMBERS)
        q, o = (PlacedTensor(name, "float32", (1, 1, 1, 8), SLOT, 0) for name in "qo")
        body = encode(PlannedCall("forward", Options(), "cpu", (q,), (o,), LayerShape(1, 8, 8, "float32"), 1))
        caches = CacheRef("alice", (10 * number + kin,), 0, None, "", None, -1)
        message = submit(body, number, seconds=seconds, rank=seconds, deadline=deadline, cache_ref=caches)
        self.put(message, self.peers[peer])
        return number


def test_calls_with_the_same_first_keys_are_cut_together_if_they_wait_at_the_same_time():
    bench = Calls()
    numbers = [bench.call(1), bench.call(2), bench.call(1, peer=1), bench.call(0), bench.call(0), bench.call(1)]
    much_longer = bench.call(1, seconds=3 * SHORT)
    cut = bench.take(Split)
    assert [request.submit.id for request in cut.requests] == [numbers[0], numbers[2], numbers[5]]
    late = bench.call(1)
    others = []
    while bench.scheduler._waiting.items:
        another = bench.take(Split)
        others.append([request.submit.id for request in another.requests])
        another.requests[0].add([object()])
        bench.finish(bench.finish(another)[0])
    assert others == [[numbers[1]], [numbers[3]], [numbers[4]], [late], [much_longer]]
    bench.answered.clear()
    cut.requests[0].add([object(), object()])
    first = bench.finish(cut)[0]
    second = bench.take()
    bench.finish(second)
    assert bench.answered == []
    bench.finish(first)
    assert bench.answered == [(numbers[n], None) for n in (0, 2, 5)]
    assert [peer.running for peer in bench.peers] == [0, 0]


@pytest.mark.parametrize("ends", ["cancelled", "gone", "late"])
def test_a_call_that_ends_early_does_not_end_those_that_were_cut_with_it(ends):
    bench = Calls()
    first = bench.call(1, deadline=2.0**62)
    second = bench.call(1, peer=1)
    cut = bench.take(Split)
    cut.requests[0].add([object(), object()])
    part = bench.finish(cut)[0]
    if ends == "cancelled":
        bench.scheduler.cancel(bench.peer, first)
    elif ends == "gone":
        bench.scheduler.forget(bench.peer)
        assert bench.peer.running > 0  # the parts still write to the request's memory
    else:
        cut.requests[0].submit = replace(cut.requests[0].submit, deadline=0.0)
    bench.finish(part, bench.take())
    assert bench.answered == [(first, "deadline_exceeded"), (second, None)]
    assert [peer.running for peer in bench.peers] == [0, 0]


def test_parts_for_calls_that_have_all_ended_early_are_dropped():
    bench = Calls()
    numbers = [bench.call(1), bench.call(1)]
    cut = bench.take(Split)
    cut.requests[0].add([object(), object()])
    part = bench.finish(cut)[0]
    for number in numbers:
        bench.scheduler.cancel(bench.peer, number)
    assert bench.scheduler.take() is None
    bench.finish(part)
    assert bench.answered == [(number, "deadline_exceeded") for number in numbers]


def test_calls_on_a_cache_of_a_process_that_is_gone_are_dropped_once():
    """If an HTTP process ends, each of its waiting calls on caches is dropped once, and other processes' calls run."""
    bench, ledger = Bench(), Ledger(1 << 20)
    bench.scheduler = Scheduler(bench.device, BUDGET, bench.answer, bench.wake, holder=ledger)
    terms, store = Terms("alice"), CacheStore(ledger, ttl=60.0)
    one, two = (
        record.serial for record in store.create(terms, CacheShape((1,), (8,), (8,), "float32"), 2, None, [None], None)
    )
    other = Worker(channel=None, pinning=None, segments={0: mmap.mmap(-1, 4096)})
    numbers = []
    for peer, caches in ((bench.peer, (one,)), (bench.peer, (one, two)), (bench.peer, (two,)), (other, (one, two))):
        numbers.append(next(NUMBERS))
        look = CacheCall("alice", LookAtCaches(), caches)
        bench.put(submit(look, numbers[-1]), peer)
    bench.scheduler.forget(bench.peer)
    assert sorted(bench.answered) == [(number, "deadline_exceeded") for number in numbers[:3]]
    assert [cache.users for cache in store.find(terms, (one, two))] == [1, 1]
    task = bench.take(Ask)
    assert task.requests[0].submit.id == numbers[3]
    bench.finish(task)
    assert [cache.users for cache in store.find(terms, (one, two))] == [0, 0]
    assert bench.scheduler.take() is None


def test_a_slice_of_a_plugin_runs_alone(monkeypatch):
    plugin = Plugin()
    bench = Bench([plugin])
    plugin.wanted = True
    number = bench.admit()
    piece = bench.take(BenchmarkSlice)
    assert (plugin.calls, bench.scheduler.take(), bench.scheduler.next_look()) == (["begin"], None, None)
    plugin.wanted = False
    bench.finish(piece)
    part = bench.take()
    assert (part.requests[0].submit.id, bench.woken) == (number, 1)
    plugin.wanted = True
    bench.admit()
    assert bench.scheduler.take() is None  # no part starts, so that the plugin's slice can run alone soon
    monkeypatch.setattr(module, "HOLD_SECONDS", 0.0)
    bench.take()  # the plugin's slice has waited longer than HOLD_SECONDS, so parts start again
    assert plugin.calls == ["begin", "postpone"]
