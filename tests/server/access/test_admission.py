"""Admission limits the requests, bytes and FLOPs in progress, and the size of one request."""

import re
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from flashpoint_contract.options import Options
from flashpoint_contract.spec import plan
from flashpoint_contract.tensors import TensorInfo
from flashpoint_kernels.problems.cost import NOMINAL
from flashpoint_server.access import admission as module
from flashpoint_server.access.admission import FEW, PATIENCE, Admission
from flashpoint_server.access.limits import Spent
from flashpoint_server.config.settings import Settings
from flashpoint_server.ipc.counts import Counts, WorkerGroup, clear
from flashpoint_server.ipc.memory import NamedMemory
from flashpoint_server.ipc.messages import DeviceInfo
from flashpoint_server.ipc.price import Price
from flashpoint_server.plan import MessageHead, Plans, check_size
from flashpoint_server.refusal import Refusal
from tests.support.admitted import Entered


def message_of(infos, options, direction):
    one = MessageHead()
    one.inputs, one.checked, one.direction = tuple(infos.items()), options, direction
    return one


def spec(q, k, v, dtype="float32", **options):
    infos = {"q": TensorInfo(dtype, q), "k": TensorInfo(dtype, k), "v": TensorInfo(dtype, v)}
    return plan(infos, Options(**options), "forward")


def test_requests_and_bytes_are_counted_while_they_are_inside():
    admission = Admission(Settings(queue_limit=2, queue_bytes=100))
    with Entered(admission, 60), Entered(admission, 40):
        assert (admission.requests, admission.bytes) == (2, 100)
        with pytest.raises(Refusal, match="2 requests") as caught, Entered(admission, 0):
            pass
        assert (caught.value.status, caught.value.headers) == (429, {"Retry-After": "1"})
    assert (admission.requests, admission.bytes) == (0, 0)
    with Entered(admission, 60), pytest.raises(Refusal, match="60 bytes"), Entered(admission, 41):
        pass
    with pytest.raises(KeyError), Entered(admission, 10):
        raise KeyError
    assert (admission.requests, admission.bytes) == (0, 0)


def test_the_text_of_an_answer_counts_as_bytes_too():
    admission = Admission(Settings(queue_bytes=100))
    with Entered(admission, 60) as first, Entered(admission, 20) as second:
        second.grow(20)
        with pytest.raises(Refusal, match="hold 100 bytes, and this one needs 1"):
            first.grow(1)
    assert admission.bytes == 0
    with Entered(admission, 60) as alone:
        alone.grow(1000)


def test_flops_and_predicted_seconds_are_counted_once_they_are_known():
    admission = Admission(Settings(queue_flops=100, queue_seconds=10))
    with Entered(admission, 0) as first, Entered(admission, 0) as second:
        first.charge(Price(60, 6.0))
        assert (admission.flops, admission.seconds) == (60, 6.0)
        with pytest.raises(Refusal, match="60 FLOPs, and this one 41") as caught:
            second.charge(Price(41, 0.1))
        assert caught.value.status == 429
        with pytest.raises(Refusal, match=r"take 6 compute seconds, and this one 4\.1"):
            second.charge(Price(40, 4.1))
        second.charge(Price(40, 4.0))
    assert (admission.flops, admission.seconds) == (0, 0)
    with Entered(admission, 0) as alone:
        alone.charge(Price(1000, 100.0))


def test_the_longest_wait_is_of_the_requests_that_wait_for_the_service_alone(monkeypatch):
    """`oldest_seconds` ignores requests whose body is still arriving or whose answer is being sent."""
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    admission = Admission(Settings())
    waits = {"first": None, "second": 998.0}
    with Entered(admission, 0, None, lambda: waits["first"]), Entered(admission, 0, None, lambda: waits["second"]):
        assert admission.oldest_seconds == 2
        waits["first"] = 993.0
        assert admission.oldest_seconds == 7
        waits["first"] = None
        assert admission.oldest_seconds == 2
    assert admission.oldest_seconds == 0


def test_alone_a_request_of_any_size_is_let_in():
    with Entered(Admission(Settings(queue_bytes=100)), 1000):
        pass


def test_the_least_memory_of_a_request():
    s = spec((1, 2, 10, 8), (1, 2, 20, 8), (1, 2, 20, 4))
    tensors = 4 * (2 * 10 * 8 + 2 * 20 * 8 + 2 * 20 * 4 + 2 * 10 * 4)
    assert s.footprint == tensors


def test_an_empty_tensor_hides_no_cost():
    huge = spec((1, 1, 1 << 20, 1), (1, 1, 0, 1), (1, 1, 0, 1 << 20))
    assert huge.input_bytes < 1 << 23
    with pytest.raises(Refusal) as caught:
        check_size(huge, memory=1 << 40, sequence_limit=10)
    assert (caught.value.status, caught.value.code) == (413, "work_too_large")
    empty = spec((1, 1 << 30, 0, 8), (1, 1, 5, 8), (1, 1, 5, 8))
    assert empty.output_bytes == 0
    with pytest.raises(Refusal):
        check_size(empty, memory=1 << 34, sequence_limit=10)


