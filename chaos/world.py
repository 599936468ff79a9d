"""The parts that a fault controls: the service, its callers, and when connections may break."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from chaos.callers import Outcome
from chaos.load import Load
from chaos.service import Service

GRACE = 3.0  # seconds after which nobody has a connection any more that a fault broke


@dataclass
class World:
    service: Service
    load: Load
    rng: np.random.Generator
    _broken: list[tuple[float, float]] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def breaking(self) -> Iterator[None]:
        """Inside, and for a moment after, callers may lose their connections."""
        began = time.monotonic()
        self._broken.append((began, float("inf")))
        try:
            yield
        finally:
            self._broken.remove((began, float("inf")))
            self._broken.append((began, time.monotonic() + GRACE))

    def may_break(self, outcome: Outcome) -> bool:
        """Whether its connection was there, or was opened, while connections might break."""
        first = outcome.began if outcome.opened is None else outcome.opened
        return any(first <= end and outcome.ended >= began for began, end in self._broken)

    def wait(self, low: float, high: float) -> None:
        """A fault lasts for a while of its own choice."""
        time.sleep(float(self.rng.uniform(low, high)))

    def choose(self, several: list[int]) -> int:
        return several[int(self.rng.integers(len(several)))]

    def pids(self, role: str) -> list[int]:
        return [process.pid for process in self.service.roles()[role]]

    def until(self, found: Callable[[], bool], bound: float, otherwise: str) -> float | None:
        """Seconds until `found`; a violation, `otherwise`, where that takes longer than `bound`."""
        began = time.monotonic()
        while not found():
            if time.monotonic() - began > bound:
                self.violations.append(f"{otherwise}, in {bound:g} s")
                return None
            time.sleep(0.01)
        return time.monotonic() - began
