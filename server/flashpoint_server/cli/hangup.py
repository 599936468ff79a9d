"""Handle SIGHUP, the signal to read keys and certificate again.

Without a handler, SIGHUP ends the process. So the handler is set for the whole life of the process.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

NOTHING_TO_REREAD = "nothing to read again"  # logged if neither --api-keys-file nor --tls-cert is set


class Hangup:
    """The SIGHUP handler of this process. It remembers a signal that arrives before there is a listener."""

    def __init__(self) -> None:
        self._came = False
        self._listener: Callable[[], object] | None = None

    def catch(self) -> None:
        """Handle SIGHUP from now on."""
        signal.signal(signal.SIGHUP, self._hear)

    def listen(self, listener: Callable[[], object] | None) -> None:
        """Call `listener` at each SIGHUP, and now if a signal has already arrived.

        `listener` runs in the signal handler, between any two bytecodes of the main thread, so it should only pass on
        the work.
        """
        self.catch()
        self._listener = listener
        if self._came and listener is not None:
            listener()

    def _hear(self, _: int, __: FrameType | None) -> None:
        self._came = True
        if self._listener is not None:
            self._listener()


HANGUP = Hangup()
