"""An engine's records of HTTP processes, and of requests from arrival to answer. This module uses no device."""

from __future__ import annotations

import contextlib
import mmap
import os
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter, mul
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from flashpoint_contract.caches import plan_cached
from flashpoint_contract.spec import Row, Spec, plan
from flashpoint_contract.tensors import TensorInfo
from flashpoint_kernels import Problem
from flashpoint_kernels.problems.problem import launch_key
from flashpoint_server.engine.scheduling.waiting import Budget
from flashpoint_server.engine.state.memory import MappedMemory
from flashpoint_server.engine.state.saved import SavedForward
from flashpoint_server.ipc.bodies import SLOT, PlacedTensor, PlannedCall, VerifyCall, encode, read_planned
from flashpoint_server.ipc.messages import Channel, FromEngine, Submit, ToEngine
from flashpoint_server.ipc.staging import LARGEST

if TYPE_CHECKING:
    from flashpoint_server.engine.caches.attending import CachedCall, CallTensors

log = structlog.stdlib.get_logger("flashpoint.engine")

PATIENCE = 5.0  # maximum seconds for which a send waits for an HTTP process that does not read its answers
# Maximum cached plans, and maximum slots with the cached parts of a plan, for one worker. Both take some KiB each, but
# the parts of small gradients up to 512 KiB.
KEPT = 256
# Requests with at most this many sequences are cut into parts under the scheduler's lock, in less than a millisecond,
# and their parts can be cached.
FEW_SEQUENCES = 64
LONG_SECONDS = 0.01  # a part with more predicted seconds is long: the additional lane of scheduler.py never runs it
About = tuple[int, int, float, int]  # the FLOPs, padding, fill and splits of a launch, as in `Done`
ALONE: Hashable = "alone"  # in a plan, the key of requests that share no launch: each of them gets a unique key
# The fields q_len and kv_len of a row: read by index, which is faster than by attribute; there may be 65,536 rows.
_Q_LEN, _KV_LEN = itemgetter(3), itemgetter(6)
_MOST = 1e18  # maximum FLOPs in a message, far beyond any device


class OutOfMemoryError(Exception):
    """The device has not enough memory for this request now."""


# The tensors and options of problems whose parts can be cached: no part depends on their values but by their memory.
_CACHED = frozenset({
    "q", "k", "v", "attn_mask", "alibi_slopes", "sinks", "do", "dlse", "o", "lse",
    "layout", "causal", "causal_alignment", "window", "block_size", "scale", "softcap", "dropout_seed", "precision",
    "return_lse", "grads", "deterministic", "backend",
})  # fmt: skip


@dataclass(eq=False)
class PlannedProblem:
    """A plan: the problem that all its calls have in common. The engine keeps it for later calls."""

    call: PlannedCall
    spec: Spec
    key: Hashable | None  # as in `EngineRequest`, or ALONE
    regions: frozenset[int]  # numbers of the segments, beside the slot's, that contain its tensors
    kept: bool  # whether the parts depend on no values and no seed, and are few: a `PlacedProblem` keeps them
    metadata: dict[str, Any] = field(default_factory=dict)  # what the answers have in common; set by the first one

    @classmethod
    def of(cls, call: PlannedCall, cuts: Callable[[str], bool]) -> PlannedProblem:
        """Return the plan of calls. `cuts` is as in `EngineRequest.of`. Raises ProblemError if it is not valid."""
        infos = {t.name: TensorInfo(t.dtype, t.shape) for t in call.inputs} | dict(call.recalled)
        if call.layer is None:
            spec = plan(infos, call.options, call.direction)
        else:
            spec = plan_cached(infos, call.options, call.layer, call.caches)
        key: Hashable | None = None if cuts(call.backend) else ALONE
        if call.backend == "triton":  # requests with equal keys share a launch
            key = launch_key(spec, "triton", None if call.layer is None else call.layer.dtype)
        by_value = call.recalled or any(t.dtype == "bool" for t in call.inputs) or not spec.given <= _CACHED
        regions = frozenset([t.segment for t in (*call.inputs, *call.outputs)]) - {SLOT}
        return cls(call, spec, key, regions, not by_value and spec.batch <= FEW_SEQUENCES)


