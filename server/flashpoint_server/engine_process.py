"""The engine: one process a device, which computes in the memory that HTTP processes share with it.

`python -m flashpoint_server.engine_process --listener FD --device NAME` inherits a listening socket, opens the device,
proves its backends against the float64 reference, and then greets whoever connects. One thread: between two jobs it
reads every message that waits, so the queue always knows who has gone.

    opening → serving → stopped      opening → broken: says why to whoever connects, and ends with CANNOT_WORK
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import mmap
import os
import selectors
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from flashpoint_server import logs
from flashpoint_server.memory import LARGEST
from flashpoint_server.messages import Attach, Broken, Cancel, Channel, Detach, Done, Failed, Hello, Submit, ToEngine
from flashpoint_server.parent import CANNOT_WORK, die_with_parent
from flashpoint_server.refusal import Refusal, out_of_time

if TYPE_CHECKING:
    from flashpoint_server.device import Device

log = structlog.stdlib.get_logger("flashpoint.engine")

PEER_PATIENCE = 5.0  # seconds that all others wait for an HTTP process that does not read its answers


@dataclass(eq=False)
class _Peer:
    """An HTTP process: its channel, and the segments of its memory that are mapped here."""

    channel: Channel[ToEngine]
    segments: dict[int, mmap.mmap] = field(default_factory=dict)


@dataclass(order=True)
class _Entry:
    """A waiting job; the least goes first."""

    rank: float
    arrived: int
    submit: Submit = field(compare=False)
    peer: _Peer = field(compare=False)
    cancelled: bool = field(default=False, compare=False)


class Engine:
    """See the module."""

    def __init__(self, listener: socket.socket, device: Device) -> None:
        self._device = device
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._waiting: list[_Entry] = []
        self._arrived = 0
        self._stopping = False
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        woken, wake = socket.socketpair()
        for end in (woken, wake):
            end.setblocking(False)
        self._selector.register(woken, selectors.EVENT_READ)
        signal.set_wakeup_fd(wake.fileno())
        self._wake = (woken, wake)
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def run(self) -> None:
        """Until SIGTERM; the job that runs then is finished and answered."""
        while not self._stopping:
            self._read(wait=not self._waiting)
            if self._waiting and not self._stopping:
                self._run(heapq.heappop(self._waiting))

    def _read(self, *, wait: bool) -> None:
        for key, _ in self._selector.select(None if wait else 0):
            if key.fileobj is self._listener:
                self._greet()
            elif key.fileobj is not self._wake[0]:
                self._hear(key.data)

    def _greet(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            # The socket's name is no secret: whoever is not of this user is not answered.
            _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if user != os.getuid():
                sock.close()
                return
            channel: Channel[ToEngine] = Channel(sock, ToEngine)
            channel.send(Hello(self._device.info))
            self._selector.register(channel, selectors.EVENT_READ, _Peer(channel))

    def _hear(self, peer: _Peer) -> None:
        try:
            while True:
                message, descriptors = peer.channel.receive()
                match message:
                    case Submit():
                        self._arrived += 1
                        heapq.heappush(self._waiting, _Entry(message.rank, self._arrived, message, peer))
                    case Cancel():
                        for entry in self._waiting:
                            if entry.peer is peer and entry.submit.id == message.id:
                                entry.cancelled = True
                    case Attach():
                        peer.segments[message.segment] = self._map(descriptors[0], message.size)
                    case Detach():
                        self._unmap(peer.segments.pop(message.segment))
        except BlockingIOError:
            return
        except EOFError:
            self._forget(peer)
        except Exception:  # whatever one peer sends or cannot have is no reason to fail the others
            log.exception("peer dropped")
            self._forget(peer)

    def _forget(self, peer: _Peer) -> None:
        """The HTTP process is gone: so is all that it asked for."""
        self._selector.unregister(peer.channel)
        peer.channel.close()
        self._waiting = [entry for entry in self._waiting if entry.peer is not peer]
        heapq.heapify(self._waiting)
        for segment in peer.segments.values():
            self._unmap(segment)

    def _map(self, descriptor: int, size: int) -> mmap.mmap:
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if size <= LARGEST else 0)  # its pages are there: no faults later
        with os.fdopen(descriptor, "rb+") as file:
            if os.fstat(descriptor).st_size < size:
                raise ValueError(f"a segment of {os.fstat(descriptor).st_size} bytes is not one of {size}")
            memory = mmap.mmap(file.fileno(), size, flags=flags)
        self._device.pin(memory)
        return memory

    def _unmap(self, memory: mmap.mmap) -> None:
        self._device.unpin(memory)
        with contextlib.suppress(BufferError):  # a tensor that is still held keeps the mapping until it is dropped
            memory.close()

    def _run(self, entry: _Entry) -> None:
        submit, began = entry.submit, time.perf_counter()
        reply: Done | Failed
        try:
            if entry.cancelled or (submit.deadline is not None and time.monotonic() >= submit.deadline):
                raise out_of_time()
            log.debug("begin", request_id=submit.request_id, backend=submit.backend)
            metadata = self._device.run(submit, entry.peer.segments[submit.segment])
            reply = Done(submit.id, metadata, began, time.perf_counter(), 1)
        except Refusal as refusal:
            reply = Failed(submit.id, refusal.code, refusal.detail, list(refusal.errors))
        except Exception as error:
            log.exception("failed", request_id=submit.request_id, error=type(error).__name__)
            reply = Failed(submit.id, "internal_error", "an error of the server, logged by its engine", [])
        self._answer(entry.peer, reply)

    def _answer(self, peer: _Peer, reply: Done | Failed) -> None:
        """One that is gone is noticed when it is next heard; one that reads nothing for a while is dropped like it."""
        try:
            try:
                peer.channel.send(reply)
            except BlockingIOError:
                with selectors.DefaultSelector() as writable:
                    writable.register(peer.channel, selectors.EVENT_WRITE)
                    writable.select(PEER_PATIENCE)
                peer.channel.send(reply)
        except BlockingIOError:
            log.error("peer dropped", reason="it does not read its answers")
            self._forget(peer)
        except OSError:
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parent", type=int, required=True, help="the pid of the process that starts it")
    parser.add_argument("--listener", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--log-format", default="json")
    parser.add_argument("--log-level", default="info")
    asked = parser.parse_args()
    die_with_parent(asked.parent)
    from flashpoint_server.device import Device  # imports torch, which takes seconds

    logs.configure(asked.log_format, asked.log_level)
    listener = socket.socket(fileno=asked.listener)
    try:
        device = Device.open(asked.device)
        device.prove()
    except Exception as error:
        log.exception("broken", device=asked.device)
        sock, _ = listener.accept()
        Channel(sock, ToEngine).send(Broken(f"{type(error).__name__}: {error}"))
        return CANNOT_WORK
    engine = Engine(listener, device)
    log.info("ready", device=device.info.name, title=device.info.title, backends=device.info.backends)
    engine.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
