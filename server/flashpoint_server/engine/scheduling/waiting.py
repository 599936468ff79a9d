"""The engine's queue: which requests run next, and which of them share a launch.

Requests run in the order of their rank, smallest first. A rank is a time: the arrival, plus thirty times the predicted
seconds that remain, minus a bonus for priority. So short requests overtake long ones, an almost finished request is not
overtaken by a new one, and every request runs eventually. Requests with the same launch key share a launch, up to a
budget of FLOPs and bytes; their lengths, batch sizes and head counts may differ.

A batch closes when its budget is used up, or when its oldest request has waited for `delay`; with a delay of 0, at
once.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, Protocol, TypeVar


class Waits(Protocol):
    """A waiting request. `key` is None if it can share no launch; `nbytes` is the size of its inputs and outputs."""

    @property
    def rank(self) -> float: ...
    @property
    def arrived(self) -> float: ...
    @property
    def key(self) -> Hashable | None: ...
    @property
    def flops(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


W = TypeVar("W", bound=Waits)
_FLOPS, _NBYTES = attrgetter("flops"), attrgetter("nbytes")


@dataclass(frozen=True)
class Budget:
    """The limits of one launch. A request over them runs alone.

    `delay` is how long a batch waits for more requests, in seconds.
    """

    flops: int
    nbytes: int
    delay: float

    def fill(self, batch: Sequence[Waits]) -> float:
        """Return the fraction of the budget that `batch` uses, at most 1."""
        flops: int = sum(map(_FLOPS, batch))
        nbytes: int = sum(map(_NBYTES, batch))
        return min(max(flops / self.flops, nbytes / self.nbytes), 1.0)


class Waiting(Generic[W]):
    """The queue. Times are in `time.monotonic` seconds. `items` are in the order of their ranks."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.items: list[W] = []

    def put(self, item: W) -> None:
        bisect.insort(self.items, item, key=attrgetter("rank"))  # behind items of equal rank

    def remove(self, unwanted: Callable[[W], bool]) -> list[W]:
        """Remove and return the items that are `unwanted`."""
        removed = [item for item in self.items if unwanted(item)]
        if removed:
            self.items = [item for item in self.items if item not in removed]
        return removed

    def take(self, now: float, may: Callable[[W], bool] = lambda _: True) -> list[W]:
        """Remove and return the items to run next: one item, or the requests of one launch; empty if none may start.

        `may`: whether an item, or the launch that it is in, may start.
        """
        passed: set[Hashable] = set()
        for item in self.items:
            if item.key in passed or not may(item):
                continue
            if item.key is None:
                self.items.remove(item)
                return [item]
            passed.add(item.key)
            batch, full = self._batch(item.key)
            if full or now >= self._closes(batch):
                self.items = [other for other in self.items if other not in batch]
                return batch
        return []

    def closes(self) -> float:
        """Return the time at which the next waiting batch closes; inf if there is none."""
        keys = {item.key for item in self.items if item.key is not None}
        return min((self._closes(self._batch(key)[0]) for key in keys), default=math.inf)

    def _closes(self, batch: Iterable[W]) -> float:
        return min(item.arrived for item in batch) + self.budget.delay

    def _batch(self, key: Hashable) -> tuple[list[W], bool]:
        """Return the first items of this key that fit into a launch, and whether the launch is full."""
        batch: list[W] = []
        flops = nbytes = 0
        for item in self.items:
            if item.key != key:
                continue
            flops, nbytes = flops + item.flops, nbytes + item.nbytes
            if batch and (flops > self.budget.flops or nbytes > self.budget.nbytes):
                return batch, True
            batch.append(item)
        return batch, flops >= self.budget.flops or nbytes >= self.budget.nbytes
