"""How fast an engine answers, by which a request's head tells whether its answer would be in time."""

from __future__ import annotations

WINDOW = 0.5  # seconds of work without a pause that tell a speed; a service that is not full has shorter ones


class Pace:
    """How fast an engine is: `rate` is in predicted seconds answered a second while there is work; 0 at first.

    Half of it comes from the last window.
    """

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
