"""The ledger of the caches and saved forwards (items) of an engine: their owners, total memory, and expiry.

    stored → expired, or its owner's key removed: 410 for an hour → forgotten: 404      stored → deleted: 404

KV caches (caches/store.py) and saved forwards (saved.py) share one memory limit, one quota for each API key, and one
sequence of serial numbers. This module uses no sockets and no torch.
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

from flashpoint_contract.wording.sizes import in_bytes
from flashpoint_server.engine.state.owner_lru import OwnerLru
from flashpoint_server.refusal import Refusal

TOMBSTONE_SECONDS = 3600.0  # how long a call on an expired item gets 410 instead of 404
TOMBSTONES = 1 << 17  # maximum number of expired items whose serials are stored, so that calls on them get 410
SWEEP_SECONDS = 1.0  # seconds between two checks for expired items
LOST_SECONDS = 60.0  # seconds between two checks if there are no items, only tombstones (records of expired items)


@dataclass(eq=False, kw_only=True)
class Owned(ABC):
    """An item of the ledger: a cache or a saved forward. `ttl` and `expires` are in seconds of the ledger's clock.

    `users` is the number of waiting and running calls that use it. `kind` is its name in error messages; `word` is the
    prefix of its error codes. `disowned`: its owner's API key was removed.
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
        """Free the item's memory. Return the number of freed bytes: memory that other items share is not freed."""


T = TypeVar("T", bound=Owned)


