"""The memory that gRPC may hold: messages that are read, and answers until they are sent.

gRPC hands over a message once all of it is there, and says nothing of it before. So a message that is awaited counts as
the largest that is taken, and a call waits for that much room before its message is read. Until then flow control keeps
the message with its sender, but for the first 64 KiB. The part that has arrived counts. While gRPC hands a message over
there are two more copies of it, for which room is set aside. Each of gRPC's threads has a heap of its own that keeps
what was freed: that counts, too, until it is given back to the system. Not counted: gRPC's buffers, up to 1 MiB for
each connection on which a message arrives.

    waiting → reading → held (message, then answer) → released       reading → made way

While a call waits for room, the newest of several that are read makes way after `QUICK` seconds: large messages never
keep a small one, which needs a moment, waiting for long. The oldest makes way once it is slower than `RATE`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from flashpoint_server.config.settings import Settings
from flashpoint_server.ipc import heap
from flashpoint_server.ipc.counts import Count
from flashpoint_server.refusal import Refusal

LARGEST_MESSAGE = (1 << 31) - 1  # bytes: gRPC's and protobuf's
QUICK = 0.5  # seconds in which a small message has come, whatever else the machine does
RATE = 16 << 20  # bytes a second of the largest message that keeps its room, beside --body-timeout, while others wait
KEPT = 1 << 26  # bytes that heaps may keep; to give them back, and to have them again, takes milliseconds
_COPIES = 2  # of one message at a time, beside it

T = TypeVar("T")


class Hold:
    """The memory that one call holds, `nbytes`, for the key `owner`; `counted` towards the queue's limit."""

    def __init__(self, memory: Memory, *, counted: bool = False, owner: str = "") -> None:
        self._memory = memory
        self.counted = counted
        self.owner = owner
        self.nbytes = 0

    async def read(self, message: Callable[[], Awaitable[T]], size: Callable[[T], int], until: float) -> T:
        """The message, once there is room for it, which then counts as its `size`.

        `until` is in `time.monotonic` seconds. Raises TimeoutError then, and Refusal (408, 429) where there is no room,
        or this message has to make way for others.
        """
        reading = _Reading(self)
        try:
            async with asyncio.timeout(until - time.monotonic()) as reading.timeout:
                await self._memory.room(reading)
                found = await message()
        except TimeoutError:
            self._memory.failed(reading)
            raise reading.made_way or TimeoutError from None
        except BaseException:
            self._memory.failed(reading)
            raise
        self._memory.came(reading, size(found))
        return found

    @property
    def largest(self) -> int:
        """Bytes of the largest message that is taken."""
        return self._memory.largest

    def add(self, nbytes: int) -> None:
        """Hold so much more. Raises Refusal 429 where there is no room for it; a call alone always finds some."""
        if self._memory.others(self) and not self._memory.fits(self.owner, nbytes):
            raise Refusal("queue_full", f"gRPC holds {self._memory.held} bytes, and this call needs {nbytes} more")
        self._memory.set(self, self.nbytes + nbytes)

    def drop(self, nbytes: int) -> None:
        """Hold so much less."""
        self._memory.set(self, self.nbytes - nbytes)

    def release(self) -> None:
        """The call is over, and holds nothing any more."""
        self._memory.over(self)


class _Reading:
    """A message that is awaited, or waits for room."""

    def __init__(self, hold: Hold) -> None:
        self.hold = hold
        self.timeout = asyncio.timeout(None)
        self.since = 0.0  # when its room was given; 0 while it waits
        self.made_way: Refusal | None = None
        self.leaving = False  # its room comes back once its call is over
        self.turn: asyncio.Future[None] | None = None

    def make_way(self, refusal: Refusal) -> None:
        self.made_way, self.leaving = refusal, True
        self.timeout.reschedule(asyncio.get_running_loop().time())