@dataclass(eq=False)
class PlacedProblem:
    """The parts and tensors that the calls of a plan in one slot have in common: views of shared memory.

    Without this, a small forward takes 0.05 ms more on 2 cores. If the plan's are not `kept`, it serves one call.
    """

    kept: bool
    parts: list[Problem] = field(default_factory=list)
    about: About | None = None  # that of a launch of `parts` alone
    tensors: CallTensors | None = None  # the tensors of a call over caches, which has no cached parts


class Pinning(Protocol):
    """Locks mapped memory for a device's copy engine, and unlocks it before it is unmapped."""

    def pin(self, memory: mmap.mmap) -> None: ...
    def unpin(self, memory: mmap.mmap) -> None: ...


@dataclass(eq=False)
class Worker:
    """One HTTP process: its channel, and the segments of its shared memory that this engine has mapped."""

    channel: Channel[ToEngine]
    pinning: Pinning
    segments: dict[int, mmap.mmap] = field(default_factory=dict)
    running: int = 0  # number of its requests in running tasks, plus those whose parts have not all ended
    planned: dict[bytes, PlannedProblem] = field(default_factory=dict)  # by the packed `PlannedCall`
    placed: dict[tuple[PlannedProblem, int, int], PlacedProblem] = field(default_factory=dict)  # and by slot
    not_reading: bool = False  # whether it has stopped reading its answers

    def attach(self, number: int, descriptor: int, size: int) -> None:
        """Map a segment.

        Raises OSError, MemoryError or RuntimeError if this fails; ValueError if the segment is too short.
        """
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if size <= LARGEST else 0)  # populate: avoids page faults later
        with os.fdopen(descriptor, "rb+") as file:
            if os.fstat(descriptor).st_size < size:
                raise ValueError(f"the segment has {os.fstat(descriptor).st_size} bytes, not {size}")
            memory = mmap.mmap(file.fileno(), size, flags=flags)
        self.pinning.pin(memory)
        self.segments[number] = memory

    def detach(self, number: int) -> None:
        memory = self.segments.pop(number)
        self.placed = {
            key: placed for key, placed in self.placed.items() if key[1] != number and number not in key[0].regions
        }
        self.pinning.unpin(memory)
        with contextlib.suppress(BufferError):  # a tensor that is still in use keeps the mapping alive
            memory.close()

    def plan(self, submit: Submit, packed: bytes, cuts: Callable[[str], bool]) -> tuple[PlannedProblem, PlacedProblem]:
        """Return the plan of an attention call, and what is kept for its slot. Raises ProblemError, like its `of`."""
        if (planned := self.planned.get(packed)) is None:
            if len(self.planned) == KEPT:
                self.planned.clear()
            planned = self.planned[packed] = PlannedProblem.of(read_planned(packed), cuts)
        if not planned.kept:
            return planned, PlacedProblem(kept=False)
        key = planned, submit.segment, submit.start
        if (placed := self.placed.get(key)) is None:
            if len(self.placed) == KEPT:
                self.placed.clear()
            placed = self.placed[key] = PlacedProblem(kept=True)
        return planned, placed

    def send(self, reply: FromEngine) -> None:
        """Send a message. A worker that reads nothing for PATIENCE seconds is marked as `not_reading`.

        Its channel is then closed for reading, so the loop removes it like a worker that has disconnected.
        """
        if self.not_reading:
            return
        message = encode(reply)
        try:
            try:
                self.channel.send(message)
            except BlockingIOError:
                with selectors.DefaultSelector() as writable:
                    writable.register(self.channel, selectors.EVENT_WRITE)
                    writable.select(PATIENCE)
                self.channel.send(message)
        except BlockingIOError:
            self.not_reading = True
            log.error("peer dropped", reason="it does not read its answers")
            with contextlib.suppress(OSError):
                # The worker itself sees an end of file only at `close`, when no task uses its memory any more.
                self.channel.sock.shutdown(socket.SHUT_RD)
        except (OSError, ValueError):  # the worker has disconnected, or its channel is closed
            return

    def close(self) -> None:
        """Close the channel, and unmap the segments.

        Call this when no task uses the worker's memory: the worker may reuse its memory once the channel is closed.
        """
        self.channel.close()
        for number in list(self.segments):
            self.detach(number)


