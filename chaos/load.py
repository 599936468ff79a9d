"""The callers that run while faults are injected: one of each kind."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import numpy as np

from chaos import callers, holders, sdk_holder
from chaos.callers import AFTER_NOTHING, HANG, Book, Caller
from chaos.service import Service

KINDS: dict[str, type[Caller]] = {
    "plain": callers.Plain, "gradient": callers.Gradient, "json": callers.Numbers, "oip": callers.Inference,
    "deadline": callers.Deadline, "launches": callers.Launches, "large": callers.Large, "sdk": callers.Sdk,
    "sdk gradient": callers.SdkGradient, "asyncio": callers.Asyncio,
    "caches": holders.Holder, "more caches": holders.Holder, "other caches": holders.OtherHolder,
    "short caches": holders.ShortHolder, "sdk caches": sdk_holder.SdkHolder,
}  # fmt: skip


class Load:
    """One caller of each kind. `patience`: seconds after which a call without an answer counts as `hung`."""

    def __init__(self, service: Service, seed: int) -> None:
        self.service, self.port, self.book, self.going = service, service.port, Book(), threading.Event()
        self.url, self.patience = f"http://127.0.0.1:{self.port}", HANG
        self.callers = [
            kind(name, self, np.random.default_rng((seed, number))) for number, (name, kind) in enumerate(KINDS.items())
        ]

    def start(self) -> None:
        for caller in self.callers:
            caller.start()

    def go(self) -> None:
        self.going.set()

    def pause(self) -> list[str]:
        """Wait until every call has ended and no connection is open; return the callers whose calls have not ended."""
        self.going.clear()
        end = time.monotonic() + self.patience + HANG
        return [caller.name for caller in self.callers if not caller.idle.wait(max(end - time.monotonic(), 0))]

    def probe(self, attempts: Callable[[], bool]) -> list[str]:
        """Call `probe` of each caller, while the load is paused. Return the failures, each with the caller's name.

        A probe that is refused is repeated as long as `attempts()` is true.
        """
        failed = []
        for caller in self.callers:
            while (kind := caller.probe()) == "refused" and attempts():
                time.sleep(AFTER_NOTHING)
            caller.rest()
            if kind != "right":
                failed.append(f"{caller.name}: {kind} {self.book.outcomes[-1].detail}")
        return failed

    def stop(self) -> None:
        for caller in self.callers:
            caller.over.set()
        self.going.set()
        for caller in self.callers:
            with contextlib.suppress(RuntimeError):
                caller.join(HANG)
