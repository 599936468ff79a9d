"""Call forward.c: attention over keys at any places in memory, on one thread or shared by several."""

from __future__ import annotations

import ctypes
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flashpoint_kernels import native
from flashpoint_kernels.dropout import drop_below
from flashpoint_kernels.native import calls

CHUNK = 1024  # keys of one softmax, see forward.c
UNBOUNDED = 1 << 60
TILE = 384  # rows of a key/value head that read the keys together: queries of its query heads
_STEP = 96  # rows: tiles have a multiple of it
TOGETHER = 256  # sequences: from this number on their tasks are made together
_LEAST_BYTES, _LEAST_FLOPS = 1 << 18, 1 << 21  # work of a thread: to wake one takes about half as long

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


# Members of struct task of forward.h: 8 bytes each.
TASK = (
    "q", "q_head", "q_row", "o", "o_head", "o_row", "lse", "lse_head", "lse_row", "slopes", "sinks",
    "mask", "mask_head", "mask_row", "blocks", "blocks_head", "blocks_row", "queries", "heads", "first_head",
    "start", "stop", "low", "high", "offset", "spans", "first", "tokens", "parts", "sequence", "query_head",
    "first_query",
)  # fmt: skip


class _Call(ctypes.Structure):
    """struct call of forward.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("k_type", "q_type", "dim", "value_dim", "group", "k_row", "v_row")),
        *OF_SCORES,
        *((name, ctypes.c_int64) for name in ("block_queries", "block_keys", "count")),
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

    __slots__ = ("_address", "_count", "numbers", "tokens")

    def __init__(self, numbers: array[int] | NDArray[np.int64], tokens: int, count: int = 1) -> None:
        self.numbers = np.asarray(numbers)  # no copy
        self._address = self.numbers.ctypes.data
        self._count = count
        self.tokens = tokens

    def of_sequence(self, number: Any) -> Any:
        """Return the address of the first span of a sequence, or those of an array of sequences."""
        return self._address + 64 * self._count * number


class Rows(NamedTuple):
    """The queries of one sequence and their keys.

    `q`, `o`, `lse`, `slopes`, `mask` and `blocks` are addresses (`lse`: 0 if not wanted; the others: 0 without one).
    Query i sees the keys [i + low, i + high) among [start, stop). `spans` is an address in a `Spans`, whose first key
    has position `first`. `mask` and `blocks`, the block mask, are of query 0 and key 0 of the sequence.
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
    blocks: int = 0
    sequence: int = 0  # for dropout, and the number of the first query
    query: int = 0

    @property
    def chunks(self) -> int:
        return max(1, -(-self.stop // CHUNK) - self.start // CHUNK)

    def tiles(self, forward: Forward) -> Iterator[Rows]:
        """Yield the queries in tiles of at most TILE rows. Each tile reads its keys once."""
        count = -(-self.queries * forward.group // TILE)
        if count < 2:
            yield self
            return
        height = max(1, -(-(self.queries * forward.group) // (count * _STEP)) * _STEP // forward.group)
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
    blocks: Steps = NOWHERE
    block_size: tuple[int, int] = (1, 1)
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
        return self._nbytes(sum(row.stop - row.start for row in self.rows))

    def _nbytes(self, keys: int) -> int:
        return keys * self.heads * (self.head_dim + self.value_dim) * self.k_dtype.itemsize

    def workers(self, most: int) -> int:
        """Return the number of threads for this work, at most `most`."""
        keys = sum(row.stop - row.start for row in self.rows)
        return self._workers(most, keys, sum(row.queries * (row.stop - row.start) for row in self.rows))

    def _workers(self, most: int, keys: int, pairs: int) -> int:
        flops = 2 * pairs * self.heads * self.group * (self.head_dim + self.value_dim)
        return max(1, min(most, max(self._nbytes(keys) // _LEAST_BYTES, flops // _LEAST_FLOPS)))

    def compute(self, first: int, last: int) -> None:
        """Compute units [first, last) in this thread."""
        self.run([self._whole(first, last)])

    def shares(self, workers: int) -> tuple[list[list[int]], list[tuple[list[int], torch.Tensor]]]:
        """Cut the work into about equal tasks for `workers` threads: between units, or between chunks if units are few.

        Return the tasks of each thread; and for each unit that threads share, its task for `merge` and its memory.
        """
        if workers < 2:
            return [self._whole(0, self.units)], []
        if self.units >= 4 * workers:
            weights = (row.queries * max(1, row.stop - row.start) for row in self.rows for _ in range(self.heads))
            edges = [0, *accumulate(weights)]
            cuts = [bisect_left(edges, edges[-1] * number // workers) for number in range(workers + 1)]
            return [self._whole(first, last) for first, last in pairwise(cuts) if first < last], []
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
            if tasks:
                shares.append(tasks)
        return shares, [(self._part(unit, None, None, t), t) for unit, t in merged.items()]

    def takes_together(self, rows: int, queries: int) -> bool:
        """Return whether `compute_together` takes `rows` sequences, of which the longest has this many queries."""
        return rows >= TOGETHER and queries * self.group <= TILE

    def compute_together(self, rows: Rows, threads: int) -> list[array[int]]:
        """Compute many short sequences on at most `threads` threads; return the tasks of each thread.

        `rows` has an array (n,) in the place of each number that differs between them: Python would take longer to
        make their tasks one by one than the kernel to compute them.
        """
        _, queries, keys = np.broadcast_arrays(rows.q, rows.queries, rows.stop - rows.start)
        tasks = np.empty((len(queries), len(TASK)), np.int64)
        for column, member in enumerate(self._task(rows, 0, self.heads, rows.start, rows.stop, 0)):
            tasks[:, column] = member
        workers = self._workers(threads, int(keys.sum()), int((queries * keys).sum()))
        edges = (queries * np.maximum(keys, 1)).cumsum()
        cuts = [0, *np.searchsorted(edges, edges[-1] * np.arange(1, workers) // workers), len(tasks)]
        shares = [array("q", tasks[first:last].tobytes()) for first, last in pairwise(cuts) if first < last]
        self._run(shares)
        return shares

    def run(self, shares: Sequence[list[int]]) -> None:
        """Compute shares of the work, each in a thread of its own."""
        self._run([array("q", tasks) for tasks in shares])

    def _run(self, memory: Sequence[array[int]]) -> None:
        calls.share(self._functions().forward, [self._call(tasks) for tasks in memory])

    def merge(self, tasks: Sequence[tuple[list[int], torch.Tensor]]) -> None:
        """Write the answers of units that several threads have computed."""
        memory = array("q", [number for task, _ in tasks for number in task])
        calls.share(self._functions().merge, [self._call(memory)])

    def replay(self, shares: Sequence[Sequence[int]], spans: Spans, tensors: Mapping[str, int]) -> calls.Replay | None:
        """Return the shares as a call of q, k, v, o and lse, whose addresses now are in `tensors`, in any order.

        None if it is too large to be kept.
        """
        number = {name: place for place, name in enumerate(tensors)}
        memory = [array("q", tasks) for tasks in shares]
        if 8 * sum(map(len, memory)) > calls.LARGEST:
            return None
        called = calls.Table.of([self._call(tasks) for tasks in memory])
        tasks, keys = calls.Table(np.concatenate(memory), len(TASK)), calls.Table(spans.numbers, 8)
        at = called.followed_by(-1, memory)
        tasks.of_itself(TASK.index("spans"), spans.of_sequence(0) - at)
        for name in ("q", "o", "lse"):
            tasks.of_tensor(TASK.index(name), number[name], tensors[name])
        for column, name in enumerate("kv"):
            keys.of_tensor(column, number[name], tensors[name])
        return calls.Replay(self._functions().forward, called, tasks, keys)

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
        """Return struct task of forward.h: the members of TASK, in their order."""
        query = head * self.group
        return [
            row.q + query * self.q.head, *self.q,
            row.o + query * self.o.head, *self.o,
            _moved(row.lse, query * self.lse.head), *self.lse,
            _moved(row.slopes, 4 * query), _moved(self.sinks, 4 * query),
            _moved(row.mask, query * self.mask.head), *self.mask,
            _moved(row.blocks, query * self.blocks.head), *self.blocks,
            row.queries, heads, head,
            start, stop, row.low, row.high, row.offset,
            row.spans, row.first, row.tokens,
            states, row.sequence, self.first_head + query, row.query,
        ]  # fmt: skip

    def _functions(self) -> native.Functions:
        library = native.library()
        assert library is not None
        return library.of(native.DTYPES[TYPES[self.q_dtype]])

    def _call(self, tasks: array[int]) -> _Call:
        return _Call(
            k_type=TYPES[self.k_dtype], q_type=TYPES[self.q_dtype], dim=self.head_dim, value_dim=self.value_dim,
            group=self.group, k_row=self.k_row, v_row=self.v_row, scale=self.scale, softcap=self.softcap,
            mask_type=TYPES[self.mask_dtype], mask_step=self.mask_step, keep=self.keep, dropout=self.dropped,
            block_queries=self.block_size[0], block_keys=self.block_size[1], count=len(tasks) // len(TASK),
            tasks=tasks.buffer_info()[0],
        )  # fmt: skip


def _moved(address: Any, by: int) -> Any:
    """Return an address, or an array of addresses, moved by some bytes; 0, for what is not there, stays."""
    return address + by if isinstance(address, np.ndarray) or address else 0
