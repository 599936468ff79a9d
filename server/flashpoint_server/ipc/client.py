"""The engines as an HTTP process sees them: their states, which engine gets a job, and their answers.

    STARTING → READY → STARTING (the engine died; a new one is starting) → READY …      any → FAILED, STOPPED

A job is sent when it is submitted, and waits in the engine's own queue. Its staging memory is not reused until the
engine has answered, even if the client has disconnected, because the engine may write there until then. When an engine
dies, its mappings are gone. Jobs that it had started are refused with 503; the others are sent to another engine.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import structlog

from flashpoint_server.ipc.bodies import encode
from flashpoint_server.ipc.job import Job
from flashpoint_server.ipc.messages import (
    AnswerVerified,
    Attach,
    Broken,
    CallReply,
    Cancel,
    Channel,
    Detach,
    DeviceInfo,
    Done,
    Failed,
    Forget,
    FromEngine,
    Hello,
    Holding,
    JobDropped,
    JobEvent,
    JobNews,
    JobOpened,
    SavedOwners,
    ToEngine,
    Unmapped,
    Verified,
    VerifyProgressed,
    Withdraw,
)
from flashpoint_server.ipc.price import PASSED
from flashpoint_server.ipc.service_rate import ServiceRate
from flashpoint_server.refusal import Refusal

log = structlog.stdlib.get_logger("flashpoint.engine")

# One step of priority equals this many seconds of waiting, so no job starves: a job of priority 0 that is 9 s older
# than a job of priority 9 runs first.
PRIORITY_SECONDS = 1.0


class State(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    STOPPED = "stopped"


class Listener:
    """Receives engine messages that are not answers, on the event loop. The methods do nothing by default."""

    def computed(self, engine: Engine, done: Done) -> None:
        """Called when an attention request was computed.

        A launch can compute several requests: `done` describes it for one of them; `done.flops` of the others is None.
        """

    def heard(self, engine: Engine, news: JobNews) -> None:
        """Called for each message about a benchmark."""

    def holding_changed(self, engine: Engine, holding: Holding) -> None:
        """Called when the caches and saved forwards of an engine have changed."""

    def verified(self, about: AnswerVerified) -> None:
        """Called when an engine has verified an answer of its own."""

    def withdraw(self, wrong: int) -> None:
        """Called when an engine has found so many wrong answers of its own that the server must take no new work."""

    def lost(self, engine: Engine) -> None:
        """Called when the engine has died. A new one will start at its address."""


class Engine:
    """One engine process, connected through the abstract Unix socket `address`.

    `changed` is called when the state has changed, `unstarted` when it dies, with the jobs that had not started.
    """

    def __init__(
        self,
        address: bytes,
        changed: Callable[[], None],
        unstarted: Callable[[list[Job]], None],
        listeners: Sequence[Listener],
    ) -> None:
        self._changed = changed
        self._unstarted = unstarted
        self._listeners = listeners
        self.state = State.STARTING
        self.device: DeviceInfo | None = None
        self.failure: str | None = None
        self._pid = 0
        self.incarnation = 0  # the unique number of the ready engine process; 0 while none is ready
        self.before: set[int] = set()  # incarnations of engines that died
        self.holding = Holding(0, 0)
        self.pace = ServiceRate()
        self.load = 0.0  # predicted seconds of all unanswered jobs
        self._address = address
        self._channel: Channel[FromEngine] | None = None
        self._sent: dict[int, Job] = {}
        self._numbers = itertools.count()
        self._attached: set[int] = set()
        # Messages to send when the socket's buffer has room, encoded: an encoding error must not stop the queue.
        self._unsent: deque[tuple[bytes, tuple[int, ...]]] = deque()

    def connect(self) -> None:
        """Connect to the listening socket, which exists before the engine does.

        The engine sends Hello when it is ready.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        sock.connect(self._address)
        self._channel = Channel(sock, FromEngine)
        asyncio.get_running_loop().add_reader(sock, self._hear)

    def become(self, state: State) -> None:
        self.state = state
        self._changed()

    def close(self) -> None:
        self.become(State.STOPPED)
        self._lose("draining", "the server stopped before it answered this request; retry")

    def submit(self, job: Job) -> None:
        """Send a job to this engine, which must be ready."""
        assert self.device is not None
        for segment in job.segments:
            if segment.number not in self._attached:
                self._attached.add(segment.number)
                self.tell(Attach(segment.number, segment.mapped), (segment.fd,))
        submit = job.message
        submit.id = next(self._numbers)
        submit.rank = job.since + PASSED * submit.seconds - job.priority * PRIORITY_SECONDS
        message = encode(submit)  # before the job is registered: `encode` may raise
        if not self._sent:
            self.pace.begin(time.monotonic())
        self._sent[submit.id] = job
        job.slot.mark = False
        job.hold()
        self.load += submit.seconds
        self._send_encoded(message)

    @property
    def unbegun(self) -> Iterator[Job]:
        """Yield the jobs that the engine has not started."""
        return (job for job in self._sent.values() if not job.slot.mark)

    @property
    def process(self) -> tuple[str, int]:
        """The engine's name, once its device is known, and its process id; 0 while it is not ready."""
        name = f"engine-{self.device.name}" if self.device else ""
        return name, self._pid if self.state is State.READY else 0

    @property
    def stopped(self) -> bool:
        """Whether a signal (SIGSTOP) or a debugger has stopped the engine's process, so that it handles no messages."""
        try:
            _, _, behind_name = Path(f"/proc/{self._pid}/stat").read_text().rpartition(") ")
        except OSError:  # the process is gone: the channel reports it
            return False
        return behind_name[0] in "Tt"

    def cancel(self, job: Job, _: asyncio.Future[None]) -> None:
        """Tell the engine that the result of a job is no longer needed, unless the engine has answered."""
        if self._sent.get(number := job.message.id) is job:
            self.tell(Cancel(number))

    def forget_segment(self, number: int) -> None:
        """Tell the engine to unmap a segment that this process has freed."""
        if number in self._attached:
            self._attached.remove(number)
            self.tell(Detach(number))

    def tell(self, message: ToEngine, descriptors: tuple[int, ...] = ()) -> None:
        """Send a message other than a job."""
        self._send_encoded(encode(message), descriptors)

    def _send_encoded(self, message: bytes, descriptors: tuple[int, ...] = ()) -> None:
        self._unsent.append((message, descriptors))
        if len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        if self._channel is None:
            return
        try:
            while self._unsent:
                self._channel.send(*self._unsent[0])
                self._unsent.popleft()
        except BlockingIOError:
            asyncio.get_running_loop().add_writer(self._channel, self._writable)
        except (BrokenPipeError, ConnectionError):
            pass  # the engine is gone: `_hear` gets the end of file and handles it
        except OSError as error:  # too many descriptors in flight, or no memory: connect again
            log.error("channel failed", error=str(error))
            # The engine closes its end when nothing computes in our memory any more. Then `_hear` connects again.
            self._channel.sock.shutdown(socket.SHUT_WR)

    def _writable(self) -> None:
        assert self._channel is not None
        asyncio.get_running_loop().remove_writer(self._channel)
        self._flush()

    def _hear(self) -> None:
        assert self._channel is not None
        while True:
            try:
                message, _ = self._channel.receive()
            except BlockingIOError:
                return
            except EOFError:
                self._died()
                return
            match message:
                case Done() | Failed() | Verified() | CallReply():
                    self._settle(message)
                case Hello() if (old := self.device) is not None and message.device.name != old.name:
                    # Waiting jobs were planned for the first device, and a CPU must not replace a GPU silently.
                    self.failure = f"the engine's restart changed its device from {old.name} to {message.device.name}"
                    self.become(State.FAILED)
                case Hello():
                    self.device, self._pid, self.incarnation = message.device, message.pid, message.incarnation
                    log.info("ready", **message.device.logged)
                    self.become(State.READY)
                case Broken():
                    self.failure = message.reason
                    self.become(State.FAILED)
                case VerifyProgressed():
                    job = self._sent[message.id]
                    if job.progress is not None and not job.answer.done():
                        job.progress(message.progress)
                case JobOpened() | JobEvent() | JobDropped():
                    for listener in self._listeners:
                        listener.heard(self, message)
                case Holding():
                    self.holding = message
                    for listener in self._listeners:
                        listener.holding_changed(self, message)
                case AnswerVerified():
                    for listener in self._listeners:
                        listener.verified(message)
                case Withdraw():
                    for listener in self._listeners:
                        listener.withdraw(message.wrong)
                case Unmapped():
                    self._attached.discard(message.segment)

    def _settle(self, message: Done | Failed | Verified | CallReply) -> None:
        if isinstance(message, CallReply):
            self._sent[message.id].caches += message.caches
            if message.more:
                return
        job = self._sent.pop(message.id)
        self._let_go(job)
        answer = job.answer
        match message:
            case Failed():
                if not answer.done():
                    answer.set_exception(Refusal(message.code, message.detail, errors=message.errors))
                return
            case Done():
                self.pace.did(job.message.seconds, time.monotonic())
                answer.get_loop().call_soon(self._computed, message)  # later, after the route that waits
                if answer.done() and (saved := message.metadata.get("saved")) is not None:
                    self.tell(Forget(saved))  # the route no longer waits, so the caller does not get the id
                job.done, job.answered_by = message, self.incarnation
            case Verified():
                job.report = message.report
            case CallReply():
                job.saved = message.saved
        if not answer.done():
            answer.set_result(None)

    def _computed(self, done: Done) -> None:
        for listener in self._listeners:
            listener.computed(self, done)

    def _let_go(self, job: Job) -> None:
        self.load -= job.message.seconds
        job.release()

    def _died(self) -> None:
        if self.state is State.FAILED:
            self._lose("engine_lost", "the engine cannot work on this machine: see the log")
            return
        log.error("engine lost", jobs=len(self._sent))
        self.become(State.STARTING)
        self.before.add(self.incarnation)
        self.incarnation, self.holding = 0, Holding(0, 0)
        unbegun = list(self.unbegun)
        for job in unbegun:
            del self._sent[job.message.id]
            self._let_go(job)
        self._lose("engine_lost", "the engine died while it ran this request; retry")
        try:
            self.connect()
        except OSError as error:  # the socket's owner, the parent process, is gone
            self.failure = f"the engine's socket is gone: {error}"
            self.become(State.FAILED)
        for listener in self._listeners:
            listener.lost(self)
        self._unstarted(unbegun)

    def _lose(self, code: str, detail: str) -> None:
        """Close the connection, and refuse the jobs sent over it."""
        if self._channel is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._channel)
            loop.remove_writer(self._channel)
            self._channel.close()
            self._channel = None
        self._attached.clear()
        self._unsent.clear()
        lost, self._sent = list(self._sent.values()), {}
        for job in lost:
            self._let_go(job)
            if not job.answer.done():
                job.answer.set_exception(Refusal(code, detail))


