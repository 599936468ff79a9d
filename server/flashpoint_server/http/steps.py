"""The CPU time of each step of an HTTP process's event loop, for the tests. A long step delays every other request.

A step is one callback: a coroutine until its next `await`, or a protocol's method. If the variable VARIABLE names a
file, the process appends a line for each step over NOTED seconds, as JSON. It counts the CPU time of the loop's thread,
without garbage collection, and nothing before the server listens. Without the variable nothing is measured.
"""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections.abc import Callable
from functools import partialmethod
from typing import Any

from flashpoint_server.http.loop import Loop

VARIABLE = "_FLASHPOINT_STEPS"
NOTED = 0.005
_EVENTS = (
    "connection_made", "connection_lost", "data_received", "buffer_updated", "eof_received", "resume_writing",
)  # fmt: skip


class _Steps:
    """Measures steps. `listening` is set when the server listens."""

    def __init__(self) -> None:
        self.listening = False
        self._thread = threading.get_ident()
        self._file = os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._inside = False
        self._garbage = 0.0  # CPU seconds of all garbage collections in the loop's thread
        self._collecting = 0.0  # when the present one began
        gc.callbacks.append(self._collected)

    def _collected(self, phase: str, _: object) -> None:
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._collecting = time.thread_time()
        else:
            self._garbage += time.thread_time() - self._collecting

    def run(self, callback: Callable[..., Any], *args: Any) -> Any:
        """Return `callback(*args)`, and note it if it was long. Steps inside a step count as one."""
        if self._inside or threading.get_ident() != self._thread:
            return callback(*args)
        self._inside, began = True, time.thread_time() - self._garbage
        try:
            return callback(*args)
        finally:
            self._inside = False
            seconds = time.thread_time() - self._garbage - began
            if seconds > NOTED and self.listening:
                line = {
                    "seconds": round(seconds, 6),
                    "step": _name(callback),
                    "at": time.monotonic(),
                    "pid": os.getpid(),
                }
                os.write(self._file, json.dumps(line).encode() + b"\n")


# The methods that take a callback, and how many arguments are before it.
_SCHEDULING = {
    "call_soon": 0, "call_soon_threadsafe": 0, "call_later": 1, "call_at": 1, "add_reader": 1, "add_writer": 1,
}  # fmt: skip
_measuring: list[_Steps] = []  # the one object, if steps are measured


def loop_class(*protocols: type) -> type[Loop]:
    """Return the class of the event loop. If steps are measured, those of the methods of `protocols` are, too."""
    if not os.environ.get(VARIABLE):
        return Loop
    _measuring.append(steps := _Steps())
    for protocol in protocols:
        for name in _EVENTS:
            if (method := getattr(protocol, name, None)) is not None:
                setattr(protocol, name, partialmethod(_method, steps, method))
    methods = {name: partialmethod(_schedule, steps, getattr(Loop, name), n) for name, n in _SCHEDULING.items()}
    return type("Watched", (Loop,), methods)


def _method(self: Any, steps: _Steps, method: Callable[..., Any], *args: Any) -> Any:
    return steps.run(method, self, *args)


def _schedule(self: Any, steps: _Steps, plain: Callable[..., Any], before: int, *args: Any, **how: Any) -> Any:
    return plain(self, *args[:before], steps.run, *args[before:], **how)


def listening() -> None:
    """Begin to note steps."""
    for steps in _measuring:
        steps.listening = True


def _name(callback: Any) -> str:
    """Return the name of a callback; for a step of a task, that of its coroutine."""
    owner = getattr(callback, "__self__", None)
    if (coroutine := getattr(owner, "get_coro", None)) is not None:
        callback = coroutine()
    return getattr(callback, "__qualname__", repr(callback))
