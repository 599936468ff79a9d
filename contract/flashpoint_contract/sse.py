"""Parse server-sent events while their bytes arrive (WHATWG HTML, 9.2.6: interpreting an event stream). No I/O.

Only the field `data` is read. The field `id` is not needed, because the data of each event contains its number.
"""

from __future__ import annotations

MEDIA_TYPE = "text/event-stream"
FRAME_LIMIT = 1 << 20  # largest event in bytes; one row of a benchmark has about 1 KiB


class Frames:
    """A parser: `feed` takes pieces of any size, and returns the data of each event that is complete."""

    def __init__(self) -> None:
        self._rest = b""
        self._after_cr = False
        self._data: list[str] = []

    def feed(self, piece: bytes) -> list[str]:
        """Return the data of each event that `piece` completes.

        Raises ValueError for text that is not UTF-8, and for an event over `FRAME_LIMIT`.
        """
        if self._after_cr:  # a line may end with CR LF, and the two may arrive in different pieces
            piece = piece.removeprefix(b"\n")
        self._after_cr = piece.endswith(b"\r")
        *lines, self._rest = (self._rest + piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")).split(b"\n")
        events = [data for line in lines if (data := self._line(line.decode("utf-8"))) is not None]
        if len(self._rest) + sum(map(len, self._data)) > FRAME_LIMIT:
            raise ValueError(f"an event is over {FRAME_LIMIT} bytes")
        return events

    def _line(self, line: str) -> str | None:
        if line:
            name, _, value = line.partition(":")
            if name == "data":
                self._data.append(value.removeprefix(" "))
            return None
        data, self._data = self._data, []
        return "\n".join(data) if data else None
