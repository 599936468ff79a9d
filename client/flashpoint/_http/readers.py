"""Parse an answer while its bytes arrive: a JSON object, or a message of tensors. This module does no I/O."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashpoint.errors import ProtocolError
from flashpoint_contract import wire

DOCUMENT_LIMIT = 8 << 20  # largest JSON answer in bytes; a benchmark's answer has about 1 KiB for each measured case


class Document:
    """Parses an answer that is a JSON object, such as an error."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._space = memoryview(bytearray(16 * 1024))

    def space(self) -> memoryview:
        return self._space

    def filled(self, count: int) -> None:
        self._text += self._space[: min(count, DOCUMENT_LIMIT - len(self._text))]

    def finish(self) -> dict[str, Any]:
        """Return the object; empty if the text is not a JSON object."""
        with contextlib.suppress(ValueError, RecursionError):
            document = json.loads(self._text)
            if isinstance(document, dict):
                return document
        return {}


class Message:
    """Parses a message: the length of its head, its head, and then all tensors in one buffer, without a copy."""

    def __init__(self, length: int | None) -> None:
        self._length = length
        self._start = bytearray(8)
        self._full = False
        self._head: wire.Head | None = None
        self._buffer: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._space = memoryview(self._start)

    def space(self) -> memoryview:
        return self._space

    def filled(self, count: int) -> None:
        if self._full:
            raise ProtocolError("the answer is longer than its head says")
        self._space = self._space[count:]
        if not self._space:
            self._space = self._next()

    def _next(self) -> memoryview:
        """Return the memory for the next bytes. After the last tensor it is one spare byte, to detect a longer body."""
        if self._head is not None:
            self._full = True
            return memoryview(bytearray(1))
        try:
            size = wire.head_size(bytes(self._start[:8]))
            if len(self._start) < size:
                self._start = self._start.ljust(size, b"\0")
                return memoryview(self._start)[8:]
            self._head = wire.parse_head(bytes(self._start))
        except wire.WireError as error:
            raise ProtocolError(f"the answer is no message: {error}") from error
        total = self._head.size + self._head.data_size
        if self._length not in (None, total):  # check the size in the head before memory of that size is allocated
            raise ProtocolError(f"the answer has {self._length} bytes where its head says {total}")
        self._buffer = np.empty(self._head.data_size, np.uint8)
        return self._buffer.data if self._head.data_size else self._next()

    def finish(self) -> tuple[wire.Head, NDArray[np.uint8]]:
        if self._head is None or not self._full:
            raise ProtocolError("the answer ended before all of it had come")
        return self._head, self._buffer
