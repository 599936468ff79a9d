"""Forwards that a server has saved: the call that frees one, and leases, which free theirs without waiting."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from typing import Any, Protocol

from flashpoint._calls import DEFAULT, Call, SavedAttention, named

SETTLING = 2.0  # seconds that `Client.close` waits for forwards to be freed
LONGEST = 10.0  # seconds that a lease's end may take; the forward's time to live ends it else


class _Client(Protocol):
    def _call(self, call: Call, /) -> Any: ...


def delete(saved: SavedAttention | str, timeout: Any = DEFAULT) -> Call:
    """Return the call that frees a saved forward. Raises InvalidInputError."""
    id_, affinity = named(saved)
    return Call("DELETE", f"/saved/{id_}", "", {}, (), timeout, lambda _: None, success=204, affinity=affinity)


class Lease:
    """A saved forward that is freed when the lease is dropped, or released. Neither waits, nor raises."""

    __slots__ = ("_client", "_process", "saved")

    def __init__(self, client: _Client, saved: SavedAttention | str) -> None:
        self._client = client
        self._process = os.getpid()
        self.saved: SavedAttention | str | None = saved
        _start()  # here: a destructor, which may run anywhere, cannot start a thread

    def release(self) -> None:
        """Have the forward freed, by a thread of its own. A forked process leaves that to its parent."""
        if (saved := self.saved) is not None and self._process == os.getpid():
            self.saved = None
            _ended.put((self._client, saved))

    def __del__(self) -> None:
        self.release()


# Forwards to be freed, and events to be set when those before them have been. A destructor may call its `put`.
_ended: queue.SimpleQueue[tuple[_Client, SavedAttention | str] | threading.Event] = queue.SimpleQueue()
_thread: threading.Thread | None = None


def _start() -> None:
    """Start the thread that frees, where there is none: before the first lease, and after a fork."""
    global _thread
    if _thread is None or not _thread.is_alive():
        _thread = threading.Thread(target=_free, name="flashpoint-leases", daemon=True)
        _thread.start()


def _free() -> None:
    while True:
        ended = _ended.get()
        if isinstance(ended, threading.Event):
            ended.set()
            continue
        client, saved = ended
        with contextlib.suppress(Exception):  # its time to live frees it
            client._call(delete(saved, LONGEST))
        del client, saved, ended


def settle(seconds: float = SETTLING) -> None:
    """Wait until the forwards that have been released are freed, at most so many seconds."""
    if _thread is not None and _thread.is_alive() and _thread is not threading.current_thread():
        _ended.put(done := threading.Event())
        done.wait(seconds)
