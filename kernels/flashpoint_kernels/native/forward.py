"""Call forward.c: attention over keys at any places in memory, on one thread or shared by several."""

from __future__ import annotations

import ctypes
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from flashpoint_kernels import native
from flashpoint_kernels.dropout import drop_below

CHUNK = 1024  # keys of one softmax, see forward.c
UNBOUNDED = 1 << 60
TILE = 64  # rows of a key/value head that read the keys together: queries of its query heads
_LEAST_BYTES, _LEAST_FLOPS = 1 << 19, 1 << 23  # work of a thread: to hand it over takes about half as long

TYPES = {getattr(torch, name): number for number, name in enumerate(native.DTYPES)}


class Dropped(ctypes.Structure):
    """struct dropout of options.h: the seed's low and high word, the last word that is dropped, and whether any is."""

    _fields_ = tuple((name, ctypes.c_uint32) for name in ("low", "high", "last", "on"))

    @classmethod
    def of(cls, seed: int | None, p: float) -> Dropped:
        """Return dropout with probability p; off for 0."""
        if not p or seed is None:
            return cls()
        return cls(seed & 0xFFFFFFFF, seed >> 32, drop_below(p) - 1, 1)


# Members of struct call of forward.c and of backward.c: what makes probabilities of q·k.
OF_SCORES = (
    ("scale", ctypes.c_double),
    ("softcap", ctypes.c_double),
    ("mask_type", ctypes.c_int64),
    ("mask_step", ctypes.c_int64),
    ("keep", ctypes.c_double),
    ("dropout", Dropped),
)


class _Call(ctypes.Structure):
    """struct call of forward.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("k_type", "q_type", "dim", "value_dim", "group", "k_row", "v_row")),
        *OF_SCORES,
        ("count", ctypes.c_int64),
        ("tasks", ctypes.c_void_p),
    )


class Steps(NamedTuple):
    """Steps in bytes from one head to the next, and from one row to the next."""

    head: int
    row: int


NOWHERE = Steps(0, 0)  # of an lse that is not wanted, or a mask that is not there


class Spans:
    """Addresses of keys: for each span, k and v of head 0, their steps from head to head, and the same of their scales.

    Each span has `tokens` keys, and each sequence `count` spans. `numbers` are 8 integers for each span, int64.
    """

    __slots__ = ("_address", "_count", "_held", "tokens")

    def __init__(self, numbers: array[int] | torch.Tensor, tokens: int, count: int = 1) -> None:
        self._held = numbers
        self._address = numbers.data_ptr() if isinstance(numbers, torch.Tensor) else numbers.buffer_info()[0]
        self._count = count
        self.tokens = tokens

    def of_sequence(self, number: int) -> int:
        """Return the address of a sequence's first span."""
        return self._address + 64 * self._count * number


