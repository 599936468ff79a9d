"""An engine's records of an HTTP process, and of a request from its arrival to its answer. No torch, no device."""

from __future__ import annotations

import contextlib
import mmap
import os
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import mul
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import structlog

from flashpoint_contract.caches import LayerShape, plan_cached
from flashpoint_contract.spec import Row, Spec, plan
from flashpoint_contract.tensors import INDEX_TENSORS, SCALES, TensorInfo
from flashpoint_kernels import Problem
from flashpoint_kernels.problem import launch_key
from flashpoint_server.engine.saved import SavedForward
from flashpoint_server.engine.waiting import Budget
from flashpoint_server.ipc.memory import LARGEST
from flashpoint_server.ipc.messages import (
    AskCaches,
    Batch,
    Channel,
    FromEngine,
    Prove,
    Recall,
    Save,
    Submit,
    ToEngine,
    read_options,
)
from flashpoint_server.ipc.price import PASSED

if TYPE_CHECKING:
    from flashpoint_server.engine.caches.attending import CallTensors, HeldCall

log = structlog.stdlib.get_logger("flashpoint.engine")

PATIENCE = 5.0  # seconds that all others wait for an HTTP process that does not read its answers
KEPT = 256  # of a peer; some KiB each
FEW_SEQUENCES = 64  # of a request whose problem is kept, and made while others wait for the queue: under a millisecond
LONG_SECONDS = 0.01  # a part that is predicted to take longer leaves a lane to short ones
_MOST = 1e18  # FLOPs that a message can say, far beyond any device


class OutOfMemoryError(Exception):
    """The device has no memory for this, at the moment at least."""


class Placed(NamedTuple):
    """A job, what it asks for, the segments of shared memory that its tensors lie in, and where they are kept."""

    submit: Submit
    spec: Spec
    memory: Mapping[int, mmap.mmap]
    call: HeldCall | None = None  # of a job over caches that has been written
    kept: SavedForward | None = None


def spec_of(submit: Submit) -> Spec:
    """Return the problem of a message. Raises ProblemError for what is no problem."""
    infos = {t.name: TensorInfo(t.dtype, t.shape) for t in submit.inputs}
    options = read_options(submit.options)
    if (held := submit.held) is not None:
        return plan_cached(infos, options, LayerShape(*held.shape), len(held.caches))
    if isinstance(submit.saved, Recall):
        infos |= {name: TensorInfo(dtype, shape) for name, dtype, shape in submit.saved.tensors}
    return plan(infos, options, submit.direction)


class Lengths(NamedTuple):
    """The extent of a request's sequences: their number, their (query, key) pairs, and the longest of either."""

    sequences: int
    pairs: int
    longest_q: int
    longest_k: int

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Lengths:
        q, k = [row[3] for row in rows], [row[6] for row in rows]  # q_len and kv_len, of up to 65,536
        return cls(len(rows), sum(map(mul, q, k)), max(q, default=0), max(k, default=0))


NO_LENGTHS = Lengths(0, 0, 0, 0)


@dataclass(eq=False)
class PlannedProblem:
    """The problem that a Submit asks for, and its parts, in the places that it names, once they are made.

    Kept, for a model asks for the same few shapes, and slots are used again: to plan a small forward anew and to make
    views of its places takes 0.05 ms (2 cores).
    """

    spec: Spec
    parts: list[Problem] = field(default_factory=list)
    lengths: Lengths = NO_LENGTHS  # of those
    tensors: CallTensors | None = None  # of a call over caches, in place of parts
    alone: Batch | None = None  # what it amounts to by itself
    recalls: bool = False  # tensors of a saved forward

    @cached_property
    def by_value(self) -> bool:
        """Whether its problem depends on more than the places: on what is read there as it is made, or on a seed."""
        if self.recalls:
            return True
        spec = self.spec
        copied = any(info.dtype == "bool" for info in spec.tensors.values())
        return copied or bool(spec.options.dropout_p) or any(spec.has(name) for name in (*INDEX_TENSORS, *SCALES))


class Pinning(Protocol):
    """Locks mapped memory for the copy engine of a device, and lets go of it before it is unmapped."""

    def pin(self, memory: mmap.mmap) -> None: ...
    def unpin(self, memory: mmap.mmap) -> None: ...


