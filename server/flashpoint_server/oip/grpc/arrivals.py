"""The memory of gRPC: messages while they are read, and answers until they are sent.

gRPC delivers a message only when it is complete, and does not report its size before. So a call reserves memory for the
largest allowed message before it reads, and waits until this memory is free. Until then, flow control stops the sender.
While gRPC delivers a message, two more copies of it exist; memory for them is reserved. Each thread of gRPC has its own
heap, which keeps freed memory: this counts as used until it is returned to the system. Not counted are the first 64 KiB
of a message, which arrive before the call reads, and gRPC's buffers: up to 1 MiB for each connection with a message.

While a call waits for memory, a message that is being read can be refused to free its memory: it "makes way". If there
are several such messages, the newest makes way after `QUICK` seconds, so that large messages do not delay a small one
for long. The oldest makes way if it is slower than `RATE`.

    waiting → reading → stored (message, then answer) → released       reading → refused (makes way)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from flashpoint_server.config.settings import Settings
from flashpoint_server.ipc.counts import Counts
from flashpoint_server.processes import heap
from flashpoint_server.refusal import Refusal

LARGEST_MESSAGE = (1 << 31) - 1  # maximum bytes of a message in gRPC and protobuf
QUICK = 0.5  # seconds in which a small message arrives, even on a busy machine
# Bytes a second: while other calls wait for memory, a message may take --body-timeout, plus the time that the largest
# allowed message takes at this rate.
RATE = 16 << 20
KEPT = 1 << 26  # freed bytes that heaps may keep, because returning them and allocating again takes milliseconds
_COPIES = 2  # number of additional copies of a message while gRPC delivers it

T = TypeVar("T")


class Hold:
    """The memory of one gRPC call: `nbytes`, which count against the limit of the API key `owner`.

    `counted`: whether the call counts against the queue limit while it waits for memory or reads its message.
    """

    def __init__(self, memory: Memory, *, counted: bool = False, owner: str = "") -> None:
        self._memory = memory
        self.counted = counted
        self.owner = owner
        self.nbytes = 0

    async def read(self, message: Callable[[], Awaitable[T]], size: Callable[[T], int], until: float) -> T:
        """Wait for memory, and return what `message` reads. From then on, count its `size` instead of `largest`.

        `until` is in `time.monotonic` seconds. Raises TimeoutError after it, and Refusal (408, 429) if no memory
        becomes free, or if this message is refused to free its memory for another call.
        """
        reading = _Reading(self)
        try:
            async with asyncio.timeout(until - time.monotonic()) as reading.timeout:
                await self._memory.room(reading)
                data = await message()
        except TimeoutError:
            self._memory.failed(reading)
            raise reading.made_way or TimeoutError from None
        except BaseException:
            self._memory.failed(reading)
            raise
        self._memory.came(reading, size(data))
        return data

    @property
    def largest(self) -> int:
        """The bytes of the largest allowed message."""
        return self._memory.largest

    def add(self, nbytes: int) -> None:
        """Count `nbytes` more for this call. Raises Refusal 429 over a limit, unless no other call has memory."""
        if self._memory.others(self) and not self._memory.fits(self.owner, nbytes):
            raise Refusal("queue_full", f"gRPC holds {self._memory.used} bytes, and this call needs {nbytes} more")
        self._memory.set(self, self.nbytes + nbytes)

    def drop(self, nbytes: int) -> None:
        """Count `nbytes` less for this call."""
        self._memory.set(self, self.nbytes - nbytes)

    def release(self) -> None:
        """Release all memory of a call that has ended."""
        self._memory.over(self)


class _Reading:
    """A call that waits for memory, or reads its message."""

    def __init__(self, hold: Hold) -> None:
        self.hold = hold
        self.timeout = asyncio.timeout(None)
        self.since = 0.0  # when the call got memory, in `time.monotonic` seconds; 0 while it waits
        self.made_way: Refusal | None = None
        self.leaving = False  # whether reading was given up: the memory is released when the call ends
        self.turn: asyncio.Future[None] | None = None  # done when the call gets memory

    def make_way(self, refusal: Refusal) -> None:
        self.made_way, self.leaving = refusal, True
        self.timeout.reschedule(asyncio.get_running_loop().time())


class Memory:
    """The memory limit of gRPC in one HTTP process: its share of `--grpc-bytes`. An API key may use half of it."""

    def __init__(self, settings: Settings, locked: bool, counts: Counts) -> None:
        """`locked`: whether callers need API keys. `counts`: the counts of requests that all HTTP processes share."""
        part = settings.grpc_bytes // settings.workers
        # At least this many messages of the largest size fit. A key may use half of the memory, so it has room for two
        # of them at least, of which the newer can make way.
        messages = 4 if locked else 2
        self.largest = min(settings.body_limit, LARGEST_MESSAGE, part // (messages + _COPIES))
        self.limit = part - _COPIES * self.largest
        self._share = self.limit // 2 if locked else self.limit
        self._patience = settings.body_timeout
        self._slow = settings.body_timeout + self.largest / RATE  # seconds after which the oldest message is too slow
        self._queue_limit = settings.queue_limit
        self._counts = counts
        self.used = 0
        self._freed = 0  # upper bound of the freed bytes that heaps have not returned to the system
        self._of: dict[str, int] = {}  # bytes by owner
        self._reading: dict[_Reading, None] = {}  # calls that have memory, in the order in which they got it
        self._waiting: dict[_Reading, None] = {}  # calls without memory, in the order of their arrival
        self._timer: asyncio.TimerHandle | None = None

    def set(self, hold: Hold, nbytes: int) -> None:
        """Count `nbytes` for a call, instead of its present number. If this frees memory, waiting calls get it."""
        if more := nbytes - hold.nbytes:
            hold.nbytes = nbytes
            self.used += more
            if owned := self._of.get(hold.owner, 0) + more:
                self._of[hold.owner] = owned
            else:
                del self._of[hold.owner]
            if more < 0 and self._waiting:
                self._give_turns()

    def others(self, hold: Hold) -> bool:
        """Return whether other calls than this one have memory."""
        return self.used > hold.nbytes

    def fits(self, owner: str, nbytes: int) -> bool:
        """Return whether `nbytes` more are within the limits, in total and for the owner."""
        if self._of.get(owner, 0) + nbytes > self._share or self.used + nbytes > self.limit:
            return False
        if self.used + self._freed + nbytes > self.limit:
            self._trim()
        return True

    async def room(self, reading: _Reading) -> None:
        """Wait until memory for a message of the largest size is free, and reserve it. Raises Refusal 429."""
        if reading.hold.counted:
            self._check_number()
            self._counts.arriving[self._counts.column] += 1
        self._waiting[reading] = None
        if len(self._waiting) == 1 and self._begin(reading):
            return
        reading.turn = asyncio.get_running_loop().create_future()
        self._give_turns()
        try:
            async with asyncio.timeout(self._patience):
                await reading.turn
        except TimeoutError:
            raise Refusal("queue_full", _NO_ROOM) from None

    def came(self, reading: _Reading, nbytes: int) -> None:
        """Record that a message of `nbytes` has arrived."""
        del self._reading[reading]
        self._awaited(reading)
        self._freed += nbytes
        if self._freed >= KEPT:
            self._trim()
        self.set(reading.hold, nbytes)

    def failed(self, reading: _Reading) -> None:
        """Record that the reading of a message was given up. The call's memory, if any, counts until the call ends."""
        if reading in self._waiting:
            del self._waiting[reading]
        elif reading not in self._reading:
            return  # `room` refused the call before it counted the call
        reading.leaving = True
        self._awaited(reading)

    def over(self, hold: Hold) -> None:
        """Release the memory of a call that has ended."""
        failed = [reading for reading in self._reading if reading.hold is hold]
        for reading in failed:
            del self._reading[reading]
            self._freed += hold.nbytes  # an upper bound: how much of the message arrived is unknown
        self.set(hold, 0)

    def _trim(self) -> None:
        """Return the free memory of the heaps to the system."""
        self._freed = 0
        heap.trim()

    def _awaited(self, reading: _Reading) -> None:
        """Subtract a call, whose message has arrived or was given up, from the shared count of arriving messages."""
        if reading.hold.counted:
            self._counts.arriving[self._counts.column] -= 1

    def _check_number(self) -> None:
        """Raise Refusal 429 if the queue is full. If the oldest message being read is slow, refuse that one instead."""
        if sum(self._counts.arriving) + sum(self._counts.requests) < self._queue_limit:
            return
        first = next((one for one in self._reading if one.hold.counted and not one.leaving), None)
        if first is None or time.monotonic() - first.since <= self._patience:
            limit = self._queue_limit
            raise Refusal("queue_full", f"the queue is full: it has {limit} requests, its limit")
        first.make_way(_too_slow())

    def _begin(self, reading: _Reading) -> bool:
        """Reserve memory for a waiting call if the limits allow it. Return whether they do."""
        if not self.fits(reading.hold.owner, self.largest):
            return False
        del self._waiting[reading]
        self._reading[reading] = None
        reading.since = time.monotonic()
        self.set(reading.hold, self.largest)
        return True

    def _give_turns(self) -> None:
        """Give memory to waiting calls, first to those whose owner has the least.

        If calls still wait, let a message that is being read make way for the first of them, now or later.
        """
        for reading in sorted(self._waiting, key=lambda reading: self._of.get(reading.hold.owner, 0)):
            assert reading.turn is not None
            if not reading.turn.done() and self._begin(reading):
                reading.turn.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting and (due := self._make_way(next(iter(self._waiting)).hold.owner)) is not None:
            self._timer = asyncio.get_running_loop().call_later(due, self._give_turns)

    def _make_way(self, owner: str) -> float | None:
        """Refuse a message that has been read for too long, so that a waiting call of `owner` gets its memory.

        Return the seconds until a message can be refused; None if one was refused, or if none can be.
        """
        full = self._of.get(owner, 0) + self.largest > self._share
        reading = [one for one in self._reading if not full or one.hold.owner == owner]
        if not reading or any(one.leaving for one in reading):
            return None
        now = time.monotonic()
        slow = reading[0].since + self._slow - now
        late = reading[-1].since + QUICK - now if len(reading) > 1 else slow
        if slow <= 0:
            reading[0].make_way(_too_slow())
        elif late <= 0:
            reading[-1].make_way(Refusal("queue_full", _NO_ROOM))
        else:
            return min(slow, late)
        return None


_NO_ROOM = "other calls use the memory for messages (--grpc-bytes): retry"


def _too_slow() -> Refusal:
    return Refusal("body_timeout", "the message arrived too slowly")
