"""Close the connections of a server that stops: no request that arrives is left without an answer, if possible.

The server refuses new requests before this (503 `draining`). A connection without a request stays open for a moment,
because its client may be sending one; then the client gets a FIN, and what it sends is read, so that nothing is reset.
A request that is still unfinished after the grace gets its 503 in the place of its answer.
"""

from __future__ import annotations

import asyncio
import ctypes
import select
import socket
import struct
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import structlog

from flashpoint_server.http.ending import LINGER

if TYPE_CHECKING:
    from flashpoint_server.http.protocol import HttpProtocol

GRACE = 1.0  # seconds for the last answers, and for the first request of a connection
QUIET = 0.1  # seconds for the next request of a connection, and for its client to close it
STEP = 0.02  # seconds between two looks
LONGEST_DRAIN = 2.0  # seconds in which connections that wait to be accepted are accepted

_SO_ATTACH_FILTER = 26
_SYN, _FLAGS = 0x02, 13  # a bit, and the place of the flags in a TCP header
# A program for the kernel (man 7 socket): load the flags; drop a packet with SYN, and let all others pass.
_LINES = (0x30, 0, 0, _FLAGS), (0x45, 0, 1, _SYN), (0x06, 0, 0, 0), (0x06, 0, 0, 1 << 31)
_NO_SYN = b"".join(struct.pack("HBBI", *line) for line in _LINES)

log = structlog.stdlib.get_logger("flashpoint.http")


def refuse_new(listener: socket.socket) -> None:
    """Let no new connection be established with a listening socket, while those in its backlog can be accepted.

    A client whose packet is dropped sends it again after a second. It is refused if the socket is closed then, and
    reaches the next server if there is one; without this, the system would establish and then reset its connection.
    """
    program = ctypes.create_string_buffer(_NO_SYN, len(_NO_SYN))
    with suppress(OSError):
        described = struct.pack("HL", len(_NO_SYN) // 8, ctypes.addressof(program))
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, described)


async def drained(listeners: Iterable[socket.socket]) -> None:
    """Wait until the event loop has accepted all connections that wait, at most LONGEST_DRAIN seconds."""
    loop = asyncio.get_running_loop()
    end = loop.time() + LONGEST_DRAIN
    for listener in listeners:
        empty, waiting = 0, select.poll()
        waiting.register(listener, select.POLLIN)
        while empty < 2 and loop.time() < end:  # twice: a handshake may be in its last step
            empty = 0 if waiting.poll(0) else empty + 1
            await asyncio.sleep(STEP / 2)


async def close(connections: Collection[HttpProtocol], *, now: bool = False) -> int:
    """Close all connections, after the grace or `now`. Log and return the number whose request got no answer."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    fins: dict[HttpProtocol, float] = {}  # when each got its FIN
    unanswered = 0
    await asyncio.sleep(0)  # what has arrived is read before a connection counts as idle
    while connections and not now and loop.time() - began < GRACE:
        for each in list(connections):
            each.keep_no_longer()
            if each not in fins and each.idle and loop.time() - began >= QUIET:
                fins[each] = loop.time()
                each.linger()
            elif loop.time() - fins.get(each, loop.time()) >= QUIET:
                unanswered += bool(each.discarded)
                each.transport.close()
        await asyncio.sleep(STEP)
    for each in list(connections):
        if each not in fins:
            unanswered += not each.cut()
    end = loop.time() + (GRACE if now else LINGER)
    while any(each.over for each in connections) and loop.time() < end:  # noqa: ASYNC110  # the states of many objects
        await asyncio.sleep(STEP)
    if unanswered:
        log.warning("connections closed without an answer", connections=unanswered)
    for each in list(connections):
        each.transport.abort()
    return unanswered
