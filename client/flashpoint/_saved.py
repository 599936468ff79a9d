"""Forwards that a server has saved: the call that frees one, and leases, which free theirs without waiting."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from typing import Any, Protocol

from flashpoint._calls import DEFAULT, Call, SavedAttention, named

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


_ended: queue.SimpleQueue[tuple[_Client, SavedAttention | str]] = (
    queue.SimpleQueue()
)  # whose `put` a destructor may call
_thread: threading.Thread | None = None


def _start() -> None:
    """Start the thread that frees, where there is none: before the first lease, and after a fork."""
    global _thread
    if _thread is None or not _thread.is_alive():
        _thread = threading.Thread(target=_free, name="flashpoint-leases", daemon=True)
        _thread.start()


def _free() -> None:
    while True:
        client, saved = _ended.get()
        with contextlib.suppress(Exception):  # its time to live frees it
            client._call(delete(saved, LONGEST))
        del client, saved
