"""How fast an engine was seen to be: what tells from a request's head whether it would be answered in time."""

from __future__ import annotations

WINDOW = 0.5  # seconds without a pause that tell a speed; shorter ones, of a service that is not full, tell none


class Pace:
    """Predicted seconds answered a second while there is work, half of it from the last window; 0 at first."""

    def __init__(self) -> None:
        self.rate = 0.0
        self._since = 0.0
        self._done = 0.0

    def begin(self, now: float) -> None:
        """There is work again; `now` in `time.monotonic` seconds."""
        self._since, self._done = now, 0.0

    def did(self, seconds: float, now: float) -> None:
        """A request of so many predicted seconds was answered."""
        self._done += seconds
        if (passed := now - self._since) >= WINDOW:
            rate = self._done / passed
            self.rate = (self.rate + rate) / 2 if self.rate else rate
            self.begin(now)
