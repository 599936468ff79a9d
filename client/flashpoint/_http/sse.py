"""Server-sent events as their bytes arrive (WHATWG HTML, 9.2.6: interpreting an event stream). No I/O.

Events carry their own number in their data, so that of a frame's fields `data` alone is read.
"""

from __future__ import annotations

MEDIA_TYPE = "text/event-stream"
FRAME_LIMIT = 1 << 20  # bytes of one event; a benchmark's row has 1 KiB


class Frames:
    """`feed` bytes, however they were cut, and get the data of each event that is complete."""

    def __init__(self) -> None:
        self._rest = b""
        self._after_cr = False
        self._data: list[str] = []

    def feed(self, piece: bytes) -> list[str]:
        """Raises ValueError for text that is not UTF-8, and for an event over `FRAME_LIMIT`."""
        if self._after_cr:  # a line ends with CR, LF or both, which may come apart
            piece = piece.removeprefix(b"\n")
        self._after_cr = piece.endswith(b"\r")
        *lines, self._rest = (self._rest + piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")).split(b"\n")
        found = [data for line in lines if (data := self._line(line.decode("utf-8"))) is not None]
        if len(self._rest) + sum(map(len, self._data)) > FRAME_LIMIT:
            raise ValueError(f"an event is over {FRAME_LIMIT} bytes")
        return found

    def _line(self, line: str) -> str | None:
        if line:
            name, _, value = line.partition(":")
            if name == "data":
                self._data.append(value.removeprefix(" "))
            return None
        data, self._data = self._data, []
        return "\n".join(data) if data else None
