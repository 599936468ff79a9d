"""The engine's loop: hear the HTTP processes, take a task from the scheduler, have the executor run it, and again.

Several threads, the lanes, take turns to listen, and the one that has found a task runs it:

    waiting for its turn → listening → running → (another task) → running …  → waiting for its turn

Nothing is handed from one thread to another: the thread that read a request runs it, which spares the small ones a
wake-up. A thread that has found a task that takes a while first passes the turn on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence

import structlog

from flashpoint_server.engine.caches.cache import StoredCache
from flashpoint_server.engine.entry import Peer, accept
from flashpoint_server.engine.executor import Executor
from flashpoint_server.engine.saved import SavedForward
from flashpoint_server.engine.scheduler import Scheduler
from flashpoint_server.engine.tasks import Slice, Task
from flashpoint_server.ipc import heap
from flashpoint_server.ipc.messages import (
    AskCaches,
    Attach,
    Cancel,
    Channel,
    Detach,
    Forget,
    FromEngine,
    Hello,
    Holding,
    KeepOwners,
    Prove,
    Submit,
    ToEngine,
    Unmapped,
)
from flashpoint_server.observability.lines import LINES

log = structlog.stdlib.get_logger("flashpoint.engine")

_FREED = 64 << 20  # bytes that caches and saved forwards give back before heaps are trimmed

# A thread that wants Python back after its op waits that long for one that computes in Python; 5 ms is the default.
SWITCH_INTERVAL = 0.0005  # seconds


class Waker:
    """A socket that wakes the listening thread: when another thread calls `wake`, or the process gets a SIGTERM."""

    def __init__(self) -> None:
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self.asleep = False  # set under the scheduler's lock by the thread that listens, once it has found no task
        signal.set_wakeup_fd(self._waker.fileno())
        signal.signal(signal.SIGTERM, lambda *_: None)  # its number comes by the socket, to the thread that listens

    def fileno(self) -> int:
        return self._woken.fileno()

    def wake(self) -> None:
        """Have the thread that listens look for a task, if it sleeps. Call it under the scheduler's lock."""
        if self.asleep:
            self.asleep = False
            self._waker.send(b"\0")

    def ends(self) -> bool:
        """Return whether a SIGTERM has come since the last call, once the socket is readable."""
        return signal.SIGTERM in self._woken.recv(4096)


