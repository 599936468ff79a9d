"""The objects that a fault uses: the service, its callers, and the times when connections may break."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from chaos.callers import Outcome
from chaos.load import Load
from chaos.service import Service

GRACE = 3.0  # seconds after a fault in which connections of callers may still break


@dataclass
class World:
    service: Service
    load: Load
    rng: np.random.Generator
    _broken: list[tuple[float, float]] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def breaking(self) -> Iterator[None]:
        """Allow connections of callers to break in this context, and for GRACE after it."""
        began = time.monotonic()
        self._broken.append((began, float("inf")))
        try:
            yield
        finally:
            self._broken.remove((began, float("inf")))
            self._broken.append((began, time.monotonic() + GRACE))

    def may_break(self, outcome: Outcome) -> bool:
        """Return whether the connection of an outcome was open at a time when connections may break."""
        first = outcome.began if outcome.opened is None else outcome.opened
        return any(first <= end and outcome.ended >= began for began, end in self._broken)

    def wait(self, low: float, high: float) -> None:
        """Sleep for a random time between `low` and `high` seconds."""
        time.sleep(float(self.rng.uniform(low, high)))

    def choose(self, pids: list[int]) -> int:
        return pids[int(self.rng.integers(len(pids)))]

    def pids(self, role: str) -> list[int]:
        return [process.pid for process in self.service.roles()[role]]

    def until(self, check: Callable[[], bool], bound: float, otherwise: str) -> float | None:
        """Return the seconds until `check()` is true. After `bound` seconds, record the violation `otherwise`."""
        began = time.monotonic()
        while not check():
            if time.monotonic() - began > bound:
                self.violations.append(f"{otherwise}, in {bound:g} s")
                return None
            time.sleep(0.01)
        return time.monotonic() - began