@dataclass(eq=False)
class Peer:
    """An HTTP process: its channel, and the segments of its memory that are mapped here."""

    channel: Channel[ToEngine]
    pinning: Pinning
    segments: dict[int, mmap.mmap] = field(default_factory=dict)
    running: int = 0  # requests in tasks that run: they compute in its memory
    planned: dict[Hashable, PlannedProblem] = field(default_factory=dict)  # asked for before
    deaf: bool = False  # it does not read its answers

    def attach(self, number: int, descriptor: int, size: int) -> None:
        """Map a segment. Raises OSError, MemoryError or RuntimeError where it cannot; ValueError for one too short."""
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if size <= LARGEST else 0)  # its pages are there: no faults later
        with os.fdopen(descriptor, "rb+") as file:
            if os.fstat(descriptor).st_size < size:
                raise ValueError(f"a segment of {os.fstat(descriptor).st_size} bytes is not one of {size}")
            memory = mmap.mmap(file.fileno(), size, flags=flags)
        self.pinning.pin(memory)
        self.segments[number] = memory

    def detach(self, number: int) -> None:
        memory = self.segments.pop(number)
        self.planned.clear()
        self.pinning.unpin(memory)
        with contextlib.suppress(BufferError):  # a tensor that is still held keeps the mapping until it is dropped
            memory.close()

    def plan(self, submit: Submit) -> PlannedProblem:
        """Return the problem of a message, planned now or before. Raises ProblemError for what is no problem."""
        key: Hashable = (submit.direction, bytes(submit.options), tuple(submit.inputs), tuple(submit.outputs))
        if (held := submit.held) is not None:
            key = key, held.shape, len(held.caches)
        if recalls := isinstance(submit.saved, Recall):
            key = key, tuple(submit.saved.tensors)
        if (planned := self.planned.get(key)) is None:
            if len(self.planned) == KEPT:
                self.planned.clear()
            planned = self.planned[key] = PlannedProblem(spec_of(submit), recalls=recalls)
        return planned

    def send(self, reply: FromEngine) -> None:
        """Send a message. A peer that reads nothing for PATIENCE seconds is deaf from then on.

        Nothing more is read from a deaf peer, so the loop forgets it, as it forgets one that is gone.
        """
        if self.deaf:
            return
        try:
            try:
                self.channel.send(reply)
            except BlockingIOError:
                with selectors.DefaultSelector() as writable:
                    writable.register(self.channel, selectors.EVENT_WRITE)
                    writable.select(PATIENCE)
                self.channel.send(reply)
        except BlockingIOError:
            self.deaf = True
            log.error("peer dropped", reason="it does not read its answers")
            with contextlib.suppress(OSError):
                # It hears of the end only when its channel is closed, once nothing runs in its memory.
                self.channel.sock.shutdown(socket.SHUT_RD)
        except (OSError, ValueError):  # it is gone, or its channel was closed by then
            return

    def close(self) -> None:
        """Leave it: once nothing runs in its memory, for that is what the end of the channel tells it."""
        self.channel.close()
        for number in list(self.segments):
            self.detach(number)


def accept(listener: socket.socket) -> socket.socket | None:
    """Accept a connection; None where another user asks, who may know the socket's name. Raises OSError."""
    sock, _ = listener.accept()
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.getuid():
        sock.close()
        return None
    return sock


