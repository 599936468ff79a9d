"""The tensors that an engine holds for callers: their owners, their memory in total, and when they expire.

    held → expired, or its owner's key removed: 410 for an hour → forgotten: 404      held → deleted: 404

KV caches (caches/store.py) and saved forwards (saved.py) share one budget, one quota of a key, and one row of serials.
No sockets and no torch here.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from flashpoint_server.engine.remembered import Remembered
from flashpoint_server.refusal import Refusal

TOMBSTONE_SECONDS = 3600.0
TOMBSTONES = 1 << 17  # at most
SWEEP_SECONDS = 1.0  # between two looks for what has expired


@dataclass(eq=False, kw_only=True)
class Owned(ABC):
    """A thing that is held. `users` are calls that wait or run; `ttl` and `expires` are in the ledger's seconds.

    `kind` is what errors call it, and `word` what the codes of these errors begin with.
    """

    kind: ClassVar[str]
    word: ClassVar[str]
    serial: int
    owner: str
    ttl: float
    expires: float
    nbytes: int = 0
    users: int = 0
    disowned: bool = False

    @abstractmethod
    def free(self) -> int:
        """Let go of its memory; return how many bytes of it nobody else shares."""


T = TypeVar("T", bound=Owned)


class Ledger:
    """See the module. `limit` is in bytes. All calls may come at the same time; `lock` makes several calls one."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.clock = clock
        self.lock = threading.RLock()
        self._items: dict[int, Owned] = {}
        self._serials = itertools.count(1)
        self._used = 0
        self.changes = 0  # of how many things there are, and of their bytes
        self._counts: defaultdict[str, int] = defaultdict(int)  # of things, by their word
        self._bytes: defaultdict[str, int] = defaultdict(int)  # of these, shared memory counted once
        self._owned: defaultdict[str, int] = defaultdict(int)
        self._lost: Remembered[float] = Remembered(TOMBSTONES)  # until when that is said, by serial
        self._swept = clock()

    @property
    def used(self) -> int:
        """Bytes of all that is held, shared memory counted once."""
        return self._used

    def held(self, of: type[Owned]) -> tuple[int, int]:
        """Return how many things of a class are held, and their bytes, shared memory counted once."""
        return self._counts[of.word], self._bytes[of.word]

    def owned(self, owner: str) -> int:
        """Return the bytes of all that an owner holds, shared memory counted in full for each."""
        return self._owned.get(owner, 0)

    def serial(self) -> int:
        """Return the number of the next thing."""
        return next(self._serials)

    # Memory

    def check(self, owner: str, quota: int | None, new: int, net: int, largest: int, kind: str) -> None:
        """Raise Refusal where `new` bytes are too many; `net` of them are the owner's, `largest` is one thing's."""
        if largest > self.limit:
            raise Refusal("work_too_large", f"a {kind} of {largest} bytes never fits the {self.limit} for callers")
        if quota is not None and net > 0 and (owned := self.owned(owner)) + net > quota:
            raise Refusal("key_limit", f"the key holds {owned} bytes, and {net} more are over its {quota}")
        if self._used + new > self.limit:
            self._swept = -math.inf  # what has expired need not wait for the next look
            self.sweep()
        if self._used + new > self.limit:
            raise Refusal("cache_memory", f"{self._used} of {self.limit} bytes are held, and this needs {new} more")

    def count(self, item: Owned, nbytes: int, new: int) -> None:
        """Count `nbytes` of a thing, of which `new` are shared with nothing else."""
        item.nbytes += nbytes
        self._owned[item.owner] += nbytes
        self._used += new
        self.changes += 1
        self._bytes[item.word] += new

    def uncount(self, item: Owned, nbytes: int, gone: int) -> None:
        """A thing has let go of `nbytes`, of which `gone` were shared with nothing else."""
        item.nbytes -= nbytes
        self._used -= gone
        self.changes += 1
        self._bytes[item.word] -= gone
        if item.owner in self._owned:
            self._owned[item.owner] -= nbytes

    # Things that come and go

    def all(self, of: type[T]) -> list[T]:
        """Return the things of a class."""
        return [item for item in self._items.values() if isinstance(item, of)]

    def get(self, of: type[T], serial: int) -> T | None:
        """Return the item with this number, of any owner."""
        item = self._items.get(serial)
        return item if isinstance(item, of) else None

    def listed(self, of: type[T], owner: str) -> list[T]:
        """Return an owner's things of a class that have not expired."""
        now = self.clock()
        return [item for item in self.all(of) if item.owner == owner and (item.users or now < item.expires)]

    def add(self, item: Owned, nbytes: int, new: int) -> None:
        """Hold a thing, which takes `nbytes`, of which `new` are shared with nothing else."""
        self._items[item.serial] = item
        self._counts[item.word] += 1
        self.count(item, nbytes, new)

    def find(self, of: type[T], owner: str, serial: int) -> T | tuple[str, str]:
        """Return the owner's thing of that number, or the code and the text that say why there is none."""
        now = self.clock()
        item = self._items.get(serial)
        if item is not None and item.owner == owner and not item.users and now >= item.expires:
            self._lose(item)
            item = None
        if isinstance(item, of) and item.owner == owner:
            return item
        until = self._lost.get(owner, serial)
        if until is not None and now < until:
            return f"{of.word}_lost", "it expired, or its engine restarted"
        return f"{of.word}_not_found", f"there is no such {of.kind}"

    def end(self, item: Owned) -> None:
        """Take a thing's memory back."""
        del self._items[item.serial]
        gone = item.free()
        self._used -= gone
        self.changes += 1
        self._bytes[item.word] -= gone
        self._counts[item.word] -= 1
        self._owned[item.owner] -= item.nbytes
        if not self._owned[item.owner]:
            del self._owned[item.owner]

    def keep_owners(self, names: Iterable[str]) -> None:
        """Free what all other owners hold, when no call uses it any more: their keys have been removed."""
        with self.lock:
            kept = set(names)
            for item in [item for item in self._items.values() if item.owner not in kept]:
                item.disowned = True
                if not item.users:
                    self._lose(item)

    def _lose(self, item: Owned) -> None:
        self.end(item)
        self._lost.put(item.owner, item.serial, self.clock() + TOMBSTONE_SECONDS)

    # Time

    def enter(self, serials: Iterable[int]) -> None:
        """A call waits for these things, which do not expire before `leave`."""
        with self.lock:
            now = self.clock()
            for serial in serials:
                if (item := self._items.get(serial)) is not None and (item.users or now < item.expires):
                    item.users += 1

    def leave(self, serials: Iterable[int], *, used: bool) -> None:
        """The call has ended; the time to live of what it has `used` begins anew."""
        with self.lock:
            now = self.clock()
            for serial in serials:
                if (item := self._items.get(serial)) is None or not item.users:
                    continue
                item.users -= 1
                if used:
                    item.expires = now + item.ttl
                if item.disowned and not item.users:
                    self._lose(item)

    def next_look(self) -> float | None:
        """Return when `sweep` has something to do, in the clock's seconds; None where nothing is held."""
        return self._swept + SWEEP_SECONDS if self._items else None

    def sweep(self) -> None:
        """Free what has expired, where the last look is long ago."""
        with self.lock:
            now = self.clock()
            if now < self._swept + SWEEP_SECONDS:
                return
            self._swept = now
            for item in [item for item in self._items.values() if not item.users and now >= item.expires]:
                self._lose(item)
            self._lost.drop_while(lambda until: until <= now)
