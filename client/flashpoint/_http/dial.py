"""Find the addresses of a host. `resolve` is a generator that yields the events to wait for; `drive` runs it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence
from selectors import EVENT_READ
from typing import Any, NamedTuple, TypeAlias

import httpx

from flashpoint._http import forked
from flashpoint._http.drive import Steps, Wait

Key: TypeAlias = tuple[str, int]


class Address(NamedTuple):
    """An address, as `socket.getaddrinfo` returns it."""

    family: int
    kind: int
    protocol: int
    name: str
    address: Any


class _Lookup:
    """One call of `getaddrinfo` in a thread, because no timeout can stop it. Requests for the same name share it."""

    def __init__(self) -> None:
        self.waiting: list[socket.socket] = []
        self.done = False
        self.addresses: Sequence[Any] = ()
        self.failure: Exception | None = None


class _Lookups:
    """The lookups that run now. When a lookup ends, it sends a byte to every waiting caller."""

    def __init__(self) -> None:
        self.forked()
        forked.watch(self)

    def forked(self) -> None:
        self._running: dict[Key, _Lookup] = {}
        self._lock = threading.Lock()

    def join(self, key: Key, bell: socket.socket) -> _Lookup:
        """Return the lookup of `key`, which sends a byte to `bell` when it is done. Start it if none runs."""
        with self._lock:
            lookup = self._running.get(key)
            if lookup is None:
                lookup = _Lookup()
                # A daemon thread, so that the process can end while the resolver does not answer.
                threading.Thread(target=self._run, args=(key, lookup), name="flashpoint-resolver", daemon=True).start()
                self._running[key] = lookup
            lookup.waiting.append(bell)
        return lookup

    def leave(self, lookup: _Lookup, bell: socket.socket) -> None:
        with self._lock, contextlib.suppress(ValueError):
            lookup.waiting.remove(bell)

    def _run(self, key: Key, lookup: _Lookup) -> None:
        try:
            lookup.addresses = socket.getaddrinfo(*key, type=socket.SOCK_STREAM)
        except Exception as error:  # OSError; UnicodeError for a name that IDNA cannot encode
            lookup.failure = error
        with self._lock:
            self._running.pop(key, None)
            lookup.done = True
            for bell in lookup.waiting:
                with contextlib.suppress(OSError):
                    bell.send(b"\0")


_lookups = _Lookups()


def resolve(host: str, port: int) -> Steps[list[Address]]:
    """Return the addresses of a host in the order to try them. Raises httpx.ConnectError."""
    try:
        ours, bell = socket.socketpair()
        with ours, bell:
            lookup = _lookups.join((host, port), bell)
            try:
                if not lookup.done:
                    yield Wait(ours.fileno(), EVENT_READ)
            finally:
                _lookups.leave(lookup, bell)
    except (OSError, RuntimeError) as error:  # no descriptor or no thread is left
        raise httpx.ConnectError(str(error)) from error
    if lookup.failure is not None:
        raise httpx.ConnectError(str(lookup.failure)) from lookup.failure
    return _interleaved([Address(*address) for address in lookup.addresses])


def _interleaved(addresses: Sequence[Address]) -> list[Address]:
    """Return the addresses in alternating families (RFC 8305, section 4). The first address stays first."""
    queues: dict[int, list[Address]] = {}
    for each in addresses:
        queues.setdefault(each.family, []).append(each)
    longest = max(map(len, queues.values()), default=0)
    return [queue[i] for i in range(longest) for queue in queues.values() if i < len(queue)]
