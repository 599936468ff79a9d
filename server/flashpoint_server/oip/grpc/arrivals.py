"""The memory of gRPC: messages while they are read, and answers until they are sent.

gRPC delivers a message only when it is complete, and gives no size before. So an awaited message counts as the largest
allowed one, and a call waits for that much room before it reads. Until then, flow control keeps the message at its
sender, except for the first 64 KiB, which count, too. While gRPC delivers a message, two more copies of it exist; room
for them is reserved. Each thread of gRPC has its own heap, which keeps freed memory: it counts until it is returned to
the system. Not counted: gRPC's buffers, up to 1 MiB for each connection on which a message arrives.

    waiting → reading → held (message, then answer) → released       reading → made way

While a call waits for room, the newest of several awaited messages makes way after `QUICK` seconds. So large messages
never delay a small one for long. The oldest one makes way if it is slower than `RATE`.
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
RATE = 16 << 20  # bytes a second: minimum rate of the largest message while others wait, beside --body-timeout
KEPT = 1 << 26  # bytes that heaps may keep; to return them and to allocate them again takes milliseconds
_COPIES = 2  # additional copies of one message at a time

T = TypeVar("T")


class Hold:
    """The memory of one call: `nbytes`, for the key `owner`. `counted`: whether the call counts for the queue limit."""

    def __init__(self, memory: Memory, *, counted: bool = False, owner: str = "") -> None:
        self._memory = memory
        self.counted = counted
        self.owner = owner
        self.nbytes = 0

    async def read(self, message: Callable[[], Awaitable[T]], size: Callable[[T], int], until: float) -> T:
        """Wait for room, read a message, and count its `size`.

        `until` is in `time.monotonic` seconds. Raises TimeoutError after it, and Refusal (408, 429) if there is no room
        or this message makes way for others.
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
        """Count `nbytes` more. Raises Refusal 429 if there is no room; a call that is alone always finds room."""
        if self._memory.others(self) and not self._memory.fits(self.owner, nbytes):
            raise Refusal("queue_full", f"gRPC holds {self._memory.used} bytes, and this call needs {nbytes} more")
        self._memory.set(self, self.nbytes + nbytes)

    def drop(self, nbytes: int) -> None:
        """Count `nbytes` less."""
        self._memory.set(self, self.nbytes - nbytes)

    def release(self) -> None:
        """Release all memory of a call that has ended."""
        self._memory.over(self)


class _Reading:
    """A message that is awaited, or waits for room."""

    def __init__(self, hold: Hold) -> None:
        self.hold = hold
        self.timeout = asyncio.timeout(None)
        self.since = 0.0  # time at which it got room; 0 while it waits
        self.made_way: Refusal | None = None
        self.leaving = False  # its room is released when its call ends
        self.turn: asyncio.Future[None] | None = None

    def make_way(self, refusal: Refusal) -> None:
        self.made_way, self.leaving = refusal, True
        self.timeout.reschedule(asyncio.get_running_loop().time())


class Memory:
    """The memory limit of gRPC in one HTTP process: its share of `--grpc-bytes`. A key may use half of it."""

    def __init__(self, settings: Settings, locked: bool, counts: Counts) -> None:
        """`locked`: callers need keys."""
        part = settings.grpc_bytes // settings.workers
        messages = 4 if locked else 2  # in largest messages: a key then has room for two, one of which can make way
        self.largest = min(settings.body_limit, LARGEST_MESSAGE, part // (messages + _COPIES))
        self.limit = part - _COPIES * self.largest
        self._share = self.limit // 2 if locked else self.limit
        self._patience = settings.body_timeout
        self._slow = settings.body_timeout + self.largest / RATE  # seconds
        self._queue_limit = settings.queue_limit
        self._counts = counts
        self.used = 0
        self._freed = 0  # maximum of freed memory that heaps may still keep
        self._of: dict[str, int] = {}  # by owner
        self._reading: dict[_Reading, None] = {}  # in the order of their start
        self._waiting: dict[_Reading, None] = {}  # in the order of arrival
        self._timer: asyncio.TimerHandle | None = None

    def set(self, hold: Hold, nbytes: int) -> None:
        """Set the number of bytes of a call."""
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
        """Return whether other calls hold memory."""
        return self.used > hold.nbytes

    def fits(self, owner: str, nbytes: int) -> bool:
        """Return whether there is room for `nbytes` more, in total and for the owner."""
        if self._of.get(owner, 0) + nbytes > self._share or self.used + nbytes > self.limit:
            return False
        if self.used + self._freed + nbytes > self.limit:
            self._trim()
        return True

    async def room(self, reading: _Reading) -> None:
        """Wait until there is room for the largest message. Raises Refusal 429."""
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
        """Record that nobody waits for a message any more. Its arrived part counts until the call ends."""
        if reading in self._waiting:
            del self._waiting[reading]
        elif reading not in self._reading:
            return  # it was refused
        reading.leaving = True
        self._awaited(reading)

    def over(self, hold: Hold) -> None:
        """Record the end of a call."""
        failed = [reading for reading in self._reading if reading.hold is hold]
        for reading in failed:
            del self._reading[reading]
            self._freed += hold.nbytes  # the size of the arrived part is unknown
        self.set(hold, 0)

    def _trim(self) -> None:
        """Return the free memory of the heaps to the system."""
        self._freed = 0
        heap.trim()

    def _awaited(self, reading: _Reading) -> None:
        """Record that a message is no longer awaited."""
        if reading.hold.counted:
            self._counts.arriving[self._counts.column] -= 1

    def _check_number(self) -> None:
        """Raise Refusal 429 if the queue is full, unless a slow message can make way."""
        if sum(self._counts.arriving) + sum(self._counts.requests) < self._queue_limit:
            return
        first = next((one for one in self._reading if one.hold.counted and not one.leaving), None)
        if first is None or time.monotonic() - first.since <= self._patience:
            limit = self._queue_limit
            raise Refusal("queue_full", f"the queue is full: it has {limit} requests, its limit")
        first.make_way(_too_slow())

    def _begin(self, reading: _Reading) -> bool:
        """Give a message room, if there is any. Return whether it got room."""
        if not self.fits(reading.hold.owner, self.largest):
            return False
        del self._waiting[reading]
        self._reading[reading] = None
        reading.since = time.monotonic()
        self.set(reading.hold, self.largest)
        return True

    def _give_turns(self) -> None:
        """Give room to waiting messages, to owners with the least memory first. Make others give way for the rest."""
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
        """Make one message give way to one of `owner`. Return the seconds until one must; None if none must."""
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
