"""The order of calls on caches: on one cache one at a time, in the order in which the engine received them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Uses(Protocol):
    """A call; `caches` are the serials of those that it uses, each once."""

    @property
    def caches(self) -> tuple[int, ...]: ...


U = TypeVar("U", bound=Uses)


class Turns(Generic[U]):
    """A line for each cache. A call's turn has come when it is the first in all lines that it stands in.

    A call joins all its lines at once, so that no two calls wait for each other.
    """

    def __init__(self) -> None:
        self._lines: dict[int, deque[U]] = {}
        self._waiting: dict[U, None] = {}

    def join(self, call: U) -> bool:
        """Return whether its turn has come at once."""
        for serial in call.caches:
            self._lines.setdefault(serial, deque()).append(call)
        if first := self._first(call):
            return first
        self._waiting[call] = None
        return False

    def leave(self, call: U) -> list[U]:
        """The call has ended, or is not wanted any more. Return those whose turn has come."""
        self._waiting.pop(call, None)
        behind: dict[U, None] = {}
        for serial in call.caches:
            line = self._lines.get(serial)
            if line is None or call not in line:
                continue
            line.remove(call)
            if line:
                behind[line[0]] = None
            else:
                del self._lines[serial]
        ready = [other for other in behind if other in self._waiting and self._first(other)]
        for other in ready:
            del self._waiting[other]
        return ready

    def waiting(self, unwanted: Callable[[U], bool]) -> list[U]:
        """Return the calls whose turn has not come, of those that are `unwanted`."""
        return [call for call in self._waiting if unwanted(call)]

    def _first(self, call: U) -> bool:
        return all(self._lines[serial][0] is call for serial in call.caches)
