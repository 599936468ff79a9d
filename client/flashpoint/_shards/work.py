"""Questions handed to servers: who asks what next, and what becomes of a question that a server failed. No I/O.

A server is given the longest question that nobody has, one at a time, so that faster servers answer more. A question
whose server was full, stopping, or gone goes to another; a server that failed rests before it is given the next. One
that has said nothing for half of the time that it had is left with its question, which an idle server is asked as well:
the first answer counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashpoint._http.exchange import backoff
from flashpoint._shards.merge import Question
from flashpoint.errors import ConnectionFailedError, DeadlineExceededError, FlashpointError, OverloadedError

RETRIED = (OverloadedError, ConnectionFailedError)


@dataclass
class Item:
    """A question, the servers that failed it since all had, those that have it, and at last what one answered.

    `late` is the time from which another may be asked as well, of `time.monotonic`.
    """

    question: Question
    failed: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)
    late: float = math.inf
    failures: int = 0
    server: int = -1
    answer: Any = None


class Work:
    """One round of questions over `servers` servers, before `deadline` (of `time.monotonic`, or None).

    A question may fail `retries` times at every server.
    """

    def __init__(self, questions: Sequence[Question], servers: int, retries: int, deadline: float | None) -> None:
        self.items = [Item(question) for question in questions]
        self._open = len(self.items)
        self._waiting = sorted(self.items, key=lambda item: -item.question.shard.pairs)
        self._servers = servers
        self._most = (retries + 1) * servers
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
            item.asked.add(server)
            if (left := self.timeout()) is not None:
                item.late = time.monotonic() + left / 2
        return item

    def patience(self, server: int) -> float | None:
        """Seconds after which there may be something for `server`, though nothing changes. Raises as `timeout`."""
        left = self.timeout()
        if left is None:
            return None
        late = min((item.late for item in self._elsewhere(server)), default=math.inf)
        return min(left, max(0.0, late - time.monotonic()))

    def _elsewhere(self, server: int) -> Iterator[Item]:
        """Yield the unanswered items that other servers were asked and this one was not."""
        return (item for item in self.items if item.answer is None and item.asked and server not in item.asked)

    def timeout(self) -> float | None:
        """Seconds that are left for an attempt. Raises DeadlineExceededError."""
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
        """Seconds that `server` is to rest, at most to the deadline.

        Raises `error` where no other server would mend it, or the question has failed as often as it may: not where
        another has answered meanwhile.
        """
        item.asked.remove(server)
        if item.answer is None:
            item.failures += 1
            self._last = error
            if item.failures >= self._most or not isinstance(error, RETRIED):
                raise error
            item.failed.add(server)
            if len(item.failed) == self._servers:
                item.failed.clear()
            if not item.asked:
                self._waiting.insert(0, item)
        rest = max(backoff(self._in_a_row[server]), error.retry_after or 0.0)
        self._in_a_row[server] += 1
        return rest if self._deadline is None else min(rest, max(0.0, self._deadline - time.monotonic()))
