"""The scheduler decides what an engine does next: which requests run, in which parts, and how many at a time.

On a CPU a request is cut into parts, between its sequences and its heads. Tasks take the parts one by one in the
queue's order (waiting.py). So all waiting requests share the cores, and a request that is cancelled or late ends
between two parts. A part runs on one core, in one thread (lane). One additional lane runs short parts, so that no core
is idle while a lane waits for Python's lock, or while HTTP processes occupy its core. On a GPU, and under Triton's
interpreter, a task is a launch of all requests that may share it.

    admitted → waiting → started → answered      waiting → cancelled or late: answered without a start

A call that uses caches or a saved forward first waits until the earlier calls on them have ended (cache_order.py).
Memory for a forward to be saved is reserved when the call starts.

The scheduler uses neither sockets nor torch. The device describes its abilities (`Resources`); other objects run the
tasks and answer the requests.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from operator import attrgetter
from typing import Protocol

import structlog

from flashpoint_contract.spec import Row
from flashpoint_kernels import Problem
from flashpoint_server.engine.scheduling.cache_order import CacheQueue
from flashpoint_server.engine.scheduling.engine_request import LONG_SECONDS, EngineRequest, OutOfMemoryError, Worker
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
from flashpoint_server.ipc.price import PASSED
from flashpoint_server.refusal import out_of_time

log = structlog.stdlib.get_logger("flashpoint.engine")

# A part is `brief` if nothing else waits and its whole group has at most these predicted seconds and bytes. No other
# lane is woken to listen while a brief part runs, because this would add 10% to its time.
BRIEF_SECONDS = 0.004
BRIEF_BYTES = 1 << 24
UNCUT_SECONDS = 0.0005  # a `Split` of calls over caches is brief up to these predicted seconds, if nothing else waits
HOLD_SECONDS = 0.05  # maximum seconds for which no task starts because a benchmark slice waits for the running tasks
TOGETHER = 64  # maximum number of requests that are cut together
_nbytes = attrgetter("nbytes")
LONGER = 2.0  # a request is cut together with another only if it takes at most this many times the other's seconds


class Resources(Protocol):
    """The device as the scheduler sees it: how much runs in parallel, and how requests are prepared."""

    shares_cores: bool
    cores: int
    launches: int

    def rows(self, job: EngineRequest) -> tuple[Row, ...]: ...
    def parts(self, job: EngineRequest) -> list[Problem]: ...
    def kin(self, job: EngineRequest) -> Hashable | None: ...
    def compile(self, job: EngineRequest) -> Future[None] | None: ...
    def reserve(self, save: Save) -> SavedForward: ...
    def drop(self, forward: SavedForward) -> None: ...


class Holder(Protocol):
    """The ledger as the scheduler sees it: items do not expire between `enter` and `leave` of a call."""

    due: float  # when to look for expired items next, in `time.monotonic` seconds

    def enter(self, serials: Sequence[int]) -> None: ...
    def leave(self, serials: Sequence[int], *, used: bool) -> None: ...


class Scheduler:
    """The scheduler. Callers must hold `lock`, which protects the queue, the requests and the workers' segments.

    `answer` is called with each request that has failed, or whose parts have all ended. `wake` is called when there may
    be a new task for a sleeping thread.
    """

    def __init__(
        self,
        device: Resources,
        budget: Budget,
        answer: Callable[[EngineRequest], None],
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
        self._turns = CacheQueue()
        self._waiting: Waiting[EngineRequest] = Waiting(budget)
        self._compiled: set[Hashable] = set()  # launch keys whose kernels are compiled
        self._waiting_for_compile: dict[
            Hashable, list[EngineRequest]
        ] = {}  # requests that wait for the compilation of their launch key
        self._stoppable: list[EngineRequest] = []  # requests in tasks that can end early: `Split` and verifications
        self._running = 0  # number of running tasks
        self._launches = 0  # number of running launches
        self._long = 0  # number of running long tasks
        self._alone = False  # whether a benchmark slice runs; no other task starts then
        self._holding: float | None = None  # since when no task starts, because a benchmark slice waits; None otherwise

    # Requests

    def admit(self, request: EngineRequest) -> None:
        """Put a request into the queue.

        A request whose kernel must be compiled waits outside the queue, and does not delay other requests.
        """
        if request.caches:
            assert self._holder is not None
            self._holder.enter(request.caches)
            if not self._turns.join(request):
                return
        self._queue(request)

    def _queue(self, request: EngineRequest) -> None:
        """Put a request into the queue, or into `_waiting_for_compile` until its kernel is compiled."""
        key = request.key
        if request.over_caches and key is None:
            request.kin = self._device.kin(request)  # known now: no other call changes its caches before it ends
        attention = key is not None and request.planned is not None and not request.over_caches
        if not attention or request.backend != "triton" or key in self._compiled:
            self._waiting.put(request)
        elif key in self._waiting_for_compile:
            self._waiting_for_compile[key].append(request)
        elif not request.mapped:
            self._waiting.put(request)
        else:
            self._compile(request, key)

    def _compile(self, request: EngineRequest, key: Hashable) -> None:
        try:
            self._device.rows(request)
            compiling = self._device.compile(request)
        except OutOfMemoryError:
            self._waiting.put(request)  # its launch will compile the kernel
        except Exception as error:  # the error of one request must not disconnect its HTTP process
            self._fail(request, error)
        else:
            if compiling is None:
                self._compiled.add(key)
                self._waiting.put(request)
            else:
                self._waiting_for_compile[key] = [request]
                compiling.add_done_callback(lambda _: self._has_compiled(key))

    def _has_compiled(self, key: Hashable) -> None:
        """Queue the requests that waited for this kernel. If its compilation failed, their launch reports the error."""
        with self.lock:
            self._compiled.add(key)
            for request in self._waiting_for_compile.pop(key):
                self._waiting.put(request)
            self._wake()

    def cancel(self, worker: Worker, number: int) -> None:
        """Drop a request whose result is no longer needed. It is answered when no task uses its memory any more."""

        def is_cancelled(request: EngineRequest) -> bool:
            return request.worker is worker and request.submit.id == number

        for request in self._remove(is_cancelled):
            self._fail(request, out_of_time())
        self._stop(is_cancelled)

    def forget(self, worker: Worker) -> None:
        """Drop all requests of an HTTP process that has disconnected."""
        dropped = self._remove(lambda request: request.worker is worker)
        # End only these: requests of other processes may wait for their caches, or need the memory that they reserved.
        awaited = [request for request in dropped if request.caches or request.saved_forward is not None]
        for request in awaited:  # first mark all as failed: the end of one must not queue another one of them
            request.failure = out_of_time()
        for request in awaited:
            self._answer(request)
        self._stop(lambda request: request.worker is worker)

    def _stop(self, unwanted: Callable[[EngineRequest], bool]) -> None:
        """Mark started requests that are `unwanted` as failed, and drop the parts that only such requests need."""
        cut = [item for item in self._waiting.items if item.parts]
        parts_of = [request for first in cut for request in (first, *first.others)]
        for request in filter(unwanted, [*self._stoppable, *parts_of]):
            request.failure = request.failure or out_of_time()
        for first in cut:
            if first.unwanted:
                self._waiting.items.remove(first)
                self._drop_parts(first)

    def _remove(self, unwanted: Callable[[EngineRequest], bool]) -> list[EngineRequest]:
        """Remove the requests that are `unwanted` from the queue and from the waiting lists."""
        items = self._waiting.remove(lambda item: not item.parts and unwanted(item))
        removed = [*items, *self._turns.waiting(unwanted)]
        for key, requests in self._waiting_for_compile.items():
            removed += [request for request in requests if unwanted(request)]
            self._waiting_for_compile[key] = [request for request in requests if not unwanted(request)]
        return removed

    def _drop_parts(self, first: EngineRequest) -> None:
        """Drop the parts that have not started. The requests are answered when the running parts have ended."""
        first.left -= len(first.parts)
        first.parts.clear()
        if not first.left:
            self._end(first)

    def _end(self, first: EngineRequest) -> None:
        """Answer a request whose parts have all ended, and those that were cut together with it.

        Queue those that still have key weights to compute, or whose tensors must be saved first.
        """
        for request in (first, *first.others):
            if request.failure is None and request.weighing:
                parts, request.weighing = request.weighing, ()
                request.lead(())
                request.add(parts)
                self._waiting.put(request)
                self._wake()
                continue
            request.worker.running -= 1
            if request.saved_forward is None or request.failure is not None:
                self._answer(request)
            else:
                request.computed = True
                self._waiting.put(request)
                self._wake()

    def _fail(self, request: EngineRequest, error: Exception) -> None:
        request.failure = error
        self._answer(request)

    def _answer(self, request: EngineRequest) -> None:
        self._send_answer(request)
        if request.caches or request.saved_forward is not None:
            self._end_turn(request)

    def _end_turn(self, request: EngineRequest) -> None:
        """Queue the next calls on the same caches, and free the reserved memory of a forward that failed."""
        if request.saved_forward is not None and request.failure is not None:
            self._device.drop(request.saved_forward)
        if request.caches:
            assert self._holder is not None
            self._holder.leave(request.caches, used=request.submit.uses and request.failure is None)
            for other in self._turns.leave(request):
                if other.failure is None:  # otherwise `forget` answers it next
                    self._queue(other)
                    self._wake()

    # Tasks

    def take(self) -> Task | None:
        """Return a task to run now, or None if none may start. Call `finish` when it has ended."""
        while not self._alone:
            now = time.monotonic()
            for plugin in self.plugins:
                if not plugin.active:
                    continue
                if plugin.wants(now, waiting=bool(self._waiting.items), running=bool(self._running)):
                    if not self._running:
                        return self._begin(self._slice(plugin))
                    self._holding = now if self._holding is None else self._holding
                    if now < self._holding + HOLD_SECONDS:
                        return None  # nothing else starts, so the slice runs alone soon
                    plugin.postpone(now)  # the running tasks take too long to wait for
                elif not self._running and plugin.due < math.inf:
                    self._wake()  # the listening thread must note when the plugin is due
            self._holding = None
            if not self._waiting.items:
                return None
            requests = self._waiting.take(now, self._has_lane)
            if not requests:
                return None
            first = requests[0]
            if first.parts:
                if self._goes_on(first):
                    return self._begin(self._part(first))
                continue
            if first.kin is not None:
                requests += self._kindred(first)
            if batch := [*filter(self._begins, requests)]:
                return self._begin(self._task(batch))
        return None

    def _kindred(self, first: EngineRequest) -> list[EngineRequest]:
        """Remove and return the waiting requests that have the same `kin` as `first` and are cut together with it."""
        some: list[EngineRequest] = []

        def joins(item: EngineRequest) -> bool:
            if item.parts or item.kin != first.kin or len(some) >= TOGETHER - 1:
                return False
            if item.submit.seconds > LONGER * first.submit.seconds:
                return False
            some.append(item)
            return True

        self._waiting.remove(joins)
        return some

    def next_look(self) -> float | None:
        """Return when to call `take` again even if no event occurs, in `time.monotonic` seconds; None for never."""
        if self._alone:
            return None
        if self._holding is not None:
            return self._holding + HOLD_SECONDS
        at = math.inf if self._holder is None else self._holder.due
        if self._waiting.items and self._may_launch:
            at = min(at, self._waiting.closes())
        for plugin in self.plugins:
            if plugin.active:
                at = min(at, plugin.due)
        return None if at == math.inf else at

    def finish(self, task: Task, failure: Exception | None) -> Task | None:
        """Record the end of a task, with the error that `Executor.run` returned.

        Return the task that the same thread must run now, if any: the first part of a request that it has cut.
        """
        self._running -= 1
        self._long -= task.long
        for request in task.requests:
            request.worker.running -= 1
        match task:
            case Compute():
                first = task.requests[0]
                first.left -= 1
                if failure is not None:
                    self._waiting.remove(lambda item: item is first)
                    self._fail_all(first, failure)
                elif not first.left:
                    self._end(first)
            case Split():
                return self._cut_ended(task.requests[0], failure)
            case SaveForward():
                request = task.requests[0]
                request.failure = failure
                self._answer(request)
            case Ask():
                self._end_turn(task.requests[0])
            case Launch():
                for request in task.requests:
                    if request.planned is None:  # a verification
                        self._stoppable.remove(request)
                    self._end_turn(request)
                self._launches -= 1
                self._wake()  # a launch may start again: the listening thread must note when the next batch closes
            case BenchmarkSlice():
                self._alone = False
                self._wake()
        return None

    def _begin(self, task: Task) -> Task:
        self._running += 1
        self._long += task.long
        for request in task.requests:
            request.worker.running += 1
        return task

    def _slice(self, plugin: Plugin) -> BenchmarkSlice:
        self._holding = None
        self._alone = True
        plugin.begin()
        return BenchmarkSlice(plugin)

    def _task(self, batch: list[EngineRequest]) -> Task:
        """Return the task for `batch`, which has several requests only if they share a launch or are cut together."""
        request = batch[0]
        if request.key is not None:
            self._launches += 1
            if request.planned is None:  # a verification
                self._stoppable.append(request)
            return Launch(batch)
        if request.planned is None:
            return Ask((request,))
        if request.computed:
            return SaveForward((request,))
        for each in batch:
            each.worker.running += 1
        if request.many:
            long = request.part_seconds > LONG_SECONDS
            if len(batch) > 1:
                request.lead(batch[1:])
            self._stoppable += batch
            cores = max(1, self._device.cores - self._running - len(self._waiting.items))
            brief = bool(request.caches) and request.seconds <= UNCUT_SECONDS and not self._waiting.items
            return Split(batch, long, brief, cores)
        return self._part(request)

    def _part(self, first: EngineRequest) -> Compute:
        """Return the task that computes the next part of a request, and of those that were cut together with it."""
        part = first.parts.popleft()
        first.rank -= PASSED * first.part_seconds  # so a request with few parts left ranks like a short one
        if first.parts:
            self._waiting.put(first)
            self._wake()
        requests = (first, *first.others)
        small = first.seconds <= BRIEF_SECONDS and sum(map(_nbytes, requests)) <= BRIEF_BYTES
        return Compute(requests, part, first.part_seconds > LONG_SECONDS, small and not self._waiting.items)

    @property
    def _may_launch(self) -> bool:
        """Whether another launch may start: fewer than the device's maximum run, and on a CPU a core is free."""
        free = self._running < self._device.cores or not self._device.shares_cores
        return free and self._launches < self._device.launches

    def _has_lane(self, item: EngineRequest) -> bool:
        """Return whether a launch, or a part of the request, may start: on a free core, or on the additional lane.

        The additional lane runs a short part if it is the first in the queue, or if all cores run long parts. So a
        request that needs a free core is not overtaken by short parts for ever.
        """
        if item.key is not None:
            return self._may_launch
        if self._running < self._device.cores:
            return True
        if item.part_seconds > LONG_SECONDS or self._running > self._device.cores:
            return False
        return self._waiting.items[0] is item or self._running == self._long

    def _begins(self, request: EngineRequest) -> bool:
        """Start a request if it has not started. Return False if it is late or fails; it was then answered."""
        try:
            if (deadline := request.submit.deadline) is not None and time.monotonic() >= deadline:
                raise out_of_time()
            if request.computed:
                return True
            request.begin()
            kind = type(request.submit.body).__name__ if request.planned is None else "attention"
            self._log.debug("begin", request_id=request.submit.request_id, kind=kind)
            if request.planned is None:
                return True
            if isinstance(save := request.submit.saved, Save):
                request.saved_forward = self._device.reserve(save)
            if request.key is None:
                if not request.many:
                    request.cut(self._device.parts, self._waiting.budget)
            elif not request.over_caches:
                request.rows = self._device.rows(request)
        except Exception as error:
            self._fail(request, error)
            return False
        return True

    def _goes_on(self, first: EngineRequest) -> bool:
        """Return whether the result of a request, or of any cut together with it, is still needed. Else drop its parts.

        Requests that are late are marked as failed.
        """
        for request in (first, *first.others):
            if (deadline := request.submit.deadline) is not None and time.monotonic() >= deadline:
                request.failure = request.failure or out_of_time()
        if unwanted := first.unwanted:
            self._drop_parts(first)
        return not unwanted

    def _cut_ended(self, first: EngineRequest, failure: Exception | None) -> Task | None:
        for request in (first, *first.others):
            self._stoppable.remove(request)
        if failure is not None:
            self._fail_all(first, failure)
        elif first.unwanted or not first.left:  # cancelled during the task, or the task has computed the only part
            self._drop_parts(first)
        else:
            return self._begin(self._part(first))
        return None

    def _fail_all(self, first: EngineRequest, failure: Exception) -> None:
        for request in (first, *first.others):
            request.failure = request.failure or failure
        self._drop_parts(first)
