"""The engine's loop: receive messages, take a task from the scheduler, let the executor run it, and repeat.

Several threads, the lanes, run the loop. One lane at a time listens: the one that has the lock `_turn`.

    waiting for the lock → listening → running → (another task) → running …  → waiting for the lock

No work is passed between threads: the lane that takes a task runs it, which saves a wake-up for small requests. It
first releases the lock, so that another lane listens, unless the task is `brief`.
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
from flashpoint_server.engine.execution.executor import Executor
from flashpoint_server.engine.scheduling.engine_request import EngineRequest, Worker, accept
from flashpoint_server.engine.scheduling.scheduler import Scheduler
from flashpoint_server.engine.scheduling.tasks import BenchmarkSlice, Task
from flashpoint_server.engine.state.saved import SavedForward
from flashpoint_server.ipc.messages import (
    Attach,
    Cancel,
    Channel,
    Detach,
    Forget,
    FromEngine,
    Hello,
    Holding,
    SavedOwners,
    Submit,
    ToEngine,
    Unmapped,
)
from flashpoint_server.observability.lines import LINES
from flashpoint_server.processes import heap

log = structlog.stdlib.get_logger("flashpoint.engine")

_FREED = 64 << 20  # bytes of freed caches and saved forwards after which the C library's heaps are trimmed

# A thread that needs Python's lock (GIL) after a kernel waits about this long until a thread that runs Python code
# releases it. Python's default is 5 ms.
SWITCH_INTERVAL = 0.0005  # seconds


class Waker:
    """A socket that wakes the listening thread: after a call of `wake` by another thread, or after SIGTERM."""

    def __init__(self) -> None:
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self.asleep = False  # set under the scheduler's lock by the listening thread when it has found no task
        signal.set_wakeup_fd(self._waker.fileno())
        signal.signal(signal.SIGTERM, lambda *_: None)  # the signal number arrives through the socket

    def fileno(self) -> int:
        return self._woken.fileno()

    def wake(self) -> None:
        """Wake the listening thread, if it sleeps, to look for a task. Call this under the scheduler's lock."""
        if self.asleep:
            self.asleep = False
            self._waker.send(b"\0")

    def ends(self) -> bool:
        """Return whether SIGTERM has arrived since the last call. Call this when the socket is readable."""
        return signal.SIGTERM in self._woken.recv(4096)


