"""A bounded store of recent values by owner. An owner with many values does not displace those of other owners."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class OwnerLru(Generic[V]):
    """Values by owner and key.

    While their total weight exceeds `limit`, `put` removes the oldest value of the owner whose values weigh most.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._owners: dict[str, OrderedDict[Hashable, tuple[V, int]]] = {}
        self._weights: Counter[str] = Counter()
        self._total = 0

    def __bool__(self) -> bool:
        return bool(self._owners)

    def get(self, owner: str, key: Hashable) -> V | None:
        """Return the value of a key; None if it has no value."""
        values = self._owners.get(owner)
        return values[key][0] if values is not None and key in values else None

    def put(self, owner: str, key: Hashable, value: V, weight: int = 1) -> None:
        """Store a value under a key. A key that has a value keeps it."""
        values = self._owners.setdefault(owner, OrderedDict())
        if key in values:
            return
        values[key] = value, weight
        self._weights[owner] += weight
        self._total += weight
        while self._total > self._limit:
            self._drop_oldest(self._weights.most_common(1)[0][0])

    def drop_while(self, old: Callable[[V], bool]) -> None:
        """For each owner, remove its oldest value as long as `old(value)` is true."""
        for owner in list(self._owners):
            while (values := self._owners.get(owner)) and old(next(iter(values.values()))[0]):
                self._drop_oldest(owner)

    def _drop_oldest(self, owner: str) -> None:
        _, (_, weight) = self._owners[owner].popitem(last=False)
        self._weights[owner] -= weight
        self._total -= weight
        if not self._owners[owner]:
            del self._owners[owner], self._weights[owner]
