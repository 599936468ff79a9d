"""An engine at work: it hears the HTTP processes, runs what they ask on its device, and answers.

Several threads share the listening and the work (lanes.py). On a CPU a request is cut into parts, between its sequences
and between its heads. The lanes take them one by one in the queue's order (waiting.py): the cores are shared by all
requests that wait, and between two parts a request that is cancelled or late ends. A part runs on one core; where all
cores run long parts, one lane more takes short ones. On a GPU, and under Triton's interpreter, work is a launch of as
many requests as may share it.

    waiting → begun → answered      waiting → cancelled, late: answered without having begun
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import structlog

from flashpoint_kernels import Problem
from flashpoint_server.engine.benchmark_jobs import BenchmarkJobs, Said
from flashpoint_server.engine.device import NO_COPIES, Device, DeviceLostError, OutOfMemoryError, Stages, check
from flashpoint_server.engine.entry import Entry, Lengths, Peer, accept, account
from flashpoint_server.engine.lanes import Lanes, Waker, Watchdog, Work
from flashpoint_server.engine.replies import done, failed
from flashpoint_server.engine.waiting import Budget, Waiting
from flashpoint_server.ipc.messages import (
    Attach,
    Batch,
    Cancel,
    Channel,
    Detach,
    FromEngine,
    Hello,
    JobEvent,
    Prove,
    Proven,
    StopJob,
    Submit,
    Time,
    ToEngine,
    Unmapped,
)
from flashpoint_server.observability.lines import LINES
from flashpoint_server.refusal import out_of_time

log = structlog.stdlib.get_logger("flashpoint.engine")

# One part of some milliseconds, where nothing else waits: nobody need listen, and to wake another thread costs a tenth.
BRIEF_SECONDS = 0.004  # predicted
BRIEF_BYTES = 1 << 24
HOLD_SECONDS = 0.05  # that others are held back for a benchmark's slice, while something still runs
# A thread that wants Python back after its op waits that long for one that computes in Python; 5 ms is the default.
SWITCH_INTERVAL = 0.0005  # seconds


class ServingEngine:
    """See the module. `_lock` guards the queue, the entries and the peers' segments."""

    def __init__(
        self, listener: socket.socket, device: Device, budget: Budget, timing: BenchmarkJobs, hang_timeout: float
    ) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL)
        self._log = log.bind()  # as it is configured by now: what `log` itself is asked for is looked up each time
        self._device = device
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._waiting: Waiting[Entry] = Waiting(budget)
        self._compiled: set[Hashable] = set()  # launch keys
        self._held: dict[Hashable, list[Entry]] = {}  # until their launch key is compiled
        self._cutting: list[Entry] = []  # whose parts are being made
        self._timing = timing
        self._peers: list[Peer] = []
        self._launches = 0
        self._running = 0  # works of any kind
        self._long = 0  # of these, the ones that others may not have to wait for
        self._numbers = itertools.count(1 + secrets.randbits(62))  # of launches; who traces them takes them for unique
        self._alone = False  # a slice of a benchmark runs, and nothing beside it
        self._holding: float | None = None  # since when nothing begins, so that a slice may
        self._watchdog = Watchdog(hang_timeout)
        self._lock = threading.RLock()
        self._stopping = self._asleep = False
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._waker = Waker()
        self._selector.register(self._waker, selectors.EVENT_READ)

    def run(self) -> None:
        """Until SIGTERM; what runs then is finished and answered."""
        Lanes(self._device.lanes, self._listen, partial(self._hear_all, 0), self._take).run()

    # Listening

    def _listen(self) -> Work | None:
        """Hear what there is to hear, until there is work; None at the end."""
        timeout: float | None = 0
        while not self._stopping:
            self._hear_all(timeout)
            with self._lock:
                if (work := self._take()) is not None:
                    return work
                self._asleep = True  # in this very step: who leaves work behind from now on wakes us
                until = self._next_look()
                timeout = None if until is None else max(until - time.monotonic(), 0)
        return None

    def _next_look(self) -> float | None:
        """When there may be work though nobody says so, in `time.monotonic` seconds."""
        if self._alone:
            return None
        if self._holding is not None:
            return self._holding + HOLD_SECONDS
        return self._waiting.closes() if self._may_launch else None

    def _hear_all(self, timeout: float | None) -> None:
        ready = self._selector.select(timeout)
        self._asleep = False
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
            peer = Peer(Channel(sock, ToEngine))
            peer.channel.send(Hello(self._device.info, os.getpid()))
            self._selector.register(peer.channel, selectors.EVENT_READ, peer)
            with self._lock:
                self._peers.append(peer)
                for said in self._timing.history():
                    self._send(peer, said)

    def _hear(self, peer: Peer) -> None:
        try:
            while True:
                message, descriptors = peer.channel.receive()
                with self._lock:
                    match message:
                        case Submit() | Prove():
                            self._admit(Entry.of(message, peer, self._device))
                        case Time():
                            self._tell_all(self._timing.open(message))
                        case StopJob():
                            self._tell_all(self._timing.stop(message.job))
                        case Cancel():
                            self._cancel(peer, message.id)
                        case Attach():
                            self._attach(peer, message, descriptors)
                        case Detach() if message.segment in peer.segments:
                            peer.detach(message.segment, self._device)
        except BlockingIOError:
            return
        except EOFError:
            self._forget(peer)
        except Exception:  # whatever one peer sends or cannot have is no reason to fail the others
            log.exception("peer dropped")
            self._forget(peer)

    def _admit(self, entry: Entry) -> None:
        """Into the queue; what needs a kernel that is not compiled yet waits for that aside, and nothing else does."""
        key = entry.key
        if isinstance(entry.submit, Prove) or entry.submit.backend != "triton" or key is None or key in self._compiled:
            self._waiting.put(entry)
        elif key in self._held:
            self._held[key].append(entry)
        elif not entry.mapped:
            self._waiting.put(entry)
        else:
            try:
                check(entry.placed)
                found = self._device.compile(entry.placed)
            except OutOfMemoryError:
                self._waiting.put(entry)  # to be compiled for when there is memory to run it, too
            except Exception as error:  # one request is no reason to fail its peer
                self._fail([entry], error)
            else:
                if found is None:
                    self._compiled.add(key)
                    self._waiting.put(entry)
                else:
                    self._held[key] = [entry]
                    found.add_done_callback(lambda _: self._has_compiled(key))

    def _has_compiled(self, key: Hashable) -> None:
        """Or failed to: then the launch says why."""
        with self._lock:
            self._compiled.add(key)
            for entry in self._held.pop(key):
                self._waiting.put(entry)
            self._wake()

    def _remove(self, unwanted: Callable[[Entry], bool]) -> list[Entry]:
        """Take out of the queue, and from beside it, what is `unwanted`."""
        found = self._waiting.remove(unwanted)
        for key, held in self._held.items():
            found += [entry for entry in held if unwanted(entry)]
            self._held[key] = [entry for entry in held if not unwanted(entry)]
        return found

    def _cancel(self, peer: Peer, number: int) -> None:
        def asked(entry: Entry) -> bool:
            return entry.peer is peer and entry.submit.id == number

        for entry in self._remove(asked):
            self._drop_parts(entry, out_of_time())
        for entry in filter(asked, self._cutting):
            entry.failure = out_of_time()

    def _drop_parts(self, entry: Entry, error: Exception) -> None:
        """Nobody takes the rest of it; it is answered when the parts that run have ended, at once where none does."""
        entry.failure = entry.failure or error
        entry.left -= len(entry.parts)
        entry.parts.clear()
        if not entry.left:
            self._answer(entry)

    def _forget(self, peer: Peer) -> None:
        """The HTTP process is gone: so is all that it asked for."""
        with self._lock:
            self._remove(lambda entry: entry.peer is peer)
            for entry in self._cutting:
                if entry.peer is peer:
                    entry.failure = out_of_time()
            if peer not in self._peers:
                return
            self._peers.remove(peer)
            self._selector.unregister(peer.channel)
            self._let_go(peer)

    def _let_go(self, peer: Peer) -> None:
        """Close a forgotten peer's channel once nothing runs in its memory: that tells the peer so."""
        if peer not in self._peers and not peer.running:
            peer.close(self._device)

    def _attach(self, peer: Peer, message: Attach, descriptors: Sequence[int]) -> None:
        try:
            if not descriptors:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            peer.attach(message.segment, descriptors[0], message.size, self._device)
        except (OSError, MemoryError, RuntimeError, ValueError) as error:
            # No address space, or none that can be pinned; a caller's own segment that has become shorter.
            log.error("segment not mapped", size=message.size, error=str(error))
            self._send(peer, Unmapped(message.segment))

    # Working

    def _take(self) -> Work | None:
        """Work that may begin now."""
        with self._lock:
            while not (self._stopping or self._alone):
                now = time.monotonic()
                if self._timing.wants(now, others=bool(self._waiting)):
                    if not self._running:
                        self._holding = None
                        self._alone = True
                        self._timing.begin()
                        return Work(self._slice, brief=False)
                    self._holding = now if self._holding is None else self._holding
                    if now < self._holding + HOLD_SECONDS:
                        return None  # it is alone as soon as these have ended, for nothing else begins
                    self._timing.postpone(now)  # what runs takes long: nobody waits for that to end
                self._holding = None
                found = self._waiting.take(time.monotonic(), groups=self._may_launch, may=self._has_lane)
                if not found:
                    return None
                batch = [entry for entry in found if self._may_run(entry)]
                if not batch:
                    continue
                self._running += 1
                for entry in batch:
                    entry.peer.running += 1
                if batch[0].key is not None:
                    self._launches += 1
                    self._long += 1
                    return Work(partial(self._launch, batch), brief=False)
                (entry,) = batch
                long = entry.long
                self._long += long
                if not entry.left:
                    self._cutting.append(entry)
                    return Work(partial(self._cut, entry, long), brief=False)
                part = entry.parts.popleft()
                if entry.parts:
                    self._waiting.put(entry)
                    self._wake()
                small = entry.submit.seconds <= BRIEF_SECONDS and entry.nbytes <= BRIEF_BYTES
                brief = small and not self._waiting
                return Work(partial(self._compute, entry, part, long), brief)
            return None

    @property
    def _may_launch(self) -> bool:
        """Whether a launch may begin: on a CPU it takes a core."""
        free = self._running < self._device.cores or not self._device.is_cpu
        return free and self._launches < self._device.launches

    def _has_lane(self, entry: Entry) -> bool:
        """Whether a part of it may begin: while a core is free, and, where all run long parts, if it is short."""
        if self._running < self._device.cores:
            return True
        return not entry.long and self._long >= self._device.cores and self._running == self._long

    def _wake(self) -> None:
        """Have whoever listens look for work: there may be some that it has not seen come."""
        if self._asleep:
            self._asleep = False
            self._waker.wake()

    def _may_run(self, entry: Entry) -> bool:
        """Whether it is to run now; if not, it is answered. What is cut, and has not begun, begins here."""
        late = entry.submit.deadline is not None and time.monotonic() >= entry.submit.deadline
        if entry.began:
            if late:
                self._drop_parts(entry, out_of_time())
            return not late
        try:
            if not entry.mapped:
                raise OutOfMemoryError
            if late:
                raise out_of_time()
            entry.begin()
            self._log.debug("begin", request_id=entry.submit.request_id, kind=type(entry.submit).__name__)
            if entry.key is None:
                if not entry.many:
                    entry.cut(self._device)
            elif isinstance(entry.submit, Submit):
                entry.lengths = Lengths.of(check(entry.placed))
        except Exception as error:
            entry.failure = error
            self._answer(entry)
            return False
        return True

    def _cut(self, entry: Entry, long: bool) -> None:
        """Make the parts of a request of many sequences, without the lock: to go through them takes a while."""
        failure: Exception | None = None
        try:
            entry.cut(self._device)
        except Exception as error:
            failure = error
        with self._lock:
            self._cutting.remove(entry)
            self._running -= 1
            self._long -= long
            entry.peer.running -= 1
            if failure is not None:
                self._fail([entry], failure)
            elif entry.failure is not None:  # it was cancelled meanwhile
                self._drop_parts(entry, entry.failure)
            else:
                self._waiting.put(entry)
            self._let_go(entry.peer)

    def _compute(self, entry: Entry, part: Problem, long: bool) -> None:
        backend, failure = entry.placed.submit.backend, None
        try:
            with self._watchdog.watched():
                try:
                    self._device.run(part, backend)
                except OutOfMemoryError:
                    self._device.empty_cache()
                    self._device.run(part, backend)
        except Exception as error:
            failure = error
        del part
        with self._lock:
            self._running -= 1
            self._long -= long
            entry.peer.running -= 1
            entry.left -= 1
            if failure is not None:
                self._waiting.remove(lambda other: other is entry)
                self._drop_parts(entry, failure)
            elif not entry.left:
                self._answer(entry, about=entry.alone(self._waiting.budget), number=next(self._numbers))
            self._let_go(entry.peer)

    def _launch(self, batch: list[Entry]) -> None:
        try:
            if isinstance(batch[0].submit, Prove):
                self._prove(batch[0], batch[0].submit)
            else:
                self._solve(batch, splits=0, tries=2)
        finally:
            with self._lock:
                self._launches -= 1
                self._running -= 1
                self._long -= 1
                for entry in batch:
                    entry.peer.running -= 1
                    self._let_go(entry.peer)
                self._wake()  # it may have to wait for a batch to close now

    def _slice(self) -> None:
        """A slice of a benchmark: nothing else runs on the device."""
        try:
            with self._watchdog.watched():
                self._timing.step()
        finally:
            with self._lock:
                said = self._timing.conclude()
                self._tell_all(said)
                self._alone = False
                self._wake()
        if any(isinstance(one, JobEvent) and b"CUDA" in one.event for one in said) and self._device.lost():
            log.critical("device lost", by="a benchmark")
            LINES.flush()
            os._exit(1)

    def _prove(self, entry: Entry, asked: Prove) -> None:
        try:
            with self._watchdog.watched():
                report = self._device.verify(asked, entry.peer.segments)
        except Exception as error:
            self._fail([entry], error)
        else:
            self._send(entry.peer, Proven(asked.id, report, entry.began, time.perf_counter()))

    def _solve(self, batch: list[Entry], *, splits: int, tries: int) -> None:
        """Compute a batch and answer it; in halves where memory does not suffice, one by one where something fails."""
        failure: Exception | None = None
        try:
            with self._watchdog.watched():
                seeds, stages = self._device.launch([entry.placed for entry in batch])
        except Exception as error:
            failure = error
        if failure is None:
            about: Batch | None = account(batch, self._waiting.budget, splits)
            number = next(self._numbers)
            for entry, seed in zip(batch, seeds, strict=True):
                entry.seed = seed
                self._answer(entry, len(batch), stages, about, number)
                about = None
        elif isinstance(failure, OutOfMemoryError) and (len(batch) > 1 or tries > 1):
            failure.__traceback__ = None  # its frames hold what is to be given back
            self._device.empty_cache()
            if len(batch) == 1:
                self._solve(batch, splits=splits, tries=tries - 1)
            else:
                half = len(batch) // 2
                for some in (batch[:half], batch[half:]):
                    self._solve(some, splits=splits + 1, tries=tries)
        elif isinstance(failure, DeviceLostError) or len(batch) == 1:
            self._fail(batch, failure)
        else:
            failure.__traceback__ = None
            for entry in batch:
                self._solve([entry], splits=splits, tries=tries)

    def _fail(self, batch: list[Entry], error: Exception) -> None:
        for entry in batch:
            entry.failure = error
            self._answer(entry)

    # Answering

    def _tell_all(self, said: Sequence[Said]) -> None:
        with self._lock:
            for peer in list(self._peers):
                for one in said:
                    self._send(peer, one)

    def _answer(
        self, entry: Entry, size: int = 1, stages: Stages = NO_COPIES, about: Batch | None = None, number: int = 0
    ) -> None:
        if entry.failure is None:
            self._send(entry.peer, done(entry, size, stages, self._device.memory(), number, about))
        else:
            self._send(entry.peer, failed(entry))

    def _send(self, peer: Peer, reply: FromEngine) -> None:
        """Forget a peer that reads nothing for a while; one that is gone is noticed when it is next heard."""
        try:
            peer.send(reply)
        except BlockingIOError:
            log.error("peer dropped", reason="it does not read its answers")
            self._forget(peer)
        except (OSError, ValueError):  # ValueError: its socket was closed by then
            return