class EngineLoop:
    """The loop that the module describes. The scheduler's lock also protects the list of connected HTTP processes."""

    def __init__(self, listener: socket.socket, waker: Waker, scheduler: Scheduler, executor: Executor) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL)
        self._listener = listener
        self._waker = waker
        self._scheduler = scheduler
        self._executor = executor
        self._ledger = executor.device.ledger
        self._lock = scheduler.lock
        self._workers: list[Worker] = []
        self._stopping = False
        self._incarnation = secrets.randbits(63)
        self._sent = 0, 0, 0, 0  # `_holding` as it was last sent to the workers
        self._changes = 0  # the ledger's counter at the last check
        self._peak = 0  # maximum bytes of caches and saved forwards since heaps were trimmed
        self._turn = threading.Lock()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        for source in (listener, waker):
            self._selector.register(source, selectors.EVENT_READ)

    def run(self) -> None:
        """Run until SIGTERM. Then running tasks are finished and answered."""
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
        except BaseException:  # a bug: end the process, which is then restarted; a missing thread would go unnoticed
            log.critical("lane failed", exc_info=True)
            LINES.flush()
            os._exit(1)

    def _next(self) -> Task | None:
        """Listen, run brief tasks, and return the first task that is not brief. Return None when the engine ends."""
        with self._turn:
            while (task := self._listen()) is not None and task.brief:
                self._run(task)
            return task

    def _next_at_once(self) -> Task | None:
        """Return another task if there is one now, without waiting; else None.

        First receive the messages that have arrived, unless another lane listens.
        """
        if self._turn.acquire(blocking=False):
            try:
                self._hear_all(0)
            finally:
                self._turn.release()
        with self._lock:
            return None if self._stopping else self._scheduler.take()

    def _listen(self) -> Task | None:
        """Receive messages until there is a task, and return it. Return None when the engine ends."""
        timeout: float | None = 0
        while not self._stopping:
            self._hear_all(timeout)
            if self._ledger.changes != self._changes or time.monotonic() >= self._ledger.due:
                self._look_at_ledger()
            with self._lock:
                if not self._stopping and (task := self._scheduler.take()) is not None:
                    return task
                if self._ledger.changes != self._changes:  # by a task, since `_look_at_ledger`: look before sleeping
                    timeout = 0
                    continue
                self._waker.asleep = True  # set under the lock that `_take` needed, so that no later `wake` is missed
                until = self._scheduler.next_look()
            timeout = None if until is None else max(until - time.monotonic(), 0)
        return None

    def _look_at_ledger(self) -> None:
        """Free expired caches and saved forwards, and send the HTTP processes the new counts."""
        if time.monotonic() >= self._ledger.due:
            self._ledger.sweep()
        if self._ledger.changes == self._changes:
            return
        self._changes = self._ledger.changes
        if (holding := self._holding) != self._sent:
            self._sent = holding
            with self._lock:
                self._tell_all([Holding(*holding)])
            self._trim(Holding(*holding).total)

    def _trim(self, nbytes: int) -> None:
        """Trim the C library's heaps if many bytes of caches and saved forwards have been freed; `nbytes` remain."""
        self._peak = max(self._peak, nbytes)
        if self._peak - nbytes >= _FREED or (self._peak and not nbytes):
            self._peak = nbytes
            heap.trim()

    @property
    def _holding(self) -> tuple[int, int, int, int]:
        """The number of caches and their bytes, and the number of saved forwards and their bytes."""
        return *self._ledger.usage(StoredCache), *self._ledger.usage(SavedForward)

    def _run(self, task: Task) -> None:
        """Run a task, and the tasks that this thread must run next."""
        following: Task | None = task
        while following is not None:
            task = following
            failure = self._executor.run(task)
            with self._lock:
                following = self._scheduler.finish(task, failure)
                for request in task.requests:
                    if request.worker not in self._workers:
                        self._let_go(request.worker)
                # the listening thread must send the ledger's new counts, and note when items may expire
                if self._ledger.changes != self._changes:
                    self._waker.wake()
                match task:
                    case BenchmarkSlice(plugin=plugin):
                        self._tell_all(plugin.conclude())
                        if plugin.suspect:
                            self._executor.end_if_lost(by=plugin.name)

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
            worker = Worker(Channel(sock, ToEngine), device)
            worker.send(Hello(device.info, os.getpid(), self._incarnation))
            worker.send(Holding(*self._sent))
            self._selector.register(worker.channel, selectors.EVENT_READ, worker)
            with self._lock:
                self._workers.append(worker)
                for plugin in self._scheduler.plugins:
                    for news in plugin.history():
                        worker.send(news)

    def _hear(self, worker: Worker) -> None:
        try:
            while True:
                message, descriptors = worker.channel.receive()
                with self._lock:
                    match message:
                        case Submit():
                            self._scheduler.admit(EngineRequest.of(message, worker, self._executor.device.cuts))
                        case SavedOwners():
                            self._ledger.keep_owners(message.names)
                        case Forget():
                            self._executor.device.saved.drop(message.serial)
                        case Cancel():
                            self._scheduler.cancel(worker, message.id)
                        case Attach():
                            self._attach(worker, message, descriptors)
                        case Detach():
                            if message.segment in worker.segments:
                                worker.detach(message.segment)
                        case _:
                            for plugin in self._scheduler.plugins:
                                self._tell_all(plugin.hear(message))
        except BlockingIOError:
            return
        except EOFError:
            self._forget(worker)
        except Exception:  # a bad message or missing resource of one worker must not affect the others
            log.exception("peer dropped")
            self._forget(worker)

    def _attach(self, worker: Worker, message: Attach, descriptors: Sequence[int]) -> None:
        try:
            if not descriptors:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            worker.attach(message.segment, descriptors[0], message.size)
        except (OSError, MemoryError, RuntimeError, ValueError) as error:
            # No file descriptor or address space is left, or the file of a caller's own segment has become shorter.
            log.error("segment not mapped", size=message.size, error=str(error))
            worker.send(Unmapped(message.segment))

    def _tell_all(self, messages: Sequence[FromEngine]) -> None:
        for worker in self._workers:
            for one in messages:
                worker.send(one)

    def _forget(self, worker: Worker) -> None:
        """Remove an HTTP process that has disconnected, and drop its requests."""
        with self._lock:
            self._scheduler.forget(worker)
            self._workers.remove(worker)
            self._selector.unregister(worker.channel)
            self._let_go(worker)

    def _let_go(self, worker: Worker) -> None:
        """Close the channel of a removed worker when no task uses its memory any more: it may then reuse the memory."""
        if not worker.running:
            worker.close()
