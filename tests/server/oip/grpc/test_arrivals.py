"""gRPC's memory limit for arriving messages: a call counts with the maximum message size until its message has come.

A call reads, waits for memory, or is ended because it is slow and another call needs the memory.
"""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from flashpoint_server.config.settings import Settings
from flashpoint_server.ipc.counts import Counts
from flashpoint_server.oip.grpc import arrivals
from flashpoint_server.oip.grpc.arrivals import QUICK, RATE, Hold, Memory
from flashpoint_server.refusal import Refusal

MIB = 1 << 20
LARGEST = 16 * MIB


class Calls:
    """Simulated calls with messages of up to 16 MiB, and their memory limit. The test advances the clock."""

    def __init__(self, monkeypatch, *, locked, messages, **settings):
        self.now = 1000.0
        monkeypatch.setattr(arrivals, "time", SimpleNamespace(monotonic=lambda: self.now))
        bytes_ = LARGEST * (messages + 2)
        self.memory = Memory(Settings(grpc_bytes=bytes_, body_limit=LARGEST, **settings), locked, Counts())
        self.reads = []

    async def begin(self, owner="", *, counted=True, patience=600):
        """Start a call and return it. `call.task` waits for memory and then for the future `call.message`."""
        hold, message = Hold(self.memory, counted=counted, owner=owner), asyncio.get_running_loop().create_future()
        call = SimpleNamespace(hold=hold, message=message, begun=False)

        def read():
            call.begun = True
            return message

        call.task = asyncio.create_task(hold.read(read, len, self.now + patience))
        call.task.add_done_callback(lambda task: hold.release() if task.cancelled() or task.exception() else None)
        await self.settle()
        return call

    @staticmethod
    async def settle():
        for _ in range(20):
            await asyncio.sleep(0)

    async def turn(self, seconds, call):
        """Advance the clock, let waiting calls get memory, and wait until `call` ends, at most 60 s."""
        self.now += seconds
        self.memory._give_turns()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(asyncio.wait([call.task])), 60)


def test_a_message_counts_as_the_largest_until_it_has_come(monkeypatch):
    async def run():
        calls = Calls(monkeypatch, locked=False, messages=2)
        assert (calls.memory.largest, calls.memory.limit) == (LARGEST, 2 * LARGEST)
        first, second, third = [await calls.begin() for _ in range(3)]
        assert ([call.begun for call in (first, second, third)], calls.memory.used) == (
            [True, True, False],
            2 * LARGEST,
        )
        first.message.set_result(bytes(1000))
        await calls.settle()
        assert (first.hold.nbytes, third.begun) == (1000, False)
        second.message.set_result(b"")
        await calls.settle()
        assert (third.begun, calls.memory.used) == (True, LARGEST + 1000)
        for call in (first, second):
            call.hold.release()
        third.message.set_result(bytes(10))
        await calls.settle()
        assert calls.memory.used == 10
        third.hold.release()
        assert calls.memory.used == 0

    asyncio.run(run())


def test_a_large_message_makes_way_for_one_that_may_be_small_and_the_oldest_only_when_it_is_slow(monkeypatch):
    async def run():
        calls = Calls(monkeypatch, locked=False, messages=2, body_timeout=10)
        oldest, newest = await calls.begin(), await calls.begin()
        waits = await calls.begin()
        await calls.settle()
        assert (waits.begun, newest.task.done()) == (False, False)
        await calls.turn(QUICK, newest)
        with pytest.raises(Refusal) as caught:
            newest.task.result()
        assert caught.value.code == "queue_full"
        await _until(lambda: waits.begun)
        waits.message.set_result(b"small")
        assert await waits.task == b"small"
        assert not oldest.task.done()
        others = await calls.begin(), await calls.begin()
        await calls.turn(10 + LARGEST / RATE, oldest)
        with pytest.raises(Refusal) as caught:
            oldest.task.result()
        assert caught.value.code == "body_timeout"
        for call in others:
            call.task.cancel()

    asyncio.run(run())


def test_a_key_has_half_of_the_memory_at_most(monkeypatch):
    """Calls of one API key that send nothing get at most half of the memory.

    Calls of other keys, and calls whose key is not known yet, can read at once.
    """

    async def run():
        calls = Calls(monkeypatch, locked=True, messages=4)
        greedy = [await calls.begin("greedy") for _ in range(4)]
        assert [call.begun for call in greedy] == [True, True, False, False]
        other, probe = await calls.begin("other"), await calls.begin(counted=False)
        assert (other.begun, probe.begun, calls.memory.used) == (True, True, 4 * LARGEST)
        for call in (*greedy, other, probe):
            call.task.cancel()

    asyncio.run(run())


async def two_that_hold_all(calls):
    """Start two calls whose messages use all memory, deliver the messages, and return the calls."""
    pair = await calls.begin(), await calls.begin()
    for call in pair:
        call.message.set_result(bytes(LARGEST))
    await calls.settle()
    return pair


def test_no_more_calls_are_awaited_than_the_queue_admits(monkeypatch):
    async def run():
        calls = Calls(monkeypatch, locked=False, messages=2, queue_limit=3)
        first, second = await two_that_hold_all(calls)
        waits = [await calls.begin() for _ in range(3)]
        full = await calls.begin()
        with pytest.raises(Refusal, match="3 requests"):
            full.task.result()
        for call in waits:
            call.task.cancel()
        await asyncio.wait([call.task for call in waits])
        assert (calls.memory.used, sum(calls.memory._counts.arriving)) == (2 * LARGEST, 0)
        with pytest.raises(Refusal, match="this call needs 1 more"):
            first.hold.add(1)
        second.hold.release()
        first.hold.add(3 * LARGEST)  # a call that is alone may have an answer of any size

    asyncio.run(run())


def test_a_call_waits_for_a_while(monkeypatch):
    async def run():
        calls = Calls(monkeypatch, locked=False, messages=2, body_timeout=0.01)
        await two_that_hold_all(calls)
        waits = [await calls.begin() for _ in range(3)]
        await asyncio.wait([call.task for call in waits])
        for call in waits:
            with pytest.raises(Refusal, match="grpc-bytes"):
                call.task.result()
        assert (calls.memory.used, sum(calls.memory._counts.arriving)) == (2 * LARGEST, 0)

    asyncio.run(run())


async def _until(condition):
    while not condition():  # noqa: ASYNC110  # a thread must first give memory back
        await asyncio.sleep(0.001)