class Engines:
    """All engines of the service. A job goes to the engine with the least predicted work.

    Callers may append to `listeners` at any time.
    """

    def __init__(self, listeners: Iterable[Listener] = ()) -> None:
        self.listeners = list(listeners)
        self._engines: list[Engine] = []
        self.ready: list[Engine] = []  # those that take jobs
        self._waiting_jobs: deque[Job] = deque()  # jobs that wait until an engine is ready

    def connect(self, addresses: Sequence[bytes]) -> None:
        """Connect to the engines at these addresses; `state` shows when one is ready."""
        self._engines = [Engine(address, self._changed, self._keep, self.listeners) for address in addresses]
        for engine in self._engines:
            engine.connect()

    def close(self) -> None:
        """Refuse the jobs that wait for an answer, and close the connections."""
        for engine in self._engines:
            engine.close()
        self._refuse_waiting("draining", "the server stopped before it answered this request; retry")

    def forget_segment(self, number: int) -> None:
        for engine in self._engines:
            engine.forget_segment(number)

    @property
    def state(self) -> State:
        """READY if any engine is ready; else the state of all engines if it is the same; else STARTING."""
        states = {engine.state for engine in self._engines}
        if State.READY in states:
            return State.READY
        return states.pop() if len(states) == 1 else State.STARTING

    @property
    def failure(self) -> str | None:
        """The reason of the first engine's failure if all engines have failed; else None."""
        reasons = [engine.failure for engine in self._engines]
        return reasons[0] if reasons and all(reasons) else None

    @property
    def device(self) -> DeviceInfo | None:
        """The device of the ready engines, which are all of one kind; None if no engine is ready."""
        return self.ready[0].device if self.ready else None

    @property
    def waiting_seconds(self) -> float:
        """The longest time in seconds that a job has waited and no engine has started it; 0 if none waits."""
        unbegun = itertools.chain(self._waiting_jobs, *(engine.unbegun for engine in self._engines))
        return max((time.monotonic() - job.since for job in unbegun), default=0.0)

    @property
    def pace(self) -> float:
        """The speed of all engines under load: seconds of predicted work that they do per second; 0 if unknown."""
        return sum([engine.pace.rate for engine in self.ready])

    def processes(self) -> Iterator[tuple[str, int]]:
        """Return name and process id of each engine whose device is known; the id is 0 if the engine has died."""
        return (engine.process for engine in self._engines if engine.device)

    def kernels_off(self) -> Iterator[tuple[str, dict[str, str]]]:
        """Return name and switched-off kernels of each ready engine."""
        return ((engine.process[0], engine.device.kernels_off) for engine in self.ready if engine.device)

    def _changed(self) -> None:
        self.ready = [engine for engine in self._engines if engine.state is State.READY]
        self._resume()

    def submit(self, job: Job) -> asyncio.Future[None]:
        """Submit a job, and return its `answer`, which is done when the job has the answer.

        If the caller cancels the future or sets it, the engine is told to drop the job. The future or this call raises
        Refusal.
        """
        ready, job.queued = self.ready or self._check_ready(), time.perf_counter()
        job.answer, job.since = asyncio.get_running_loop().create_future(), time.monotonic()
        self._send(job, ready)
        return job.answer

    def least_loaded(self, load: Callable[[Engine], int]) -> Engine:
        """Return the ready engine with the smallest `load`. Raises Refusal."""
        return min(self._check_ready(), key=load)

    @property
    def stopped(self) -> bool:
        """Whether the processes of all ready engines are stopped."""
        return all(engine.stopped for engine in self.ready)

    def holder(self, incarnation: int) -> bool:
        """Return whether the engine with this incarnation is ready. Raises Refusal 503 if this is not known yet."""
        if incarnation in self.incarnations():
            return True
        known_dead = any(incarnation in engine.before for engine in self._engines)
        if not known_dead and any(engine.state is State.STARTING for engine in self._engines):
            raise Refusal("not_ready", "an engine that may hold it is starting; retry")
        return False

    def incarnations(self) -> list[int]:
        """Return the incarnations of the ready engines."""
        return [engine.incarnation for engine in self.ready]

    def tell_all(self, message: SavedOwners) -> None:
        """Send a message to every ready engine."""
        for engine in self.ready:
            engine.tell(message)

    def forget_saved(self, incarnation: int, serial: int) -> None:
        """Free a saved forward whose id the caller has not received."""
        for engine in self.ready:
            if engine.incarnation == incarnation:
                engine.tell(Forget(serial))

    @property
    def holding(self) -> Holding:
        """The sums of caches, saved forwards and their bytes over all engines."""
        holdings = [Holding(0, 0), *(engine.holding for engine in self._engines)]
        return Holding(*(sum(counts) for counts in zip(*map(msgspec.structs.astuple, holdings), strict=True)))

    def _check_ready(self) -> list[Engine]:
        """Return the ready engines. Raises Refusal 503 if there are none."""
        if self.ready:
            return self.ready
        code = "draining" if self.state is State.STOPPED else "not_ready"
        raise Refusal(code, f"the engine is {self.state.value}")

    def _send(self, job: Job, ready: list[Engine]) -> None:
        able = [engine for engine in ready if engine.incarnation == job.incarnation] if job.incarnation else ready
        if not able:
            if job.message.serials:
                refusal = Refusal(job.lost, "the engine that held it restarted")
            else:
                refusal = Refusal("engine_lost", "the engine died before it started this request; retry")
            job.answer.set_exception(refusal)
            return
        engine = min(able, key=lambda engine: engine.load) if len(able) > 1 else able[0]
        engine.submit(job)
        job.answer.add_done_callback(partial(engine.cancel, job))

    def _keep(self, lost: list[Job]) -> None:
        """Send the jobs that a dead engine had not started to another engine, or store them until one is ready."""
        self._waiting_jobs.extend(lost)
        self._resume()

    def _resume(self) -> None:
        """Send the waiting jobs if an engine is ready. Refuse them if no engine will be."""
        if self.state is State.FAILED:
            self._refuse_waiting("engine_lost", "no engine can work on this machine: see the log")
        while self._waiting_jobs and self.state is State.READY:
            if not (job := self._waiting_jobs.popleft()).answer.done():
                self._send(job, self.ready)

    def _refuse_waiting(self, code: str, detail: str) -> None:
        while self._waiting_jobs:
            if not (job := self._waiting_jobs.popleft()).answer.done():
                job.answer.set_exception(Refusal(code, detail))