class Ledger:
    """The ledger that the module describes. `limit` is in bytes, and `most` is the maximum number of items.

    `enter`, `leave`, `keep_owners` and `sweep` acquire `lock`. Hold it to call other methods that change the ledger.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic, most: int = 1 << 16) -> None:
        self.limit = limit
        self.most = most
        self.clock = clock
        self.lock = threading.RLock()
        self._items: dict[int, Owned] = {}
        self._by_owner: dict[str, dict[int, Owned]] = {}  # the items of each owner, in the order of their serials
        self._serials = itertools.count(1)
        self._used = 0
        self.changes = 0  # how often the number of items, or of their bytes, has changed
        self._counts: defaultdict[str, int] = defaultdict(int)  # number of items, by `word`
        self._bytes: defaultdict[str, int] = defaultdict(int)  # bytes of items, by `word`; shared memory counts once
        self._owned: defaultdict[str, int] = defaultdict(int)
        # for each expired item, until when calls get 410, on the ledger's clock
        self._lost: OwnerLru[float] = OwnerLru(TOMBSTONES)
        self.due = math.inf  # when to call `sweep` next, on the ledger's clock

    @property
    def used(self) -> int:
        """The bytes of all items; shared memory counts once."""
        return self._used

    def usage(self, of: type[Owned]) -> tuple[int, int]:
        """Return the number of items of a class, and their bytes; shared memory counts once."""
        return self._counts[of.word], self._bytes[of.word]

    def owned(self, owner: str) -> int:
        """Return the bytes of an owner's items; shared memory counts for each item."""
        return self._owned.get(owner, 0)

    def serial(self) -> int:
        """Return the next serial number."""
        return next(self._serials)

    # Memory

    def check(self, owner: str, quota: int | None, new: int, net: int, largest: int, kind: str) -> None:
        """Raise Refusal if a call needs too much memory: `new` more bytes in all, or `net` more for its owner.

        Also if `largest`, the bytes of the largest item that the call makes or extends, exceeds the limit.
        `net` may be larger than `new`, because memory that items share counts for an owner once for each item.
        """
        if largest > self.limit:
            raise Refusal(
                "work_too_large",
                f"a {kind} of {in_bytes(largest)} exceeds the server's limit of {in_bytes(self.limit)}",
            )
        if quota is not None and net > 0 and (owned := self.owned(owner)) + net > quota:
            raise Refusal(
                "key_limit",
                f"the API key holds {in_bytes(owned)}; {in_bytes(net)} more exceed its limit of {in_bytes(quota)}",
            )
        if self._used + new > self.limit:
            self.due = -math.inf  # free expired items now, not at the next check
            self.sweep()
        if self._used + new > self.limit:
            raise Refusal(
                "cache_memory",
                f"{in_bytes(self._used)} of {in_bytes(self.limit)} are in use, "
                f"and this call needs {in_bytes(new)} more",
            )

    def check_number(self, owner: str, most: int | None, new: int, gone: int = 0) -> None:
        """Raise Refusal if an owner may not have `new` more items, after `gone` are deleted. `most`: its own limit."""
        if new > self.most:
            raise Refusal("work_too_large", f"{new} items exceed the server's limit of {self.most} (--cache-count)")
        owned = len(self._by_owner.get(owner, ()))
        if most is not None and owned + new - gone > most:
            raise Refusal("key_limit", f"the API key has {owned} caches and saved forwards, and its limit is {most}")
        if len(self._items) + new - gone > self.most:
            self.due = -math.inf  # free expired items now, not at the next check
            self.sweep()
        if (held := len(self._items)) + new - gone > self.most:
            limit = f"the limit is {self.most} (--cache-count), and this call needs {new} more"
            raise Refusal("cache_memory", f"the server has {held} caches and saved forwards: {limit}")

    def count(self, item: Owned, nbytes: int, new: int) -> None:
        """Count `nbytes` more for an item; `new` of them are not shared with another item."""
        item.nbytes += nbytes
        self._owned[item.owner] += nbytes
        self._used += new
        self.changes += 1
        self._bytes[item.word] += new

    def uncount(self, item: Owned, nbytes: int, gone: int) -> None:
        """Count `nbytes` less for an item; `gone` of them were not shared with another item."""
        item.nbytes -= nbytes
        self._used -= gone
        self.changes += 1
        self._bytes[item.word] -= gone
        if item.owner in self._owned:
            self._owned[item.owner] -= nbytes

    # Items

    def all(self, of: type[T]) -> list[T]:
        """Return the items of a class."""
        return [item for item in self._items.values() if isinstance(item, of)]

    def get(self, of: type[T], serial: int) -> T | None:
        """Return the item with this serial, of any owner; None if it does not exist."""
        item = self._items.get(serial)
        return item if isinstance(item, of) else None

    def listed(self, of: type[T], owner: str, after: int = 0, most: int | None = None) -> list[T]:
        """Return an owner's items of a class that have not expired, at most `most`, with serials above `after`."""
        now, items = self.clock(), self._by_owner.get(owner, {}).values()
        present = (
            item for item in items
            if item.serial > after and isinstance(item, of) and (item.users or now < item.expires)
        )  # fmt: skip
        return [*itertools.islice(present, most)]

    def add(self, item: Owned, nbytes: int, new: int) -> None:
        """Add an item of `nbytes`; `new` of them are not shared with another item."""
        self.due = min(self.due, self.clock() + SWEEP_SECONDS)
        self._items[item.serial] = self._by_owner.setdefault(item.owner, {})[item.serial] = item
        self._counts[item.word] += 1
        self.count(item, nbytes, new)

    def find(self, of: type[T], owner: str, serial: int) -> T | tuple[str, str]:
        """Return the owner's item with this serial, or the code and the text of the error."""
        now = self.clock()
        item = self._items.get(serial)
        if item is not None and item.owner == owner and not item.users and now >= item.expires:
            self._lose(item)
            item = None
        if isinstance(item, of) and item.owner == owner:
            return item
        until = self._lost.get(owner, serial)
        if until is not None and now < until:
            return f"{of.word}_lost", f"the {of.kind} expired, or its engine restarted"
        return f"{of.word}_not_found", f"this {of.kind} does not exist, or belongs to another API key"

    def end(self, item: Owned) -> None:
        """Remove an item and free its memory. Later calls on it get 404."""
        del self._items[item.serial], self._by_owner[item.owner][item.serial]
        if not self._by_owner[item.owner]:
            del self._by_owner[item.owner]
        gone = item.free()
        self._used -= gone
        self.changes += 1
        self._bytes[item.word] -= gone
        self._counts[item.word] -= 1
        self._owned[item.owner] -= item.nbytes
        if not self._owned[item.owner]:
            del self._owned[item.owner]

    def keep_owners(self, names: Iterable[str]) -> None:
        """Free the items of all owners except `names`: their keys were removed. Items in use are freed after use."""
        with self.lock:
            owners = set(names)
            for item in [item for item in self._items.values() if item.owner not in owners]:
                item.disowned = True
                if not item.users:
                    self._lose(item)

    def _lose(self, item: Owned) -> None:
        self.end(item)
        self._lost.put(item.owner, item.serial, self.clock() + TOMBSTONE_SECONDS)

    # Time

    def enter(self, serials: Iterable[int]) -> None:
        """Register a call that uses these items. They do not expire before `leave`."""
        with self.lock:
            now = self.clock()
            for serial in serials:
                if (item := self._items.get(serial)) is not None and (item.users or now < item.expires):
                    item.users += 1

    def leave(self, serials: Iterable[int], *, used: bool) -> None:
        """Unregister a call. With `used`, the time to live of its items restarts."""
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

    def sweep(self) -> None:
        """Free expired items and forget old tombstones, if a check is due; then set when the next one is due."""
        with self.lock:
            if (now := self.clock()) < self.due:
                return
            for item in [item for item in self._items.values() if not item.users and now >= item.expires]:
                self._lose(item)
            self._lost.drop_while(lambda until: until <= now)
            self.due = now + SWEEP_SECONDS if self._items else now + LOST_SECONDS if self._lost else math.inf
