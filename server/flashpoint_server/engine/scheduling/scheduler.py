"""The scheduler decides what an engine does next: which requests run, in which parts, and how many at a time.

On a CPU a request is cut into parts, between its sequences and its heads. Tasks take the parts one by one in the
queue's order (waiting.py). So all waiting requests share the cores, and a request that is cancelled or late ends
between two parts. A part runs on one core. One additional lane runs short parts, so that no core is idle while a lane
waits for Python's lock or for the core of an HTTP process. On a GPU, and under Triton's interpreter, a task is a launch
of all requests that may share it.

    admitted → waiting → started → answered      waiting → cancelled or late: answered without a start

A call that uses caches or a saved forward first waits until the earlier calls on them have ended (turns.py). Memory for
a forward to be saved is reserved when the call starts.

The scheduler uses neither sockets nor torch. The device describes its abilities (`Resources`); other objects run the
tasks and answer the requests.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Protocol

import structlog

from flashpoint_contract.spec import Row
from flashpoint_kernels import Problem
from flashpoint_server.engine.scheduling.cache_order import CacheQueue
from flashpoint_server.engine.scheduling.entry import Entry, Group, Lengths, OutOfMemoryError, Worker
from flashpoint_server.engine.scheduling.tasks import (
    Ask,
    BenchmarkSlice,
    Compute,
    Launch,
    Plugin,
    SaveForward,
    Split,
    Task,
)
from flashpoint_server.engine.scheduling.waiting import Budget, Waiting
from flashpoint_server.engine.state.saved import SavedForward
from flashpoint_server.ipc.bodies import Save
from flashpoint_server.ipc.messages import Submit
from flashpoint_server.refusal import out_of_time

log = structlog.stdlib.get_logger("flashpoint.engine")

# A part of a few milliseconds while nothing else waits: no thread needs to listen meanwhile, and a wake-up costs 10%.
BRIEF_SECONDS = 0.004  # predicted
BRIEF_BYTES = 1 << 24
UNCUT_SECONDS = 0.0005  # predicted: a shorter call over caches is one part
HOLD_SECONDS = 0.05  # maximum time for which no task starts because a slice waits for running ones
TOGETHER = 64  # maximum of requests that are cut together
LONGER = 2.0  # a request that is cut with another takes at most this many times its predicted seconds


class Resources(Protocol):
    """The device as the scheduler sees it: how much runs in parallel, and how requests are prepared."""

    is_cpu: bool
    cores: int
    launches: int

    def cuts(self, backend: str) -> bool: ...
    def rows(self, job: Entry) -> tuple[Row, ...]: ...
    def parts(self, job: Entry) -> list[Problem]: ...
    def kin(self, job: Entry) -> Hashable | None: ...
    def compile(self, job: Entry) -> Future[None] | None: ...
    def reserve(self, asked: Save) -> SavedForward: ...
    def drop(self, kept: SavedForward) -> None: ...


class Holder(Protocol):
    """The ledger as the scheduler sees it: items do not expire between `enter` and `leave` of a call."""

    due: float  # when an item may have expired, in `time.monotonic` seconds

    def enter(self, serials: Sequence[int]) -> None: ...
    def leave(self, serials: Sequence[int], *, used: bool) -> None: ...


class Scheduler:
    """See the module. Hold `lock` for all calls; it protects the queue, the entries and the peers' segments.

    `answer` is called with each request that has failed, or whose parts have all ended. `wake` is called when there may
    be a task that no thread has asked for.
    """

    def __init__(
        self,
        device: Resources,
        budget: Budget,
        answer: Callable[[Entry], None],
        wake: Callable[[], None],
        plugins: Sequence[Plugin] = (),
        holder: Holder | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self.plugins = plugins
        self._log = log.bind()  # bound now: an unbound logger looks up its configuration at each call
        self._device = device
        self._send_answer = answer
        self._wake = wake
        self._holder = holder
        self._turns: CacheQueue[Entry] = CacheQueue()
        self._waiting: Waiting[Entry | Group] = Waiting(budget)
        self._compiled: set[Hashable] = set()  # launch keys
        self._waiting_for_compile: dict[
            Hashable, list[Entry]
        ] = {}  # requests that wait for the compilation of their launch key
        self._stoppable: list[Entry] = []  # requests in tasks that can end early: cuts and verifications
        self._running = 0  # tasks
        self._launches = 0  # of the running tasks
        self._long = 0  # of the running tasks
        self._alone = False  # a slice runs, and nothing else
        self._holding: float | None = None  # time since which nothing starts, so that a slice can run

    # Requests

    def admit(self, message: Submit, peer: Worker) -> None:
        """Put a request into the queue. Raises ProblemError if its problem is not valid.

        A request whose kernel must be compiled waits outside the queue, and does not delay other requests.
        """
        entry = Entry.of(message, peer, self._device.cuts)
        if entry.caches:
            assert self._holder is not None
            self._holder.enter(entry.caches)
            if not self._turns.join(entry):
                return
        self._queue(entry)

    def _queue(self, entry: Entry) -> None:
        """Put a request into the queue, or hold it until its kernel is compiled."""
        key = entry.key
        if entry.over_caches and key is None:
            entry.kin = self._device.kin(entry)  # no other call changes its caches from now on
        attention = key is not None and entry.planned is not None and not entry.over_caches
        if not attention or entry.attention.backend != "triton" or key in self._compiled:
            self._waiting.put(entry)
        elif key in self._waiting_for_compile:
            self._waiting_for_compile[key].append(entry)
        elif not entry.mapped:
            self._waiting.put(entry)
        else:
            self._compile(entry, key)

    def _compile(self, entry: Entry, key: Hashable) -> None:
        try:
            self._device.rows(entry)
            compiling = self._device.compile(entry)
        except OutOfMemoryError:
            self._waiting.put(entry)  # compiled when there is memory to run it
        except Exception as error:  # an error of one request must not affect its peer
            self._fail(entry, error)
        else:
            if compiling is None:
                self._compiled.add(key)
                self._waiting.put(entry)
            else:
                self._waiting_for_compile[key] = [entry]
                compiling.add_done_callback(lambda _: self._has_compiled(key))

    def _has_compiled(self, key: Hashable) -> None:
        """Release the requests whose kernels are compiled. If compilation failed, their launch reports the error."""
        with self.lock:
            self._compiled.add(key)
            for entry in self._waiting_for_compile.pop(key):
                self._waiting.put(entry)
            self._wake()

    def cancel(self, peer: Worker, number: int) -> None:
        """Drop a request that nobody waits for any more. It is still answered."""

        def asked(entry: Entry) -> bool:
            return entry.peer is peer and entry.submit.id == number

        for entry in self._remove(asked):
            self._fail(entry, out_of_time())
        self._stop(asked)

    def forget(self, peer: Worker) -> None:
        """Drop all requests of an HTTP process that has disconnected."""
        found = self._remove(lambda entry: entry.peer is peer)
        # others wait for their end, or for their memory
        awaited = [entry for entry in found if entry.caches or entry.kept is not None]
        for entry in awaited:  # all fail before the first ends, so that it does not queue the next
            entry.failure = out_of_time()
        for entry in awaited:
            self._answer(entry)
        self._stop(lambda entry: entry.peer is peer)

    def _stop(self, unwanted: Callable[[Entry], bool]) -> None:
        """Let started requests that are `unwanted` end early: they have failed, and parts only for them are dropped."""
        cut = [item for item in self._waiting.items if isinstance(item, Group)]
        for entry in filter(unwanted, [*self._stoppable, *(entry for group in cut for entry in group.entries)]):
            entry.failure = entry.failure or out_of_time()
        for group in cut:
            if group.unwanted:
                self._waiting.remove(lambda item, group=group: item is group)  # type: ignore[misc]
                self._drop_parts(group)

    def _remove(self, unwanted: Callable[[Entry], bool]) -> list[Entry]:
        """Remove the requests that are `unwanted` from the queue and from the waiting lists."""
        items = self._waiting.remove(lambda item: isinstance(item, Entry) and unwanted(item))
        found = [*(item for item in items if isinstance(item, Entry)), *self._turns.waiting(unwanted)]
        for key, held in self._waiting_for_compile.items():
            found += [entry for entry in held if unwanted(entry)]
            self._waiting_for_compile[key] = [entry for entry in held if not unwanted(entry)]
        return found

    def _drop_parts(self, group: Group) -> None:
        """Drop the parts that have not started. The requests are answered when the running parts have ended."""
        group.drop_parts()
        if not group.left:
            self._end(group)

    def _end(self, group: Group) -> None:
        """Answer the requests of a group that has no parts left any more, or let their tensors be saved."""
        for entry in group.entries:
            entry.peer.running -= 1
            if entry.kept is None or entry.failure is not None:
                self._answer(entry)
            else:
                entry.computed = True
                self._waiting.put(entry)
                self._wake()

    def _fail(self, entry: Entry, error: Exception) -> None:
        entry.failure = error
        self._answer(entry)

    def _answer(self, entry: Entry) -> None:
        self._send_answer(entry)
        self._end_turn(entry)

    def _end_turn(self, entry: Entry) -> None:
        """Let the next calls on the same caches run, and free the memory of a forward that failed."""
        if entry.kept is not None and entry.failure is not None:
            self._device.drop(entry.kept)
        if entry.caches:
            assert self._holder is not None
            self._holder.leave(entry.caches, used=entry.submit.body.uses and entry.failure is None)
            for other in self._turns.leave(entry):
                if other.failure is None:  # else `forget` is about to drop it
                    self._queue(other)
                    self._wake()

    # Tasks

    def take(self) -> Task | None:
        """Return a task to run now, or None if none may start. Call `finish` when it has ended."""
        while not self._alone:
            now = time.monotonic()
            for plugin in self.plugins:
                if plugin.active and plugin.wants(now, others=bool(self._waiting.items)):
                    if not self._running:
                        return self._begin(self._slice(plugin))
                    self._holding = now if self._holding is None else self._holding
                    if now < self._holding + HOLD_SECONDS:
                        return None  # nothing else starts, so the slice runs alone soon
                    plugin.postpone(now)  # the running tasks take too long to wait for
            self._holding = None
            if not self._waiting.items:
                return None
            found = self._waiting.take(now, groups=self._may_launch, may=self._has_lane)
            if not found:
                return None
            if isinstance(group := found[0], Group):
                if self._goes_on(group):
                    return self._begin(self._part(group))
                continue
            entries = [item for item in found if isinstance(item, Entry)]
            if entries[0].kin is not None:
                entries += self._kindred(entries[0])
            if batch := [entry for entry in entries if self._begins(entry)]:
                return self._begin(self._task(batch))
        return None

    def _kindred(self, first: Entry) -> list[Entry]:
        """Remove and return waiting requests to be cut together with one of equal `kin`."""
        some: list[Entry] = []

        def joins(item: Entry | Group) -> bool:
            if not isinstance(item, Entry) or item.kin != first.kin or len(some) >= TOGETHER - 1:
                return False
            if item.submit.seconds > LONGER * first.submit.seconds:
                return False
            some.append(item)
            return True

        self._waiting.remove(joins)
        return some

    def next_look(self) -> float | None:
        """Return the time at which `take` may return a task without an event, in `time.monotonic` seconds."""
        if self._alone:
            return None
        if self._holding is not None:
            return self._holding + HOLD_SECONDS
        expires = math.inf if self._holder is None else self._holder.due
        closes = self._waiting.closes() if self._waiting.items and self._may_launch else math.inf
        return None if (at := min(expires, closes)) == math.inf else at

    def finish(self, task: Task, failure: Exception | None) -> Task | None:
        """Record the end of a task, with the error of its part or of its cutting.

        Return the task that the same thread must run now, if any: the first part of a request that it has cut.
        """
        self._running -= 1
        self._long -= task.long
        for entry in task.entries:
            entry.peer.running -= 1
        match task:
            case Compute():
                self._part_ended(task.group, failure)
            case Split():
                return self._cut_ended(task.group, failure)
            case SaveForward():
                entry = task.entries[0]
                entry.failure = failure
                self._answer(entry)
            case Ask():
                self._end_turn(task.entries[0])
            case Launch():
                for entry in task.entries:
                    if entry.planned is None:  # a verification
                        self._stoppable.remove(entry)
                    self._end_turn(entry)
                self._launches -= 1
                self._wake()  # the next one may have to wait until a batch closes
            case BenchmarkSlice():
                self._alone = False
                self._wake()
        return None

    def _begin(self, task: Task) -> Task:
        self._running += 1
        self._long += task.long
        for entry in task.entries:
            entry.peer.running += 1
        return task

    def _slice(self, plugin: Plugin) -> BenchmarkSlice:
        self._holding = None
        self._alone = True
        plugin.begin()
        return BenchmarkSlice(plugin)

    def _task(self, batch: list[Entry]) -> Task:
        """Return the task for requests that run together: one, unless they share a launch or the first keys."""
        entry = batch[0]
        if entry.key is not None:
            self._launches += 1
            if entry.planned is None:  # a verification
                self._stoppable.append(entry)
            return Launch(batch)
        if entry.planned is None:
            return Ask((entry,))
        if entry.computed:
            return SaveForward((entry,))
        group = Group(batch)
        for entry in batch:
            entry.peer.running += 1
        if entry.many:
            self._stoppable += batch
            cores = max(1, self._device.cores - self._running - len(self._waiting.items))
            brief = bool(entry.caches) and group.seconds <= UNCUT_SECONDS and not self._waiting.items
            return Split(batch, group, entry.long, brief, cores)
        group.add(entry.parts)
        return self._part(group)

    def _part(self, group: Group) -> Compute:
        """Return the task of the next part."""
        problem = group.parts.popleft()
        if group.parts:
            self._waiting.put(group)
            self._wake()
        small = group.seconds <= BRIEF_SECONDS and group.nbytes <= BRIEF_BYTES
        return Compute(group.entries, group, problem, group.long, small and not self._waiting.items)

    @property
    def _may_launch(self) -> bool:
        """Whether a launch may start. On a CPU it needs a core."""
        free = self._running < self._device.cores or not self._device.is_cpu
        return free and self._launches < self._device.launches

    def _has_lane(self, item: Entry | Group) -> bool:
        """Return whether a part of the request may start: on a free core, or on the additional lane.

        The additional lane takes a short part if it is the first in the queue, or if all cores run long parts. So a
        request that needs a free core is not passed for ever.
        """
        if self._running < self._device.cores:
            return True
        if item.long or self._running > self._device.cores:
            return False
        return self._waiting.items[0] is item or self._running == self._long

    def _begins(self, entry: Entry) -> bool:
        """Start a request that has not started. Return False if it failed or is late, and was answered."""
        try:
            if _late(entry):
                raise out_of_time()
            if not entry.mapped:
                raise OutOfMemoryError
            if entry.computed:
                return True
            entry.begin()
            self._log.debug("begin", request_id=entry.submit.request_id, kind=type(entry.submit.body).__name__)
            if entry.planned is None:
                return True
            if entry.attention.saved is not None and (save := entry.attention.save) is not None:
                entry.kept = self._device.reserve(save)
            if entry.key is None:
                if not entry.many:
                    entry.parts = entry.cut(self._device.parts)
            elif not entry.over_caches:
                entry.lengths = Lengths.of(self._device.rows(entry))
        except Exception as error:
            self._fail(entry, error)
            return False
        return True

    def _goes_on(self, group: Group) -> bool:
        """Return whether some request of the group is still in time. If not, its parts are dropped."""
        for entry in group.entries:
            if _late(entry):
                entry.failure = entry.failure or out_of_time()
        if group.unwanted:
            self._drop_parts(group)
        return not group.unwanted

    def _part_ended(self, group: Group, failure: Exception | None) -> None:
        group.left -= 1
        if failure is not None:
            self._waiting.remove(lambda item: item is group)
            self._fail_all(group, failure)
        elif not group.left:
            self._end(group)

    def _cut_ended(self, group: Group, failure: Exception | None) -> Task | None:
        for entry in group.entries:
            self._stoppable.remove(entry)
        if failure is not None:
            self._fail_all(group, failure)
        elif group.unwanted or not group.left:  # cancelled while they were cut, or computed
            self._drop_parts(group)
        else:
            return self._begin(self._part(group))
        return None

    def _fail_all(self, group: Group, failure: Exception) -> None:
        for entry in group.entries:
            entry.failure = entry.failure or failure
        self._drop_parts(group)


def _late(entry: Entry) -> bool:
    return entry.submit.deadline is not None and time.monotonic() >= entry.submit.deadline
