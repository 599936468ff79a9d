"""Assign requests (`Question`) to servers, and assign them again if a server fails. This module does no I/O.

A server gets one question at a time: the one with the most (query, key) pairs that is not assigned, but questions that
failed come first. If a server is full, stopping or gone, its question goes to another server, and the failed server
gets its next question after a delay. If a server has not answered after half of the time that was left until the
deadline, an idle server gets the same question; the first answer counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashpoint._http.exchange import pause
from flashpoint._shards.merge import Question
from flashpoint.errors import ConnectionFailedError, DeadlineExceededError, FlashpointError, OverloadedError

RETRIED = (OverloadedError, ConnectionFailedError)


@dataclass
class Item:
    """A question, the servers that have it or failed to answer it, and its answer."""

    question: Question
    failed: set[int] = field(default_factory=set)  # servers that failed to answer; cleared when all have failed
    serving: set[int] = field(default_factory=set)  # servers that compute it now
    late: float = math.inf  # time of `time.monotonic` from which another server may get the same question
    failures: int = 0  # on all servers together
    server: int = -1  # the first that answered
    answer: Any = None


class Work:
    """Assigns `questions` to `servers` servers, until all are answered or `deadline` (a time of `time.monotonic`, or
    None) passes.
    """

    def __init__(self, questions: Sequence[Question], servers: int, retries: int, deadline: float | None) -> None:
        self.items = [Item(question) for question in questions]
        self._open = len(self.items)
        self._waiting = sorted(self.items, key=lambda item: -item.question.shard.pairs)
        self._servers = servers
        self._most = (retries + 1) * servers  # failures after which a question is given up
        self._in_a_row = [0] * servers
        self._deadline = deadline
        self._last: Exception | None = None

    @property
    def over(self) -> bool:
        return not self._open

    def take(self, server: int) -> Item | None:
        """Return the next item for `server`, or None if there is none."""
        item = next((item for item in self._waiting if server not in item.failed), None)
        if item is not None:
            self._waiting.remove(item)
        else:
            item = next((item for item in self._elsewhere(server) if item.late <= time.monotonic()), None)
        if item is not None:
            item.serving.add(server)
            if (left := self.timeout()) is not None:
                item.late = time.monotonic() + left / 2
        return item

    def patience(self, server: int) -> float | None:
        """Return how many seconds `server` should wait before it calls `take` again: until a question of another server
        is late, or until the deadline. None without a deadline.
        """
        left = self.timeout()
        if left is None:
            return None
        late = min((item.late for item in self._elsewhere(server)), default=math.inf)
        return min(left, max(0.0, late - time.monotonic()))

    def _elsewhere(self, server: int) -> Iterator[Item]:
        """Yield the unanswered items that other servers compute now, and `server` does not."""
        return (item for item in self.items if item.answer is None and item.serving and server not in item.serving)

    def timeout(self) -> float | None:
        """Return the seconds left for an attempt; None without a deadline. Raises DeadlineExceededError."""
        if self._deadline is None:
            return None
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceededError("the timeout passed before every shard was answered") from self._last
        return left

    def done(self, server: int, item: Item, answer: Any) -> None:
        self._in_a_row[server] = 0
        if item.answer is None:
            item.server, item.answer = server, answer
            self._open -= 1

    def failed(self, server: int, item: Item, error: FlashpointError) -> float:
        """Record a failure. Return the seconds to wait before `server` gets a question, at most until the deadline.

        If no other server has answered the question meanwhile, raises `error` if a retry cannot help or if the question
        has failed too often.
        """
        item.serving.remove(server)
        if item.answer is None:
            item.failures += 1
            self._last = error
            if item.failures >= self._most or not isinstance(error, RETRIED):
                raise error
            item.failed.add(server)
            if len(item.failed) == self._servers:
                item.failed.clear()
            if not item.serving:
                self._waiting.insert(0, item)
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        rest = pause(self._in_a_row[server], error.retry_after, left)
        self._in_a_row[server] += 1
        return rest if left is None else min(rest, left)
