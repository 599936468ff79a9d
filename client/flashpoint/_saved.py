"""Saved forwards: the call that frees one, and leases, which free a forward in a background thread."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from typing import Any, Protocol

from flashpoint._calls import DEFAULT, Call, SavedAttention, named

SETTLING = 2.0  # seconds that `Client.close` waits for forwards to be freed
LONGEST = 10.0  # timeout in seconds of the call that frees a forward; if it fails, the forward's time to live ends it


class _Client(Protocol):
    def _call(self, call: Call, /) -> Any: ...


def delete(saved: SavedAttention | str, timeout: Any = DEFAULT) -> Call:
    """Return the call that frees a saved forward. Raises InvalidInputError."""
    id_, affinity = named(saved)
    return Call("DELETE", f"/saved/{id_}", "", {}, (), timeout, lambda _: None, success=204, affinity=affinity)


class Lease:
    """Frees a saved forward when the lease is released or garbage-collected. It does not wait and does not raise."""

    __slots__ = ("_client", "_process", "saved")

    def __init__(self, client: _Client, saved: SavedAttention | str) -> None:
        self._client = client
        self._process = os.getpid()
        self.saved: SavedAttention | str | None = saved
        _start()  # not in the destructor: it may run at any point, and cannot start a thread

    def release(self) -> None:
        """Queue the forward for the thread that frees. In a forked process do nothing: the parent frees it."""
        if (saved := self.saved) is not None and self._process == os.getpid():
            self.saved = None
            _ended.put((self._client, saved))

    def __del__(self) -> None:
        self.release()


# Forwards to free, and events to set once all forwards before them are freed. Destructors may call SimpleQueue.put.
_ended: queue.SimpleQueue[tuple[_Client, SavedAttention | str] | threading.Event] = queue.SimpleQueue()
_thread: threading.Thread | None = None


def _start() -> None:
    """Start the thread that frees, if it does not run: before the first lease, and after a fork."""
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
        with contextlib.suppress(Exception):  # the forward's time to live frees it
            client._call(delete(saved, LONGEST))
        del client, saved, ended


def settle(seconds: float = SETTLING) -> None:
    """Wait at most `seconds` until all released forwards are freed."""
    if _thread is not None and _thread.is_alive() and _thread is not threading.current_thread():
        _ended.put(done := threading.Event())
        done.wait(seconds)
