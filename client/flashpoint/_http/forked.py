"""Objects that a forked process must not share with its parent, such as connections and locks.

A fork copies the descriptors of all connections. If both processes used one, each would read answers to the other's
calls. So a new child calls `forked` on every object that `watch` knows, before it runs anything else.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    def forked(self) -> None:
        """Drop the parent's resources. Do not wait for an inherited lock: no thread of the child can release it."""


_watched: weakref.WeakSet[Forkable] = weakref.WeakSet()


def watch(one: Forkable) -> None:
    """Call `one.forked()` in every process that is forked from this one, as long as `one` exists."""
    _watched.add(one)


def _in_child() -> None:
    for one in tuple(_watched):
        one.forked()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_in_child)
