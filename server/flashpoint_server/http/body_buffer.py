"""Memory that a body fills in order: the places of its tensors."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

Part = bytes | memoryview  # a part of an answer's body

MOST_AT_ONCE = 1 << 20  # maximum bytes of one read, so that other connections get their turn
ENCRYPTED_AT_ONCE = 1 << 20  # bytes that take half a millisecond, in which all other connections wait
_SCRATCH = memoryview(bytearray(MOST_AT_ONCE))  # target of unwanted bytes; nothing reads it


class BodyBuffer:
    """See the module. `filled_bytes` counts bytes; `filled_last` is when the last ones arrived (`time.monotonic`)."""

    def __init__(self, places: Iterable[memoryview]) -> None:
        self._places = [place for place in places if len(place)]
        self._places.reverse()
        self._unwanted = 0  # bytes to discard
        self.filled_bytes = 0
        self.filled_last = 0.0

    @property
    def full(self) -> bool:
        return not self._places and not self._unwanted

    @property
    def left(self) -> int:
        """The number of bytes that are missing."""
        return sum(map(len, self._places)) + self._unwanted

    def next(self) -> memoryview:
        return self._places[-1][:MOST_AT_ONCE] if self._places else _SCRATCH[: self._unwanted]

    def filled(self, n: int) -> None:
        """Record that `n` bytes of `next` have been written."""
        self.filled_bytes += n
        self.filled_last = time.monotonic()
        if not self._places:
            self._unwanted -= n
            return
        rest = self._places.pop()[n:]
        if len(rest):
            self._places.append(rest)

    def copy(self, data: memoryview) -> None:
        while len(data):
            place = self._places[-1]
            n = min(len(place), len(data))
            place[:n] = data[:n]
            self.filled(n)
            data = data[n:]

    def discard(self) -> None:
        """Release the memory. The missing bytes are then discarded on arrival."""
        self._unwanted, self._places = self.left, []


def pieces(parts: list[Part]) -> Iterator[list[Part]]:
    """Yield `parts` in pieces, because TLS encrypts everything that it is given at once, into new memory."""
    if sum(map(len, parts)) <= ENCRYPTED_AT_ONCE:
        yield parts
        return
    for part in parts:
        for start in range(0, len(part), ENCRYPTED_AT_ONCE):
            yield [part[start : start + ENCRYPTED_AT_ONCE]]