class Memory:
    """The memory limit of gRPC in one HTTP process: its part of `--grpc-bytes`; a key has half of it at most."""

    def __init__(self, settings: Settings, locked: bool, arriving: Count, inside: Callable[[], float]) -> None:
        """`locked`: callers have keys. `arriving` counts what is awaited; `inside`: how many requests are admitted."""
        part = settings.grpc_bytes // settings.workers
        messages = 4 if locked else 2  # of the largest: so that a key has room for two, one that makes way for others
        self.largest = min(settings.body_limit, LARGEST_MESSAGE, part // (messages + _COPIES))
        self.limit = part - _COPIES * self.largest
        self._share = self.limit // 2 if locked else self.limit
        self._patience = settings.body_timeout
        self._slow = settings.body_timeout + self.largest / RATE  # seconds
        self._queue_limit = settings.queue_limit
        self._arriving = arriving
        self._inside = inside
        self.held = 0
        self._kept = 0  # most that was freed and that heaps may still have
        self._of: dict[str, int] = {}  # by owner
        self._reading: dict[_Reading, None] = {}  # in the order in which they began
        self._waiting: dict[_Reading, None] = {}  # in the order in which they came
        self._timer: asyncio.TimerHandle | None = None

    def set(self, hold: Hold, nbytes: int) -> None:
        """Count what a call holds now."""
        if more := nbytes - hold.nbytes:
            hold.nbytes = nbytes
            self.held += more
            if owned := self._of.get(hold.owner, 0) + more:
                self._of[hold.owner] = owned
            else:
                del self._of[hold.owner]
            if more < 0 and self._waiting:
                self._give_turns()

    def others(self, hold: Hold) -> bool:
        """Whether anybody else holds anything."""
        return self.held > hold.nbytes

    def fits(self, owner: str, nbytes: int) -> bool:
        """Whether there is room for so much more, in total and for its owner."""
        if self._of.get(owner, 0) + nbytes > self._share or self.held + nbytes > self.limit:
            return False
        if self.held + self._kept + nbytes > self.limit:
            self._trim()
        return True

    async def room(self, reading: _Reading) -> None:
        """Wait until there is room for the largest message. Raises Refusal 429."""
        if reading.hold.counted:
            self._check_number()
            self._arriving.add(1)
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
        """The message has come, with so many bytes."""
        del self._reading[reading]
        self._awaited(reading)
        self._kept += nbytes
        if self._kept >= KEPT:
            self._trim()
        self.set(reading.hold, nbytes)

    def failed(self, reading: _Reading) -> None:
        """Nobody waits for the message any more. The part that has arrived is held until the call is over."""
        if reading in self._waiting:
            del self._waiting[reading]
        elif reading not in self._reading:
            return  # refused
        reading.leaving = True
        self._awaited(reading)

    def over(self, hold: Hold) -> None:
        """A call has ended."""
        failed = [reading for reading in self._reading if reading.hold is hold]
        for reading in failed:
            del self._reading[reading]
            self._kept += hold.nbytes  # what had come of it is not known
        self.set(hold, 0)

    def _trim(self) -> None:
        """Give what heaps keep back to the system."""
        self._kept = 0
        heap.trim()

    def _awaited(self, reading: _Reading) -> None:
        """It was awaited, and is no longer."""
        if reading.hold.counted:
            self._arriving.add(-1)

    def _check_number(self) -> None:
        """Raises Refusal 429 where as many are admitted or awaited as may be, and no message is slow."""
        if self._arriving.total + self._inside() < self._queue_limit:
            return
        first = next((one for one in self._reading if one.hold.counted and not one.leaving), None)
        if first is None or time.monotonic() - first.since <= self._patience:
            limit = self._queue_limit
            raise Refusal("queue_full", f"{limit} requests are being served, as many as the server admits")
        first.make_way(_too_slow())

    def _begin(self, reading: _Reading) -> bool:
        """Give it room, where there is any."""
        if not self.fits(reading.hold.owner, self.largest):
            return False
        del self._waiting[reading]
        self._reading[reading] = None
        reading.since = time.monotonic()
        self.set(reading.hold, self.largest)
        return True

    def _give_turns(self) -> None:
        """Let those begin for whom there is room, owners that hold least first; have others make way for the rest."""
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
        """Have one make way for a message of `owner`; else in how many seconds one has to. None: nobody has to."""
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


_NO_ROOM = "other calls hold the memory for messages (--grpc-bytes), and this message may be large"


def _too_slow() -> Refusal:
    return Refusal("body_timeout", "the message came too slowly")
