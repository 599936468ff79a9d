"""A stand-in for the real time in `timing.clock`."""


class Time:
    """A stand-in for the real time in the module `clock`: it advances by `tick_ms` at each reading."""

    def __init__(self) -> None:
        self.now_ms = self.tick_ms = 0.0

    def seconds(self) -> float:
        self.now_ms += self.tick_ms
        return self.now_ms / 1e3
