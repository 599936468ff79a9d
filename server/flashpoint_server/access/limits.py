"""The limits of API keys: token buckets and a count of admitted requests, in memory that all HTTP processes share.

A bucket is one number: the time at which it will be full again. A request adds its cost divided by the key's rate to
this time. The key is refused while this time is further in the future than BURST. So a request of any cost is admitted
while the bucket is not empty, and the next requests are refused until it has refilled. A bucket that had to contain the
whole cost of a request would refuse tensors larger than its capacity for ever.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from typing import Literal

from flashpoint_server.config.key_file import KeyEntry
from flashpoint_server.ipc.counts import Table, WorkerGroup
from flashpoint_server.refusal import Refusal

BURST = 1.0  # seconds: the capacity of a bucket is its rate times this
PATIENCE = 0.01  # maximum seconds to wait for the lock; other processes hold it for microseconds, unless stopped

What = Literal["requests", "bytes", "flops", "seconds"]
_PLACES: dict[What, int] = {"requests": 0, "bytes": 1, "flops": 2, "seconds": 3}
_WORDS: dict[What, str] = {
    "requests": "requests",
    "bytes": "bytes",
    "flops": "floating-point operations",
    "seconds": "seconds of computing",
}


class Spent:
    """The usage of one key: its buckets, which one process writes at a time, and a request count for each process."""

    def __init__(self, name: str, shared: WorkerGroup) -> None:
        self._table = Table(name, shared, 1)
        self.numbers = self._table.numbers
        self.inside = self._table.rows[0]
        self.column = shared.process

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the buckets.

        Raises Refusal 429 after PATIENCE, because a stopped process may hold the lock for long.
        """
        end = time.monotonic() + PATIENCE
        with contextlib.ExitStack() as held:
            while True:
                try:
                    held.enter_context(self._table.memory.locked(self._table.offset, 1))
                    break
                except BlockingIOError:
                    if time.monotonic() > end:
                        raise _refused("the usage of the API key cannot be read at the moment: retry", 1) from None
                    os.sched_yield()
            yield


class Quota:
    """The limits of one key, `entry`, compared with its usage, `spent`."""

    def __init__(self, entry: KeyEntry, spent: Spent) -> None:
        rates: dict[What, float | None] = {
            "requests": entry.requests_per_second,
            "bytes": entry.bytes_per_second,
            "flops": entry.flops_per_second,
            "seconds": entry.compute_seconds_per_second,
        }
        self._rates = {what: rate for what, rate in rates.items() if rate is not None}
        self._concurrent = entry.concurrent
        self.cache_bytes, self.cache_count = entry.cache_bytes, entry.cache_count
        self._spent = spent

    def take(self, what: What, cost: float) -> None:
        """Take `cost` from the bucket. Raises Refusal 429 if the bucket is empty."""
        if what in self._rates:
            with self._spent.locked():
                self._take(what, cost)

    def give_back(self, what: What, amount: float) -> None:
        """Refund `amount`, which was charged in excess of the true cost."""
        if (rate := self._rates.get(what)) is not None and amount > 0:
            with self._spent.locked():
                self._spent.numbers[_PLACES[what]] -= amount / rate

    def owe(self, what: What, amount: float) -> None:
        """Charge the true cost minus the predicted cost after a request has run; a negative `amount` is a refund.

        This raises nothing, even if the bucket becomes empty: the next requests are then refused.
        """
        if (rate := self._rates.get(what)) is not None and amount:
            with self._spent.locked():
                place = _PLACES[what]
                self._spent.numbers[place] = max(self._spent.numbers[place], time.monotonic()) + amount / rate

    def enter(self, nbytes: int) -> None:
        """Count a compute request with `nbytes` of tensors, until `leave`. Raises Refusal 429."""
        spent = self._spent
        with spent.locked():
            if self._concurrent is not None and sum(spent.inside) >= self._concurrent:
                raise _refused(f"the API key may have {self._concurrent} requests at the same time", 1)
            self._take("bytes", nbytes)
            spent.inside[spent.column] += 1

    def leave(self) -> None:
        self._spent.inside[self._spent.column] -= 1

    def _take(self, what: What, cost: float) -> None:
        if (rate := self._rates.get(what)) is None:
            return
        numbers, place, now = self._spent.numbers, _PLACES[what], time.monotonic()
        full = max(numbers[place], now)
        if (wait := full - now - BURST) >= 0:
            raise _refused(f"the API key is over its limit of {rate:g} {_WORDS[what]} a second", wait)
        numbers[place] = full + cost / rate


def _refused(why: str, seconds: float) -> Refusal:
    return Refusal("key_limit", why, headers={"Retry-After": str(max(1, math.ceil(seconds)))})