def test_stored_ds_counts_while_it_is_on():
    """A gradient on `triton` needs the workspace beside its tensors, once, and in chunks of a smaller setting less."""
    shape = (1, 2, 1024, 64)
    infos = dict.fromkeys(("q", "k", "v", "do"), TensorInfo("bfloat16", shape))
    call = message_of(infos, Options(backend="triton"), "backward")
    tensors, of_head = 7 * 2 * 2 * 1024 * 64, 2 * 1024 * 1024
    assert plan(infos, call.checked, "backward").footprint == tensors

    def chosen(memory, **settings):
        gpu = DeviceInfo("cuda:0", "a GPU", memory, ("triton", "tiled", "reference"), 1e12, NOMINAL)
        return Plans(Settings(**settings)).of(call, gpu).backend

    assert chosen(tensors) == "triton"
    assert chosen(tensors + 2 * of_head, store_ds=True) == "triton"
    assert chosen(tensors + of_head, store_ds=True, workspace_bytes=1) == "triton"
    for memory, setting in ((tensors + 2 * of_head - 1, 1 << 30), (tensors + of_head - 1, 1)):
        with pytest.raises(Refusal, match=f"needs at least {memory + 1} bytes") as caught:
            chosen(memory, store_ds=True, workspace_bytes=setting)
        assert (caught.value.status, caught.value.code) == (413, "work_too_large")


def test_sequences_are_limited():
    many = spec((11, 1, 1, 8), (11, 1, 1, 8), (11, 1, 1, 8))
    check_size(many, memory=1 << 30, sequence_limit=11)
    with pytest.raises(Refusal, match="11 sequences"):
        check_size(many, memory=1 << 30, sequence_limit=10)


def shared(memory, process, **settings):
    counts = Counts(WorkerGroup(memory, process, 3))
    return Admission(Settings(**settings), counts), counts


def totals(counts):
    """Return the sums of requests, bytes, FLOPs and seconds over all processes."""
    return tuple(map(sum, (counts.requests, counts.bytes, counts.flops, counts.seconds)))


def test_limits_hold_over_all_processes_together():
    """Each limit (requests, bytes, FLOPs, seconds) applies to the sum over the unfinished requests of all processes."""
    memory = NamedMemory()
    limits = {"queue_limit": 3, "queue_bytes": 100, "queue_flops": 100, "queue_seconds": 10}
    (one, counts), (two, _), (three, _) = (shared(memory, n, **limits) for n in range(3))
    with Entered(one, 60) as first, Entered(two, 30) as second:
        with pytest.raises(Refusal, match="hold 90 bytes, and this one needs 11"):
            Entered(three, 11)
        with Entered(three, 10), pytest.raises(Refusal, match="3 requests"):
            Entered(one, 0)
        first.charge(Price(60, 6.0))
        with pytest.raises(Refusal, match="60 FLOPs, and this one 41"):
            second.charge(Price(41, 0.0))
        with pytest.raises(Refusal, match=re.escape("take 6 compute seconds, and this one 4.1")):
            second.charge(Price(0, 4.1))
        second.charge(Price(40, 4.0))
        assert totals(counts) == (2, 90, 100, 10)
        assert (two.requests, two.bytes, two.flops, two.seconds) == (1, 30, 40, 4.0)
    assert totals(counts) == (0, 0, 0, 0)
    with Entered(three, 1000) as alone:
        alone.charge(Price(1000, 100.0))


def test_what_a_process_that_died_had_inside_counts_no_more():
    """The counts of a dead process are cleared: by the supervisor (`clear`), or when its successor starts."""
    memory = NamedMemory()
    (one, _), (two, counts) = (shared(memory, n, queue_bytes=100) for n in range(2))
    spent = [Spent("alice", WorkerGroup(memory, n)) for n in range(2)]
    for number in range(2):
        spent[number].inside[number] = 3
    Entered(one, 60).charge(Price(7, 1.0))
    Entered(two, 40)
    clear(memory, 0)
    assert totals(counts) == (1, 40, 0, 0)
    assert list(spent[1].inside[:3]) == [0, 3, 0]
    _, successor = shared(memory, 1)
    assert totals(successor)[:2] == (0, 0)


NOW = 1000.0


@pytest.fixture
def stopped_clock(monkeypatch):
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: NOW))


@pytest.mark.usefixtures("stopped_clock")
def test_a_request_that_would_wait_for_too_much_of_its_time_is_refused_at_once():
    admission = Admission(Settings())
    with ExitStack() as inside:
        # FEW requests are admitted whatever their predicted wait is: an engine without work cannot measure its speed.
        for _ in range(FEW):
            inside.enter_context(Entered(admission, 0)).charge(Price(0, 10.0), NOW + 1, 1.0)
        one = inside.enter_context(Entered(admission, 0))
        wait = FEW * 10
        message = rf"take {wait} s, and the deadline of this one is in {2 * wait - 1} s"
        with pytest.raises(Refusal, match=message) as caught:
            one.charge(Price(0, 10.0), NOW + wait / PATIENCE - 1, 1.0)
        assert caught.value.code == "queue_full"
        one.charge(Price(0, 10.0), NOW + wait / PATIENCE, 1.0)


@pytest.mark.usefixtures("stopped_clock")
def test_a_request_that_does_not_wait_for_others_is_let_in():
    admission = Admission(Settings())
    with ExitStack() as inside:
        for _ in range(FEW):
            inside.enter_context(Entered(admission, 0)).charge(Price(0, 10.0))
        small = inside.enter_context(Entered(admission, 0))
        small.charge(Price(0, 0.01), NOW + 1, 1.0)  # it runs before the large requests
        small.charge(Price(0, 10.0), None, 1.0)  # a request without a deadline may wait
        small.charge(Price(0, 10.0), NOW + 1, 0.0)  # the engine's speed is unknown (0.0): no wait is predicted
        small.charge(Price(0, 10.0), NOW - 1, 1.0)  # already late: it is admitted, and answered with 504