def accept(listener: socket.socket) -> socket.socket | None:
    """Accept and return a connection. Close it and return None if it is from another user. Raises OSError."""
    sock, _ = listener.accept()
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.getuid():
        sock.close()
        return None
    return sock


@dataclass(eq=False)
class EngineRequest:
    """A request. Requests with equal `key` may share a launch. Attention with key None is cut into parts instead.

    Requests over caches with equal `kin` begin with the same cached keys, and are cut together if they wait at the same
    time: the first one has the parts of all, and is in the queue while some of them have not started.
    """

    submit: Submit
    worker: Worker
    planned: PlannedProblem | None  # None if the request is not attention
    placed: PlacedProblem | None  # like `planned`
    spec: Spec = field(init=False)  # the problem of attention
    backend: str = field(init=False)
    inputs: Sequence[PlacedTensor]
    outputs: Sequence[PlacedTensor]
    key: Hashable | None
    over_caches: bool  # whether it is attention over caches
    caches: tuple[int, ...]  # serials of the caches, or of the saved forward, that the request uses, each once
    many: bool  # whether cutting it takes a while: it has many sequences, or tokens must be written
    arrived: float  # in `time.monotonic` seconds
    nbytes: int  # of its inputs and outputs
    rank: float  # `Submit.rank`, minus PASSED times the predicted seconds of the parts that have started
    seconds: float  # predicted seconds, with those of `others`
    part_seconds: float  # predicted seconds of one part; those of the request before it is cut
    began: float = 0.0  # in `time.perf_counter` seconds; 0 until it starts
    rows: Sequence[Row] = ()  # its sequences; set when it is cut, or its launch begins
    seed: int | None = None
    call: CachedCall | None = None  # the tensors and caches of a call over caches that is computed in a launch
    kin: Hashable | None = None
    others: Sequence[EngineRequest] = ()  # those that are cut together with it
    parts: deque[Any] = field(default_factory=deque)  # parts that have not started
    left: int = 0  # number of parts that have not ended
    about: About | None = None  # its launch, or that of its parts; set when it is cut or launched
    weighing: Sequence[Any] = ()  # parts that run when all others have ended: those of key weights over caches
    answers: dict[str, Any] = field(default_factory=dict)  # metadata of the answer about caches
    saved_forward: SavedForward | None = None  # set if its tensors will be saved
    computed: bool = False  # whether all parts have ended and its tensors must still be saved
    failure: Exception | None = None

    @classmethod
    def of(cls, submit: Submit, worker: Worker, cuts: Callable[[str], bool]) -> EngineRequest:
        """Return the request that a message submits. Raises ProblemError if its problem is not valid.

        `cuts` says for a backend whether its requests are cut into parts.
        """
        planned: PlannedProblem | None = None
        placed: PlacedProblem | None = None
        over_caches, many, nbytes = submit.cache_ref is not None, False, 0
        serials: Sequence[int] = ()
        inputs, outputs, key = submit.inputs, submit.outputs, None
        match submit.body:
            case bytes() as packed:
                planned, placed = worker.plan(submit, packed, cuts)
                key, spec, inputs, outputs = planned.key, planned.spec, planned.call.inputs, planned.call.outputs
                many, nbytes = over_caches or spec.batch > FEW_SEQUENCES, spec.input_bytes + spec.output_bytes
                if over_caches or submit.saved is not None:
                    serials = submit.serials
            case VerifyCall():
                key = ALONE
            case _:
                serials = submit.serials
        if key is ALONE:
            key = object()
        request = cls(
            submit, worker, planned, placed, inputs, outputs, key, over_caches, tuple(dict.fromkeys(serials)),
            many, time.monotonic(), nbytes, submit.rank, submit.seconds, submit.seconds,
        )  # fmt: skip
        if planned is not None:
            request.spec, request.backend = planned.spec, planned.call.backend
        return request

    @property
    def flops(self) -> int:
        return self.submit.flops

    @property
    def verification(self) -> VerifyCall:
        """The body of a verification."""
        body = self.submit.body
        assert isinstance(body, VerifyCall)
        return body

    @property
    def memory(self) -> MappedMemory:
        """The shared memory in which its tensors lie."""
        return MappedMemory(self.worker.segments, self.submit.segment, self.submit.start)

    @property
    def mapped(self) -> bool:
        """Whether all memory of the request is mapped."""
        mapped = self.worker.segments
        return self.submit.segment in mapped and (self.planned is None or self.planned.regions <= mapped.keys())

    def cut(self, parts_of: Callable[[EngineRequest], list[Problem]], budget: Budget) -> None:
        """Cut the request into parts, those kept for its slot or new ones. Raises Refusal 422."""
        placed = self.placed
        assert placed is not None
        if parts := placed.parts:
            self.about, self.seed = placed.about, parts[0].seed
        else:
            parts = parts_of(self)
            self.of_rows([row for part in parts if not part.first_head for row in part.rows], parts[0].seed, budget)
            if placed.kept:
                placed.parts, placed.about = parts, self.about
        self.add(parts)

    def of_rows(self, rows: Sequence[Row], seed: int | None, budget: Budget) -> None:
        """Record the request's sequences and its seed of dropout, and describe the launch of its parts."""
        self.rows, self.seed = rows, seed
        self.about = account([self], budget, 0)

    def lead(self, others: Sequence[EngineRequest]) -> None:
        """Let the request have the parts of `others`, too. Those get no parts of their own."""
        self.others = others
        self.rank = min([request.submit.rank for request in (self, *others)])
        self.seconds = self.part_seconds = sum([request.submit.seconds for request in (self, *others)])

    def add(self, parts: Sequence[Any]) -> None:
        """Store the parts into which the request, with `others`, has been cut."""
        self.parts.extend(parts)
        self.left = len(parts)
        self.part_seconds = self.seconds / max(len(parts), 1)

    def tensors(self, of: Callable[[EngineRequest], CallTensors]) -> CallTensors:
        """Return the tensors of a call over caches, those kept for its slot or from `of`. Raises Refusal 422."""
        placed = self.placed
        assert placed is not None
        if (tensors := placed.tensors) is None:
            tensors = of(self)
            if placed.kept:
                placed.tensors = tensors
        return tensors

    def begin(self) -> None:
        """Set the request's started mark in shared memory, where the HTTP process can read it if the engine dies.

        Raises OutOfMemoryError if some memory of the request is not mapped.
        """
        if not self.mapped:
            raise OutOfMemoryError
        self.worker.segments[self.submit.segment][self.submit.mark] = 1
        self.began = time.perf_counter()

    @property
    def unwanted(self) -> bool:
        """Whether it and all `others` have failed, are late or cancelled."""
        return self.failure is not None and all(request.failure is not None for request in self.others)


def account(batch: Sequence[EngineRequest], budget: Budget, splits: int) -> About:
    """Return the fields of `Done` that describe a launch of `batch`."""
    lengths = [([*map(_Q_LEN, request.rows)], [*map(_KV_LEN, request.rows)]) for request in batch]
    longest = max([max(q, default=0) for q, _ in lengths]) * max([max(k, default=0) for _, k in lengths])
    flops = padding = 0.0
    for request, (q, k) in zip(batch, lengths, strict=True):
        spec, pairs = request.spec, sum(map(mul, q, k))
        priced = spec.q_len * spec.kv_len * (1 if spec.ragged else spec.batch)  # the pairs that `spec.flops` counts
        cost = spec.flops / max(priced, 1)
        flops += pairs * cost
        padding += (len(q) * longest - pairs) * cost
    return int(min(flops, _MOST)), int(min(padding, _MOST)), budget.fill(batch), splits