class EngineLoop:
    """See the module. One thread at a time has `_turn`; the scheduler's lock guards the peers, too."""

    def __init__(self, listener: socket.socket, waker: Waker, scheduler: Scheduler, executor: Executor) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL)
        self._listener = listener
        self._waker = waker
        self._scheduler = scheduler
        self._executor = executor
        self._lock = scheduler.lock
        self._peers: list[Peer] = []
        self._stopping = False
        self._incarnation = secrets.randbits(63)
        self._held = 0, 0, 0, 0  # as it was told
        self._changes = 0  # of the ledger, when it was looked at
        self._most_held = 0  # bytes, since heaps were trimmed
        self._turn = threading.Lock()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        for source in (listener, waker):
            self._selector.register(source, selectors.EVENT_READ)

    def run(self) -> None:
        """Run until SIGTERM; the tasks that run then are finished, and their requests answered."""
        lanes = range(1, self._executor.device.lanes)
        others = [threading.Thread(target=self._lane, name=f"lane {n}", daemon=True) for n in lanes]
        for other in others:
            other.start()
        self._lane()
        for other in others:
            other.join()

    # The loop of a lane

    def _lane(self) -> None:
        try:
            while (task := self._next()) is not None:
                self._run(task)
                while (another := self._next_at_once()) is not None:
                    self._run(another)
        except BaseException:  # a bug of ours: a process with one thread less would not be noticed, one that ends is
            log.critical("lane failed", exc_info=True)
            LINES.flush()
            os._exit(1)

    def _next(self) -> Task | None:
        """Wait for the turn and for a task, and pass the turn on with it; None at the end."""
        with self._turn:
            while (task := self._listen()) is not None and task.brief:
                self._run(task)
            return task

    def _next_at_once(self) -> Task | None:
        """Another task, chosen among all that has come: where every lane is at work, nobody else listens."""
        if self._turn.acquire(blocking=False):
            try:
                self._hear_all(0)
            finally:
                self._turn.release()
        with self._lock:
            return self._take()

    def _listen(self) -> Task | None:
        """Hear what there is to hear, until there is a task; None at the end."""
        timeout: float | None = 0
        while not self._stopping:
            self._hear_all(timeout)
            self._look_at_held()
            with self._lock:
                if (task := self._take()) is not None:
                    return task
                if self._unseen:  # a task has changed it since we looked, and woke nobody
                    timeout = 0
                    continue
                self._waker.asleep = True  # in this very step: from now on the scheduler wakes us
                until = self._scheduler.next_look()
            timeout = None if until is None else max(until - time.monotonic(), 0)
        return None

    def _look_at_held(self) -> None:
        """Free what has expired, and tell the HTTP processes what is held, where that has changed."""
        self._executor.device.ledger.sweep()
        if not self._unseen:
            return
        self._changes = self._executor.device.ledger.changes
        if (held := self._held_now) != self._held:
            self._held = held
            with self._lock:
                self._tell_all([Holding(*held)])
            self._trim(Holding(*held).total)

    def _trim(self, held: int) -> None:
        """Give back what heaps keep of caches and saved forwards, where much of these has been freed."""
        self._most_held = max(self._most_held, held)
        if self._most_held - held >= _FREED or (self._most_held and not held):
            self._most_held = held
            heap.trim()

    @property
    def _unseen(self) -> bool:
        """Whether what is held has changed since it was looked at."""
        return self._executor.device.ledger.changes != self._changes

    @property
    def _held_now(self) -> tuple[int, int, int, int]:
        """How many caches are held, and their bytes; how many saved forwards, and theirs."""
        ledger = self._executor.device.ledger
        return *ledger.held(StoredCache), *ledger.held(SavedForward)

    def _take(self) -> Task | None:
        return None if self._stopping else self._scheduler.take()

    def _run(self, task: Task) -> None:
        following: Task | None = task
        while following is not None:
            following = self._run_one(following)

    def _run_one(self, task: Task) -> Task | None:
        """Run a task; return the one that is to follow at once."""
        failure = self._executor.run(task)
        with self._lock:
            following = self._scheduler.finish(task, failure)
            for entry in task.entries:
                self._let_go(entry.peer)
            if self._unseen:  # who listens tells it, and when the first of them expires
                self._waker.wake()
            if isinstance(task, Slice):
                self._tell_all(task.plugin.conclude())
                if task.plugin.suspect:
                    self._executor.end_if_lost(by=task.plugin.name)
            return following

    # The HTTP processes

    def _hear_all(self, timeout: float | None) -> None:
        ready = self._selector.select(timeout)
        self._waker.asleep = False
        for key, _ in ready:
            if key.fileobj is self._listener:
                self._greet()
            elif key.fileobj is self._waker:
                self._stopping |= self._waker.ends()
            else:
                self._hear(key.data)

    def _greet(self) -> None:
        with contextlib.suppress(OSError):
            if (sock := accept(self._listener)) is None:
                return
            device = self._executor.device
            peer = Peer(Channel(sock, ToEngine), device)
            peer.channel.send(Hello(device.info, os.getpid(), self._incarnation))
            peer.channel.send(Holding(*self._held))
            self._selector.register(peer.channel, selectors.EVENT_READ, peer)
            with self._lock:
                self._peers.append(peer)
                for plugin in self._scheduler.plugins:
                    for said in plugin.history():
                        peer.send(said)

    def _hear(self, peer: Peer) -> None:
        try:
            while True:
                message, descriptors = peer.channel.receive()
                with self._lock:
                    self._take_in(peer, message, descriptors)
        except BlockingIOError:
            return
        except EOFError:
            self._forget(peer)
        except Exception:  # whatever one peer sends or cannot have is no reason to fail the others
            log.exception("peer dropped")
            self._forget(peer)

    def _take_in(self, peer: Peer, message: ToEngine, descriptors: Sequence[int]) -> None:
        match message:
            case Submit() | Prove() | AskCaches():
                self._scheduler.admit(message, peer)
            case KeepOwners():
                self._executor.device.ledger.keep_owners(message.names)
            case Forget():
                self._executor.device.saved.drop(message.serial)
            case Cancel():
                self._scheduler.cancel(peer, message.id)
            case Attach():
                self._attach(peer, message, descriptors)
            case Detach():
                if message.segment in peer.segments:
                    peer.detach(message.segment)
            case _:
                for plugin in self._scheduler.plugins:
                    self._tell_all(plugin.hear(message))

    def _attach(self, peer: Peer, message: Attach, descriptors: Sequence[int]) -> None:
        try:
            if not descriptors:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            peer.attach(message.segment, descriptors[0], message.size)
        except (OSError, MemoryError, RuntimeError, ValueError) as error:
            # No address space, or none that can be pinned; a caller's own segment that has become shorter.
            log.error("segment not mapped", size=message.size, error=str(error))
            peer.send(Unmapped(message.segment))

    def _tell_all(self, said: Sequence[FromEngine]) -> None:
        for peer in self._peers:
            for one in said:
                peer.send(one)

    def _forget(self, peer: Peer) -> None:
        """The HTTP process is gone: so is all that it asked for."""
        with self._lock:
            self._scheduler.forget(peer)
            self._peers.remove(peer)
            self._selector.unregister(peer.channel)
            self._let_go(peer)

    def _let_go(self, peer: Peer) -> None:
        """Close a forgotten peer's channel once nothing runs in its memory: that tells the peer so."""
        if peer not in self._peers and not peer.running:
            peer.close()