class Rows(NamedTuple):
    """The queries of one sequence and their keys.

    `q`, `o`, `lse`, `slopes` and `mask` are addresses (`lse`: 0 if not wanted; `slopes`, `mask`: 0 without one). Query
    i sees the keys [i + low, i + high) among [start, stop). `spans` is an address in a `Spans`, whose first key has
    position `first`. `mask` is of query 0 and key 0.
    """

    q: int
    o: int
    lse: int
    queries: int
    start: int
    stop: int
    spans: int
    tokens: int
    first: int = 0
    low: int = -UNBOUNDED
    high: int = UNBOUNDED
    offset: int = 0
    slopes: int = 0
    mask: int = 0
    sequence: int = 0  # for dropout, and the number of the first query
    query: int = 0

    @property
    def chunks(self) -> int:
        return max(1, -(-self.stop // CHUNK) - self.start // CHUNK)

    def tiles(self, forward: Forward) -> Iterator[Rows]:
        """Yield the queries in tiles of at most TILE rows. Each tile reads its keys once."""
        height = max(1, TILE // forward.group)
        if self.queries <= height:
            yield self
            return
        for first in range(0, self.queries, height):
            count, low, high = min(height, self.queries - first), self.low + first, self.high + first
            start = min(max(self.start, low), self.stop)
            yield self._replace(
                q=self.q + first * forward.q.row,
                o=self.o + first * forward.o.row,
                lse=self.lse and self.lse + first * forward.lse.row,
                queries=count,
                start=start,
                stop=max(start, min(self.stop, high + count - 1)),
                low=low,
                high=high,
                offset=self.offset + first,
                mask=self.mask and self.mask + first * forward.mask.row,
                query=self.query + first,
            )


@dataclass(eq=False, slots=True)
class Forward:
    """Attention of several tiles of queries with `heads` key/value heads each, of `group` query heads.

    A unit is one key/value head of a tile. `held` keeps alive what the addresses point to.
    """

    q_dtype: torch.dtype  # also o's
    k_dtype: torch.dtype  # also v's
    head_dim: int
    value_dim: int
    heads: int
    group: int
    scale: float
    softcap: float
    q: Steps
    o: Steps
    lse: Steps
    k_row: int
    v_row: int
    sinks: int = 0  # address
    mask: Steps = NOWHERE
    mask_dtype: torch.dtype = torch.bool
    mask_step: int = 0  # from key to key, in bytes; 0 for one number for all keys
    keep: float = 1.0  # 1 - dropout_p
    dropped: Dropped = field(default_factory=Dropped)
    first_head: int = 0  # of the request's query heads, for dropout
    held: object = None
    rows: list[Rows] = field(default_factory=list)

    def add(self, rows: Rows) -> None:
        """Add queries of a sequence."""
        self.rows += rows.tiles(self)

    @property
    def units(self) -> int:
        return len(self.rows) * self.heads

    @property
    def nbytes(self) -> int:
        """Return the bytes of keys and values that are read."""
        token = self.heads * (self.head_dim + self.value_dim) * self.k_dtype.itemsize
        return token * sum(row.stop - row.start for row in self.rows)

    def workers(self, most: int) -> int:
        """Return the number of threads for this work, at most `most`."""
        pairs = sum(row.queries * (row.stop - row.start) for row in self.rows)
        flops = 2 * pairs * self.heads * self.group * (self.head_dim + self.value_dim)
        return max(1, min(most, max(self.nbytes // _LEAST_BYTES, flops // _LEAST_FLOPS)))

    def compute(self, first: int = 0, last: int | None = None) -> None:
        """Compute units [first, last), by default all, in this thread."""
        self._run("forward", self._whole(first, self.units if last is None else last))

    def shares(self, workers: int) -> tuple[list[list[int]], list[tuple[list[int], torch.Tensor]]]:
        """Cut the work into about equal tasks for `workers` threads: between units, or between chunks if units are few.

        Return the tasks of each thread; and for each unit that threads share, its task for `merge` and its memory.
        """
        if self.units >= 4 * workers:
            weights = (row.queries * max(1, row.stop - row.start) for row in self.rows for _ in range(self.heads))
            edges = [0, *accumulate(weights)]
            cuts = [bisect_left(edges, edges[-1] * number // workers) for number in range(workers + 1)]
            return [self._whole(first, last) for first, last in pairwise(cuts)], []
        return self._shared(workers)

    def _shared(self, workers: int) -> tuple[list[list[int]], list[tuple[list[int], torch.Tensor]]]:
        edges = [0]
        for row in self.rows:
            edges += [edges[-1] + row.chunks * (head + 1) for head in range(self.heads)]
        total, unit = edges[-1], 0
        shares: list[list[int]] = []
        merged: dict[int, torch.Tensor] = {}
        for number in range(workers):
            start, stop = number * total // workers, (number + 1) * total // workers
            tasks: list[int] = []
            while start < stop:
                while edges[unit + 1] <= start:
                    unit += 1
                if start == edges[unit] and edges[unit + 1] <= stop:
                    last = bisect_right(edges, stop) - 1
                    tasks += self._whole(unit, last)
                    start = edges[last]
                    continue
                end = min(stop, edges[unit + 1])
                if unit not in merged:
                    row = self.rows[unit // self.heads]
                    merged[unit] = torch.empty(
                        row.chunks, self.group * row.queries * (2 + -(-self.value_dim // native.VECTOR) * native.VECTOR)
                    )
                tasks += self._part(unit, start - edges[unit], end - edges[unit], merged[unit])
                start = end
            shares.append(tasks)
        return shares, [(self._part(unit, None, None, t), t) for unit, t in merged.items()]

    def run(self, tasks: list[int]) -> None:
        """Compute tasks from `shares` in this thread."""
        self._run("forward", tasks)

    def merge(self, tasks: Sequence[tuple[list[int], torch.Tensor]]) -> None:
        """Write the answers of units that several threads have computed."""
        self._run("merge", [number for task, _ in tasks for number in task])

    def _whole(self, first: int, last: int) -> list[int]:
        tasks = []
        while first < last:
            number, head = divmod(first, self.heads)
            count = min(self.heads - head, last - first)
            row = self.rows[number]
            tasks += self._task(row, head, count, row.start, row.stop, 0)
            first += count
        return tasks

    def _part(self, unit: int, first: int | None, last: int | None, states: torch.Tensor) -> list[int]:
        """Return the task for chunks [first, last) of a unit, or for all, with the memory of all its chunks' states."""
        number, head = divmod(unit, self.heads)
        row, address = self.rows[number], states.data_ptr()
        start, stop = row.start, row.stop
        if first is not None and last is not None:
            edge = row.start // CHUNK
            start, stop = max(row.start, (edge + first) * CHUNK), min(row.stop, (edge + last) * CHUNK)
            address += first * states.stride(0) * 4
        return self._task(row, head, 1, start, stop, address)

    def _task(self, row: Rows, head: int, heads: int, start: int, stop: int, states: int) -> list[int]:
        """Return struct task of forward.c."""
        query = head * self.group
        return [
            row.q + query * self.q.head, *self.q,
            row.o + query * self.o.head, *self.o,
            row.lse and row.lse + query * self.lse.head, *self.lse,
            row.slopes and row.slopes + 4 * query, self.sinks and self.sinks + 4 * query,
            row.mask and row.mask + query * self.mask.head, *self.mask,
            row.queries, heads, head,
            start, stop, row.low, row.high, row.offset,
            row.spans, row.first, row.tokens,
            states, row.sequence, self.first_head + query, row.query,
        ]  # fmt: skip

    def _run(self, name: str, tasks: list[int]) -> None:
        functions = native.library()
        assert functions is not None
        memory = array("q", tasks)
        call = _Call(
            TYPES[self.k_dtype], TYPES[self.q_dtype], self.head_dim, self.value_dim, self.group, self.k_row,
            self.v_row, self.scale, self.softcap, TYPES[self.mask_dtype], self.mask_step, self.keep, self.dropped,
            len(tasks) // TASK, memory.buffer_info()[0],
        )  # fmt: skip
        if getattr(functions, name)(ctypes.byref(call)):
            raise MemoryError


TASK = 29  # integers of a struct task
