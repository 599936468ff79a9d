"""Measure the speed of an engine under load."""

# Minimum seconds of uninterrupted work for one measurement of an engine's speed. An engine that is not fully loaded has
# shorter periods of work, and is not measured.
WINDOW = 0.5


class ServiceRate:
    """The speed of an engine under load: it does `rate` seconds of predicted work per second; 0 means unknown.

    `rate` is a moving average: the newest measurement has the weight 1/2, and all earlier ones together have 1/2.
    """

    def __init__(self) -> None:
        self.rate = 0.0
        self._since = 0.0
        self._done = 0.0

    def begin(self, now: float) -> None:
        """Start a measurement, because there is work again. `now` is in `time.monotonic` seconds."""
        self._since, self._done = now, 0.0

    def did(self, seconds: float, now: float) -> None:
        """Record the answer to a request that was predicted to take `seconds`."""
        self._done += seconds
        if (passed := now - self._since) >= WINDOW:
            rate = self._done / passed
            self.rate = (self.rate + rate) / 2 if self.rate else rate
            self.begin(now)
