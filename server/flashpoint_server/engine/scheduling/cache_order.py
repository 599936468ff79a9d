"""The order of calls on caches: one at a time for each cache, in the order of arrival at the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from flashpoint_server.engine.scheduling.engine_request import EngineRequest


class CacheQueue:
    """A queue (`line`) for each cache. A call may run when it is the first in the queues of all its caches.

    A call joins all its queues at once, so there can be no deadlock.
    """

    def __init__(self) -> None:
        self._lines: dict[int, deque[EngineRequest]] = {}
        self._waiting: dict[EngineRequest, None] = {}

    def join(self, call: EngineRequest) -> bool:
        """Add a call to the queues of its caches. Return whether it may run now."""
        for serial in call.caches:
            self._lines.setdefault(serial, deque()).append(call)
        if first := self._first(call):
            return first
        self._waiting[call] = None
        return False

    def leave(self, call: EngineRequest) -> list[EngineRequest]:
        """Remove a call that has ended or was cancelled. Return the calls that may run now."""
        self._waiting.pop(call, None)
        behind: dict[EngineRequest, None] = {}
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

    def waiting(self, unwanted: Callable[[EngineRequest], bool]) -> list[EngineRequest]:
        """Return the waiting calls for which `unwanted` returns true."""
        return [call for call in self._waiting if unwanted(call)]

    def _first(self, call: EngineRequest) -> bool:
        return all(self._lines[serial][0] is call for serial in call.caches)
