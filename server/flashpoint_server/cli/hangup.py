"""SIGHUP: read keys and certificate again.

Without a handler it ends the process, so it has one from the start of the process to its end.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

NOTHING_TO_REREAD = "nothing to read again"  # logged without --api-keys-file and --tls-cert


class Hangup:
    """The handler of this process. It keeps a signal that comes before anybody listens."""

    def __init__(self) -> None:
        self._came = False
        self._listener: Callable[[], object] | None = None

    def catch(self) -> None:
        """Handle SIGHUP from now on."""
        signal.signal(signal.SIGHUP, self._hear)

    def listen(self, listener: Callable[[], object] | None) -> None:
        """Call `listener` at each SIGHUP, between two bytecodes of whatever runs; at once if one has come."""
        self.catch()
        self._listener = listener
        if self._came and listener is not None:
            listener()

    def _hear(self, _: int, __: FrameType | None) -> None:
        self._came = True
        if self._listener is not None:
            self._listener()


HANGUP = Hangup()