@dataclass(eq=False)
class Entry:
    """A request. `key` says with which it may share a launch; None: it is cut into parts."""

    submit: Submit | Prove | AskCaches
    peer: Peer
    planned: PlannedProblem | None  # of a Submit
    key: Hashable | None
    arrived: float
    began: float = 0.0  # in `time.perf_counter` seconds; 0 until it has begun
    lengths: Lengths = NO_LENGTHS
    seed: int | None = None
    call: HeldCall | None = None  # over caches, that is written
    parts: deque[Problem] = field(default_factory=deque)  # that nobody has taken
    part_seconds: float = 0.0  # that a part of it is predicted to take
    left: int = 0  # parts that have not ended
    kept: SavedForward | None = None  # where its tensors are kept once it has run
    computed: bool = False  # all parts have ended, and its tensors are to be kept
    failure: Exception | None = None

    @classmethod
    def of(cls, submit: Submit | Prove | AskCaches, peer: Peer, cuts: Callable[[str], bool]) -> Entry:
        """Return the entry of a message that has just come. Raises ProblemError for what is no problem.

        `cuts` says whether requests of a backend are cut into parts.
        """
        if isinstance(submit, Prove):
            return cls(submit, peer, None, object(), time.monotonic())
        if isinstance(submit, AskCaches):
            return cls(submit, peer, None, None, time.monotonic())
        planned = peer.plan(submit)
        key: Hashable | None = None
        if submit.backend == "triton":
            key = launch_key(planned.spec, "triton")
            if submit.held is not None:  # its keys are pages
                key = (*key[:-1], True)
        elif not cuts(submit.backend):
            key = object()  # one request after the other: such a backend gains nothing from a common launch
        return cls(submit, peer, planned, key, time.monotonic())

    @property
    def spec(self) -> Spec:
        """The plan of a Submit."""
        assert self.planned is not None
        return self.planned.spec

    @property
    def rank(self) -> float:
        """`Submit.rank`, which counts all its predicted seconds, less those of the parts that have been taken.

        So the last parts of a request are not passed by one that is longer than they are. It changes only while the
        request is not in the queue.
        """
        taken = self.submit.seconds - self.part_seconds * len(self.parts) if self.part_seconds else 0.0
        return self.submit.rank - PASSED * taken

    @property
    def flops(self) -> int:
        return self.submit.flops

    @property
    def nbytes(self) -> int:
        return self.spec.input_bytes + self.spec.output_bytes if self.planned is not None else 0

    @property
    def placed(self) -> Placed:
        assert isinstance(self.submit, Submit)
        return Placed(self.submit, self.spec, self.peer.segments, self.call, self.kept)

    @property
    def mapped(self) -> bool:
        """Whether all of its memory is."""
        submit, segments = self.submit, self.peer.segments
        tensors = submit.inputs if isinstance(submit, Prove) else [*submit.inputs, *submit.outputs]
        return submit.segment in segments and all(t.segment in segments for t in tensors)

    @cached_property
    def caches(self) -> tuple[int, ...]:
        """The caches, or the saved forward, that it uses, each once."""
        submit = self.submit
        if isinstance(submit, AskCaches):
            return tuple(dict.fromkeys(submit.caches))
        if not isinstance(submit, Submit):
            return ()
        if isinstance(submit.saved, Recall):
            return (submit.saved.serial,)
        return () if submit.held is None else tuple(dict.fromkeys(submit.held.caches))

    @property
    def over_caches(self) -> bool:
        """Whether it is attention over caches."""
        return isinstance(self.submit, Submit) and self.submit.held is not None

    @property
    def saves(self) -> Save | None:
        """Return what it asks to be kept of it."""
        saved = self.submit.saved if isinstance(self.submit, Submit) else None
        return saved if isinstance(saved, Save) else None

    @property
    def uses(self) -> bool:
        """Whether the time to live of its caches begins anew with its end."""
        submit = self.submit
        return not isinstance(submit, AskCaches) or submit.what not in ("look", "export", "look_saved")

    def cut_held(self, parts: Sequence[Any], *, computed: bool) -> None:
        """Take the parts of a call over caches, none of which is to run where they have been `computed`."""
        self.lengths = Lengths.of([row for part in parts if not part.first_head for row in part.rows])
        self.seed = parts[0].seed
        if not computed:
            self.parts.extend(parts)
            self.left = len(parts)
            self.part_seconds = self.submit.seconds / len(parts)

    def cut(self, parts_of: Callable[[Placed], list[Problem]]) -> None:
        """Make its parts, or take those that were made before. Raises Refusal 422."""
        planned = self.planned
        assert planned is not None
        if not (parts := planned.parts):
            parts = parts_of(self.placed)
            self.lengths = Lengths.of([row for part in parts if not part.first_head for row in part.rows])
            if not (planned.by_value or self.many):
                planned.parts, planned.lengths = parts, self.lengths
        else:
            self.lengths = planned.lengths
        self.parts.extend(parts)
        self.left, self.seed = len(parts), parts[0].seed
        self.part_seconds = self.submit.seconds / len(parts)

    @property
    def long(self) -> bool:
        """Whether a part of it, or all of it where it is not cut yet, takes longer than others may have to wait."""
        return (self.part_seconds if self.left else self.submit.seconds) > LONG_SECONDS

    @property
    def many(self) -> bool:
        """Whether its sequences are so many that to make its parts takes a while, or tokens are written with that."""
        if self.planned is None:
            return False
        return self.planned.spec.batch > FEW_SEQUENCES or self.over_caches

    def tensors(self, of: Callable[[Placed], CallTensors]) -> CallTensors:
        """Return the tensors of a call over caches, made now or before, in place. Raises Refusal 422."""
        planned = self.planned
        assert planned is not None
        if (tensors := planned.tensors) is None:
            tensors = of(self.placed)
            if not planned.by_value and planned.spec.batch <= FEW_SEQUENCES:
                planned.tensors = tensors
        return tensors

    def alone(self, budget: Budget) -> Batch:
        """Return what it amounts to by itself."""
        assert self.planned is not None
        if self.planned.by_value or self.many:
            return account([self], budget, 0)
        if self.planned.alone is None:
            self.planned.alone = account([self], budget, 0)
        return self.planned.alone

    def begin(self) -> None:
        """Say so where the HTTP process sees it, whatever happens to this one."""
        self.peer.segments[self.submit.segment][self.submit.mark] = 1
        self.began = time.perf_counter()

    def pairs(self) -> tuple[int, float]:
        """(query, key) pairs of its sequences, and the FLOPs of each."""
        spec = self.spec
        priced = spec.q_len * spec.kv_len * (1 if spec.ragged else spec.batch)  # those that its FLOPs count
        return self.lengths.pairs, spec.flops / max(priced, 1)


def account(batch: Sequence[Entry], budget: Budget, splits: int) -> Batch:
    """Return what a launch of these amounts to, and what padding all sequences to the longest would have added."""
    longest_q = max(entry.lengths.longest_q for entry in batch)
    longest_k = max(entry.lengths.longest_k for entry in batch)
    flops = padding = 0.0
    for entry in batch:
        pairs, cost = entry.pairs()
        flops += pairs * cost
        padding += (entry.lengths.sequences * longest_q * longest_k - pairs) * cost
    return Batch(int(min(flops, _MOST)), int(min(padding, _MOST)), budget.fill(batch), splits)
