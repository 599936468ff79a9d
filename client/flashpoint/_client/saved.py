"""Free saved forwards: by a call, or by a `Lease`, which does so in a background thread."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

from flashpoint._calls.service import DEFAULT, Call, CallSender, SavedAttention, is_gone, named
from flashpoint._http import forked
from flashpoint.errors import invalid

SETTLING = 2.0  # seconds that `Client.close` waits for forwards to be freed
# Timeout in seconds of the call that frees a forward. If it fails, the server frees the forward after its time to live.
LONGEST = 10.0


def delete(saved: SavedAttention | str, timeout: Any = DEFAULT) -> Call[None]:
    """Return the call that frees a saved forward, if it is not gone already. Raises InvalidInputError."""
    id_, affinity = named(saved)
    if not id_:
        raise invalid("saved", "must be the result of attention with save=True, or the id of a saved forward")
    path = f"/saved/{id_}"
    return Call("DELETE", path, "", {}, (), timeout, lambda _: None, 204, affinity=affinity, ignored=is_gone)


class _Freeing:
    """Frees forwards in a thread. A forked process starts with an empty queue; the parent frees its own forwards."""

    def __init__(self) -> None:
        self.forked()
        forked.watch(self)

    def forked(self) -> None:
        # Forwards to free, and events to set once all forwards before them are freed.
        self._ended: queue.SimpleQueue[tuple[CallSender, SavedAttention | str] | threading.Event] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, if it does not run."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._free, name="flashpoint-leases", daemon=True)
            self._thread.start()

    def free(self, client: CallSender, saved: SavedAttention | str) -> None:
        """Free a forward soon. Destructors may call this method."""
        self._ended.put((client, saved))

    def settle(self, seconds: float) -> None:
        if self._thread is not None and self._thread.is_alive() and self._thread is not threading.current_thread():
            self._ended.put(done := threading.Event())
            done.wait(seconds)

    def _free(self) -> None:
        while True:
            ended = self._ended.get()
            if isinstance(ended, threading.Event):
                ended.set()
                continue
            client, saved = ended
            with contextlib.suppress(Exception):  # after an error, the server frees the forward after its time to live
                client._call(delete(saved, LONGEST))
            del client, saved, ended


_freeing = _Freeing()


def settle(seconds: float = SETTLING) -> None:
    """Wait at most `seconds` until all released forwards are freed."""
    _freeing.settle(seconds)


class Lease:
    """Frees a saved forward when it is released or garbage-collected, without waiting. A copy frees nothing."""

    saved: SavedAttention | str | None = None  # torch.compile also makes leases without `__init__`

    def __init__(self, client: CallSender, saved: SavedAttention | str) -> None:
        self._client = client
        self._process = os.getpid()
        self.saved = saved
        _freeing.start()  # start the thread here, because the destructor, which may run at any point, cannot

    def release(self) -> None:
        """Let the thread free the forward soon. In a forked process do nothing: the parent frees the forward."""
        if (saved := self.saved) is not None and self._process == os.getpid():
            self.saved = None
            _freeing.free(self._client, saved)

    def __reduce__(self) -> tuple[Any, ...]:
        return object.__new__, (Lease,)

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():  # when the interpreter ends, modules are empty and no thread runs
            self.release()
