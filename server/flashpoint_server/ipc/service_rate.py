"""The speed of an engine, from which admission predicts whether a request can meet its deadline."""

from __future__ import annotations

WINDOW = 0.5  # seconds of uninterrupted work for one measurement; a service below its capacity has shorter periods


class ServiceRate:
    """The speed of an engine. `rate`: predicted seconds answered in one second under load; 0 means unknown.

    Each measurement counts half, and all earlier ones together the other half.
    """

    def __init__(self) -> None:
        self.rate = 0.0
        self._since = 0.0
        self._done = 0.0

    def begin(self, now: float) -> None:
        """Start a measurement, because there is work again. `now` is in `time.monotonic` seconds."""
        self._since, self._done = now, 0.0

    def did(self, seconds: float, now: float) -> None:
        """Record that a request of `seconds` predicted seconds was answered."""
        self._done += seconds
        if (passed := now - self._since) >= WINDOW:
            rate = self._done / passed
            self.rate = (self.rate + rate) / 2 if self.rate else rate
            self.begin(now)
