"""What an engine knows of an HTTP process, and of a request from its arrival to its answer."""

from __future__ import annotations

import contextlib
import mmap
import os
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import mul
from typing import NamedTuple

from flashpoint_contract.spec import Row, Spec
from flashpoint_contract.tensors import INDEX_TENSORS
from flashpoint_kernels import Problem
from flashpoint_kernels.problem import launch_key
from flashpoint_server.engine.device import Device, Placed, spec_of
from flashpoint_server.engine.waiting import Budget
from flashpoint_server.ipc.memory import LARGEST
from flashpoint_server.ipc.messages import Batch, Channel, FromEngine, Prove, Submit, ToEngine

PATIENCE = 5.0  # seconds that all others wait for an HTTP process that does not read its answers
KEPT = 256  # of a peer; some KiB each
FEW_SEQUENCES = 64  # of a request whose problem is kept, and made while others wait for the queue: under a millisecond
LONG_SECONDS = 0.01  # a part that is predicted to take longer leaves a lane to short ones
_MOST = 1e18  # FLOPs that a message can say, far beyond any device


class Lengths(NamedTuple):
    """What is known of a request's sequences: how many, their (query, key) pairs, and the longest of either."""

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
class Asked:
    """What a Submit asks for, and its problem in parts, in the places that it names, once that is made.

    Kept, for a model asks for the same few shapes, and slots are used again: to plan a small forward anew and to make
    views of its places takes 0.05 ms (2 cores).
    """

    spec: Spec
    parts: list[Problem] = field(default_factory=list)
    lengths: Lengths = NO_LENGTHS  # of those
    alone: Batch | None = None  # what it amounts to by itself

    @cached_property
    def by_value(self) -> bool:
        """Whether its problem depends on more than the places: on what is read there as it is made, or on a seed."""
        spec = self.spec
        bool_mask = spec.has("attn_mask") and spec.tensors["attn_mask"].dtype == "bool"
        return bool_mask or bool(spec.options.dropout_p) or any(spec.has(name) for name in INDEX_TENSORS)


