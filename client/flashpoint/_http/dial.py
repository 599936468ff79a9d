"""Find the addresses of a host, and connect to the first that answers (Happy Eyeballs, RFC 8305).

`resolve` and `race` are generators that yield the events to wait for; `drive` runs them.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from selectors import EVENT_READ
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import httpx

from flashpoint._http import forked
from flashpoint._http.drive import Several, Steps, Wait

ATTEMPT_DELAY = 0.25  # seconds until the next address is tried too; RFC 8305, section 5, recommends 250 ms
SETUP_DELAY = 2.0  # like ATTEMPT_DELAY, if a server has accepted a connection: TLS needs several round trips
Key: TypeAlias = tuple[str, int]


class Address(NamedTuple):
    """An address, as `socket.getaddrinfo` returns it."""

    family: int
    kind: int
    protocol: int
    name: str
    address: Any


class Attempt(Protocol):
    """A connection that is being set up: `connected` says whether its host has accepted it."""

    connected: bool

    def close(self) -> None: ...


C = TypeVar("C", bound=Attempt)


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


def race(addresses: Sequence[Address], dial: Callable[[Address], tuple[C, Steps[None]]]) -> Steps[C]:
    """Return the first connection that is set up. Try the next address after a delay, or when an attempt fails.

    `dial` returns a new connection, and the steps that set it up. Raises httpx.ConnectError with all failures.
    """
    waiting, failures = list(addresses), list[httpx.TransportError]()
    running: dict[C, tuple[Steps[None], Wait]] = {}
    begun = 0.0  # time of the latest attempt

    def advance(attempt: C, steps: Steps[None], ready: int | None) -> bool:
        """Run an attempt until it waits or fails. Return whether the connection is set up."""
        try:
            wait = steps.send(ready)
            assert isinstance(wait, Wait)
            running[attempt] = steps, wait
        except StopIteration:
            del running[attempt]
            return True
        except httpx.TransportError as error:
            del running[attempt]
            attempt.close()
            failures.append(error)
        return False

    try:
        while waiting or running:
            delay = SETUP_DELAY if any(each.connected for each in running) else ATTEMPT_DELAY
            pause = begun + delay - time.monotonic() if running else 0.0
            if waiting and pause <= 0:
                begun = time.monotonic()
                try:
                    attempt, steps = dial(waiting.pop(0))
                except OSError as error:  # no descriptor is left, or this machine does not have the address family
                    failures.append(httpx.ConnectError(str(error)))
                    continue
                running[attempt] = steps, Wait(-1, 0)
                ready = None
            else:
                event = yield Several(tuple(wait for _, wait in running.values()), pause if waiting else None)
                if event is None:
                    continue
                attempt, (steps, _) = next(one for one in running.items() if one[1][1].fd == event.fd)
                ready = event.events
            if advance(attempt, steps, ready):
                return attempt
            if attempt not in running:
                begun = 0.0  # the attempt failed: try the next address at once
        if not failures:
            raise httpx.ConnectError("the host has no address")
        failures[-1].args = ("; ".join(dict.fromkeys(map(str, failures))),)  # each text once
        raise failures[-1]
    finally:
        for attempt, (steps, _) in running.items():
            steps.close()
            attempt.close()
