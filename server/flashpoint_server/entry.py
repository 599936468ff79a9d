"""What an engine knows of an HTTP process, and of a request from its arrival to its answer."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from flashpoint_kernels import Problem
from flashpoint_kernels.spec import INDEX_TENSORS, Row, Spec
from flashpoint_server.device import Device, Placed, spec_of
from flashpoint_server.memory import LARGEST
from flashpoint_server.messages import Batch, Channel, Prove, Submit, ToEngine
from flashpoint_server.waiting import Budget

KEPT = 256  # of a peer; some KiB each
_MOST = 1e18  # FLOPs that a message can say, far beyond any device


@dataclass(eq=False)
class Asked:
    """What a Submit asks for, and its problem in parts, in the places that it names, once that is made.

    Kept, for a model asks for the same few shapes, and slots are used again: to plan a small forward anew and to make
    views of its places takes 0.05 ms (2 cores).
    """

    spec: Spec
    parts: list[Problem] = field(default_factory=list)
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

    def close(self, device: Device) -> None:
        """Leave it: once nothing runs in its memory, for that is what the end of the channel tells it."""
        self.channel.close()
        for number in list(self.segments):
            self.detach(number, device)


@dataclass(eq=False)
class Entry:
    """A request. `key` says with which it may share a launch; None: it is cut into parts."""

    submit: Submit | Prove
    peer: Peer
    asked: Asked | None  # by a Submit
    key: Hashable | None
    arrived: float
    began: float = 0.0  # in `time.perf_counter` seconds; 0 until it has begun
    rows: tuple[Row, ...] = ()
    seed: int | None = None
    parts: deque[Problem] = field(default_factory=deque)  # that nobody has taken
    left: int = 0  # parts that have not ended
    failure: Exception | None = None

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

    def problem(self, device: Device) -> list[Problem]:
        """What it asks, in parts. Raises Refusal 422."""
        assert self.asked is not None
        if self.asked.by_value:
            return device.parts(self.placed)
        if not self.asked.parts:
            self.asked.parts = device.parts(self.placed)
        return self.asked.parts

    def alone(self, budget: Budget) -> Batch:
        """What it amounts to by itself."""
        assert self.asked is not None
        if self.asked.by_value:
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
        return sum(row.q_len * row.kv_len for row in self.rows), spec.flops / max(priced, 1)


def account(batch: Sequence[Entry], budget: Budget, splits: int) -> Batch:
    """What a launch of these amounts to, and what padding all sequences to the longest would have added."""
    longest_q = max((row.q_len for entry in batch for row in entry.rows), default=0)
    longest_k = max((row.kv_len for entry in batch for row in entry.rows), default=0)
    flops = padding = 0.0
    for entry in batch:
        pairs, cost = entry.pairs()
        flops += pairs * cost
        padding += (len(entry.rows) * longest_q * longest_k - pairs) * cost
    return Batch(int(min(flops, _MOST)), int(min(padding, _MOST)), budget.fill(batch), splits)
