"""A simulated clock for tests of `timing.clock`."""


class Time:
    """A replacement of `time` in the module `clock`: the time advances by `tick_ms` at each reading."""

    def __init__(self) -> None:
        self.now_ms = self.tick_ms = 0.0

    def seconds(self) -> float:
        self.now_ms += self.tick_ms
        return self.now_ms / 1e3