@dataclass(eq=False)
class Peer:
    """An HTTP process: its channel, and the segments of its memory that are mapped here."""

    channel: Channel[ToEngine]
    segments: dict[int, mmap.mmap] = field(default_factory=dict)
    running: int = 0  # works that compute in them
    known: dict[Hashable, Asked] = field(default_factory=dict)  # asked for before

    def attach(self, number: int, descriptor: int, size: int, device: Device) -> None:
        """Map a segment. Raises OSError, MemoryError or RuntimeError where it cannot; ValueError for one too short."""
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if size <= LARGEST else 0)  # its pages are there: no faults later
        with os.fdopen(descriptor, "rb+") as file:
            if os.fstat(descriptor).st_size < size:
                raise ValueError(f"a segment of {os.fstat(descriptor).st_size} bytes is not one of {size}")
            memory = mmap.mmap(file.fileno(), size, flags=flags)
        device.pin(memory)
        self.segments[number] = memory

    def detach(self, number: int, device: Device) -> None:
        memory = self.segments.pop(number)
        self.known.clear()
        device.unpin(memory)
        with contextlib.suppress(BufferError):  # a tensor that is still held keeps the mapping until it is dropped
            memory.close()

    def asked(self, submit: Submit) -> Asked:
        """Raises ProblemError for what is no problem."""
        key = (submit.direction, bytes(submit.options), tuple(submit.inputs), tuple(submit.outputs))
        if (asked := self.known.get(key)) is None:
            if len(self.known) == KEPT:
                self.known.clear()
            asked = self.known[key] = Asked(spec_of(submit))
        return asked

    def send(self, reply: FromEngine) -> None:
        """Send a message, with PATIENCE for a peer that does not read. Raises BlockingIOError, OSError, ValueError."""
        try:
            self.channel.send(reply)
        except BlockingIOError:
            with selectors.DefaultSelector() as writable:
                writable.register(self.channel, selectors.EVENT_WRITE)
                writable.select(PATIENCE)
            self.channel.send(reply)

    def close(self, device: Device) -> None:
        """Leave it: once nothing runs in its memory, for that is what the end of the channel tells it."""
        self.channel.close()
        for number in list(self.segments):
            self.detach(number, device)


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

    submit: Submit | Prove
    peer: Peer
    asked: Asked | None  # by a Submit
    key: Hashable | None
    arrived: float
    began: float = 0.0  # in `time.perf_counter` seconds; 0 until it has begun
    lengths: Lengths = NO_LENGTHS
    seed: int | None = None
    parts: deque[Problem] = field(default_factory=deque)  # that nobody has taken
    part_seconds: float = 0.0  # that a part of it is predicted to take
    left: int = 0  # parts that have not ended
    failure: Exception | None = None

    @classmethod
    def of(cls, submit: Submit | Prove, peer: Peer, device: Device) -> Entry:
        """Return the entry of a message that has just come. Raises ProblemError for what is no problem."""
        if isinstance(submit, Prove):
            return cls(submit, peer, None, object(), time.monotonic())
        asked = peer.asked(submit)
        key: Hashable | None = None
        if submit.backend == "triton":
            key = launch_key(asked.spec, "triton")
        elif not device.cuts(submit.backend):
            key = object()  # one request after the other: such a backend gains nothing from a common launch
        return cls(submit, peer, asked, key, time.monotonic())

    @property
    def spec(self) -> Spec:
        """Of a Submit."""
        assert self.asked is not None
        return self.asked.spec

    @property
    def rank(self) -> float:
        return self.submit.rank

    @property
    def flops(self) -> int:
        return self.submit.flops

    @property
    def nbytes(self) -> int:
        return self.spec.input_bytes + self.spec.output_bytes if self.asked is not None else 0

    @property
    def placed(self) -> Placed:
        assert isinstance(self.submit, Submit)
        return Placed(self.submit, self.spec, self.peer.segments)

    @property
    def mapped(self) -> bool:
        """Whether all of its memory is."""
        submit, segments = self.submit, self.peer.segments
        tensors = [*submit.inputs, *submit.outputs] if isinstance(submit, Submit) else submit.inputs
        return submit.segment in segments and all(t.segment in segments for t in tensors)

    def cut(self, device: Device) -> None:
        """Make its parts, or take those that were made before. Raises Refusal 422."""
        asked = self.asked
        assert asked is not None
        if not (parts := asked.parts):
            parts = device.parts(self.placed)
            self.lengths = Lengths.of([row for part in parts if not part.first_head for row in part.rows])
            if not (asked.by_value or self.many):
                asked.parts, asked.lengths = parts, self.lengths
        else:
            self.lengths = asked.lengths
        self.parts.extend(parts)
        self.left, self.seed = len(parts), parts[0].seed
        self.part_seconds = self.submit.seconds / len(parts)

    @property
    def long(self) -> bool:
        """Whether a part of it, or all of it where it is not cut yet, takes longer than others may have to wait."""
        return (self.part_seconds if self.left else self.submit.seconds) > LONG_SECONDS

    @property
    def many(self) -> bool:
        """Whether its sequences are so many that to make its parts takes a while."""
        return self.asked is not None and self.asked.spec.batch > FEW_SEQUENCES

    def alone(self, budget: Budget) -> Batch:
        """What it amounts to by itself."""
        assert self.asked is not None
        if self.asked.by_value or self.many:
            return account([self], budget, 0)
        if self.asked.alone is None:
            self.asked.alone = account([self], budget, 0)
        return self.asked.alone

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
    """What a launch of these amounts to, and what padding all sequences to the longest would have added."""
    longest_q = max(entry.lengths.longest_q for entry in batch)
    longest_k = max(entry.lengths.longest_k for entry in batch)
    flops = padding = 0.0
    for entry in batch:
        pairs, cost = entry.pairs()
        flops += pairs * cost
        padding += (entry.lengths.sequences * longest_q * longest_k - pairs) * cost
    return Batch(int(min(flops, _MOST)), int(min(padding, _MOST)), budget.fill(batch), splits)
