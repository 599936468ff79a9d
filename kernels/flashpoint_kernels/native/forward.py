"""Call forward.c: compute attention over keys at any addresses, on one or several threads."""

from __future__ import annotations

import ctypes
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from flashpoint_kernels import native
from flashpoint_kernels.native import calls
from flashpoint_kernels.native.prefix import SharedPrefix, together
from flashpoint_kernels.native.rows import CHUNK, NOWHERE, TILE, UNBOUNDED, ByteSteps, Rows, Spans
from flashpoint_kernels.problems.dropout import drop_below

TOGETHER = 256  # from this many sequences on, `shares_together` makes all tasks at once
_LEAST_BYTES, _LEAST_FLOPS = 1 << 18, 1 << 20  # minimum work of a thread: takes about twice as long as waking one

TYPES = {getattr(torch, name): number for number, name in enumerate(native.DTYPES)}


class Dropped(ctypes.Structure):
    """`struct dropout` of options.h: two words of the seed, the largest random word that drops a key, and on or off."""

    _fields_ = tuple((name, ctypes.c_uint32) for name in ("low", "high", "last", "on"))

    @classmethod
    def of(cls, seed: int | None, p: float) -> Dropped:
        """Return the structure for dropout with probability p; 0 turns dropout off."""
        if not p or seed is None:
            return cls()
        return cls(seed & 0xFFFFFFFF, seed >> 32, drop_below(p) - 1, 1)


# Members of `struct call` in forward.h and backward.h: the options that turn q·k into probabilities.
OF_SCORES = (
    ("scale", ctypes.c_double),
    ("softcap", ctypes.c_double),
    ("mask_type", ctypes.c_int64),
    ("mask_step", ctypes.c_int64),
    ("keep", ctypes.c_double),
    ("dropout", Dropped),
)


# Members of `struct reader` and `struct task` in forward.h, each of 8 bytes.
READER = ("q", "q_head", "q_row", "queries", "state", "state_head")
TASK = (
    *(f"own.{name}" for name in READER), "o", "o_head", "o_row", "lse", "lse_head", "lse_row",
    "slopes", "sinks", "mask", "mask_head", "mask_row", "blocks", "blocks_head", "blocks_row", "heads", "first_head",
    "start", "stop", "low", "high", "offset", "spans", "first", "tokens", "parts", "sequence", "query_head",
    "first_query", "readers", "reader_count",
)  # fmt: skip


class _Call(ctypes.Structure):
    """`struct call` of forward.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("k_type", "q_type", "dim", "value_dim", "group", "k_row", "v_row")),
        *OF_SCORES,
        *((name, ctypes.c_int64) for name in ("block_queries", "block_keys", "count")),
        ("tasks", ctypes.c_void_p),
    )


@dataclass(eq=False, slots=True)
class Forward:
    """One forward computation: tiles of queries that have the same types, sizes and options.

    There are `heads` key/value heads; `group` query heads share each of them. A unit of work is one key/value head of
    one element of `rows`. `held` keeps alive the memory whose addresses `rows` contains.
    """

    q_dtype: torch.dtype  # also o's
    k_dtype: torch.dtype  # also v's
    head_dim: int
    value_dim: int
    heads: int
    group: int
    scale: float
    softcap: float
    k_row: int
    v_row: int
    mask: ByteSteps = NOWHERE
    mask_dtype: torch.dtype = torch.bool
    mask_step: int = 0  # stride from key to key in bytes; 0 if all keys share one element
    keep: float = 1.0  # 1 - dropout_p
    dropped: Dropped = field(default_factory=Dropped)
    first_head: int = 0  # index in the request of the first query head; dropout depends on it
    held: object = None
    blocks: ByteSteps = NOWHERE
    block_size: tuple[int, int] = (1, 1)
    rows: list[Rows | SharedPrefix] = field(default_factory=list)
    memory: list[object] = field(default_factory=list)  # more memory to which tasks point, kept alive

    def add(self, rows: Rows) -> None:
        """Add the queries of one sequence."""
        self.rows += rows.tiles(self.group, self.mask.row)

    def join(self, other: Forward) -> None:
        """Add the queries of another forward with the same sizes, types and options, and keep its memory alive."""
        self.rows += other.rows
        self.memory.append(other.held)

    def share_prefixes(self, workers: int) -> None:
        """Combine sequences that begin with the same chunks of keys, so that each such chunk is read about once.

        Form at least enough groups of sequences for `workers` threads, if there are enough sequences.
        """
        alone = [row for row in self.rows if isinstance(row, Rows)]
        if len(alone) > 1 and not self.dropped.on:
            shared = [row for row in self.rows if isinstance(row, SharedPrefix)]
            self.rows = [*shared, *together(alone, self.group, -(-workers // self.heads))]

    @property
    def units(self) -> int:
        return len(self.rows) * self.heads

    @property
    def nbytes(self) -> int:
        """Return how many bytes of keys and values the forward reads."""
        return self._nbytes(sum(row.keys for row in self.rows))

    def _nbytes(self, keys: int) -> int:
        return keys * self.heads * (self.head_dim + self.value_dim) * self.k_dtype.itemsize

    def workers(self, threads: int) -> int:
        """Return the number of threads for the work, at most `threads`."""
        return self._workers(threads, sum(row.keys for row in self.rows), sum(row.pairs for row in self.rows))

    def _workers(self, threads: int, keys: int, pairs: int) -> int:
        flops = 2 * pairs * self.heads * self.group * (self.head_dim + self.value_dim)
        return max(1, min(threads, max(self._nbytes(keys) // _LEAST_BYTES, flops // _LEAST_FLOPS)))

    def compute(self, first: int, last: int) -> None:
        """Compute the units [first, last) in this thread."""
        self.call([self._whole(first, last)])()

    def shares(self, workers: int) -> tuple[list[list[int]], list[tuple[list[int], torch.Tensor]]]:
        """Divide the work about equally among `workers` threads: by units, or by chunks of keys if there are few units.

        Return the tasks of each thread; and for each unit that several threads share, its task for the C function
        flashpoint_merge and the memory for the states of its chunks.
        """
        if workers < 2:
            return [self._whole(0, self.units)], []
        rows = [row for row in self.rows if isinstance(row, Rows)]
        if self.units >= 4 * workers or len(rows) < len(self.rows):
            return [self._whole(first, last) for first, last in self.cuts(workers)], []
        return self._between_chunks(rows, workers)

    def cuts(self, count: int) -> list[tuple[int, int]]:
        """Return at most `count` ranges of units with about equal work."""
        edges = [0, *accumulate(pairs for row in self.rows for pairs in [row.pairs] * self.heads)]
        cuts = [bisect_left(edges, edges[-1] * number // count) for number in range(count + 1)]
        return [(first, last) for first, last in pairwise(cuts) if first < last]

    def _between_chunks(
        self, rows: Sequence[Rows], workers: int
    ) -> tuple[list[list[int]], list[tuple[list[int], torch.Tensor]]]:
        edges, scores = [0], []  # number of chunks up to each unit; scores of each chunk
        for row in rows:
            edges += [edges[-1] + row.chunks * (head + 1) for head in range(self.heads)]
            scores += [row.queries * max(1, keys) for keys in row.keys_of_chunks()] * self.heads
        done = [*accumulate(scores, initial=0)]
        middles = [end - own / 2 for end, own in zip(done[1:], scores, strict=True)]
        cuts = [0]
        for left in range(workers, 0, -1):
            cuts.append(bisect_left(middles, done[cuts[-1]] + (done[-1] - done[cuts[-1]]) / left))
        unit = 0
        shares: list[list[int]] = []
        merged: dict[int, torch.Tensor] = {}
        for start, stop in pairwise(cuts):
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
                row, head = rows[unit // self.heads], unit % self.heads
                if unit not in merged:
                    size = self.group * row.queries * self._state_size
                    merged[unit] = torch.empty(row.chunks, size, dtype=torch.float32, device="cpu")
                tasks += self._part(row, head, start - edges[unit], end - edges[unit], merged[unit])
                start = end
            if tasks:
                shares.append(tasks)
        whole = [(rows[unit // self.heads], unit % self.heads, t) for unit, t in merged.items()]
        return shares, [(self._task(row, head, 1, row.start, row.stop, t.data_ptr()), t) for row, head, t in whole]

    def takes_together(self, rows: int, queries: int) -> bool:
        """Return whether `shares_together` supports `rows` sequences, the longest of which has this many queries."""
        return rows >= TOGETHER and queries * self.group <= TILE

    def shares_together(self, rows: Rows, threads: int) -> list[array[int]]:
        """Return the tasks of many short sequences for each of at most `threads` threads.

        Members of `rows` that differ between sequences are arrays (n,), because a Python loop over sequences would take
        longer than the kernel.
        """
        _, queries, keys = np.broadcast_arrays(rows.q, rows.queries, rows.stop - rows.start)
        tasks = np.empty((len(queries), len(TASK)), np.int64)
        for column, member in enumerate(self._task(rows, 0, self.heads, rows.start, rows.stop)):
            tasks[:, column] = member
        workers = self._workers(threads, int(keys.sum()), int((queries * keys).sum()))
        edges = (queries * np.maximum(keys, 1)).cumsum()
        cuts = [0, *np.searchsorted(edges, edges[-1] * np.arange(1, workers) // workers), len(tasks)]
        return [array("q", tasks[first:last].tobytes()) for first, last in pairwise(cuts) if first < last]

    def call(
        self, shares: Sequence[Sequence[int]], merged: Sequence[tuple[list[int], torch.Tensor]] = ()
    ) -> Callable[[], None]:
        """Return a function that computes each share on a different thread, and then merges the units in `merged`.

        The arguments are results of `shares`. The function may be called again while the tensors stay at their
        addresses.
        """
        functions, memory = self._functions(), [array("q", tasks) for tasks in shares]
        compute = calls.prepared(functions.forward, [self._call(tasks) for tasks in memory], (self, memory))
        if not merged:
            return compute
        together = array("q", [number for task, _ in merged for number in task])
        merge = calls.prepared(functions.merge, [self._call(together)], (self, together, merged))

        def compute_and_merge() -> None:
            compute()
            merge()

        return compute_and_merge

    def replay(self, shares: Sequence[Sequence[int]], spans: Spans, tensors: Mapping[str, int]) -> calls.Replay | None:
        """Return a `Replay` of the shares for other q, k, v, o and lse; None if it would exceed `calls.LARGEST`.

        `tensors` has the current addresses of these tensors, without lse if the shares do not write it. The replay
        takes the new addresses in the order of `tensors`.
        """
        number = {name: place for place, name in enumerate(tensors)}
        memory = [array("q", tasks) for tasks in shares]
        if 8 * sum(map(len, memory)) > calls.LARGEST:
            return None
        called = calls.Table.of([self._call(tasks) for tasks in memory])
        tasks, keys = calls.Table(np.concatenate(memory), len(TASK)), calls.Table(spans.numbers, 8)
        at = called.followed_by(-1, memory)
        tasks.of_itself(TASK.index("spans"), spans.of_sequence(0) - at)
        for member, name in (("own.q", "q"), ("o", "o"), ("lse", "lse")):
            if name in tensors:
                tasks.of_tensor(TASK.index(member), number[name], tensors[name])
        for column, name in enumerate("kv"):
            keys.of_tensor(column, number[name], tensors[name])
        return calls.Replay(self._functions().forward, called, tasks, keys)

    def _whole(self, first: int, last: int) -> list[int]:
        tasks = []
        while first < last:
            number, head = divmod(first, self.heads)
            count = min(self.heads - head, last - first)
            row = self.rows[number]
            if isinstance(row, Rows):
                tasks += self._task(row, head, count, row.start, row.stop)
            else:
                tasks += self._prefix(row, head, count)
            first += count
        return tasks

    def _part(self, row: Rows, head: int, first: int, last: int, states: torch.Tensor) -> list[int]:
        """Return the task for the chunks [first, last) of a head's keys.

        `states` is memory for the states of all chunks of the head.
        """
        edge = row.start // CHUNK
        start, stop = max(row.start, (edge + first) * CHUNK), min(row.stop, (edge + last) * CHUNK)
        return self._task(row, head, 1, start, stop, states.data_ptr() + first * states.stride(0) * 4)

    @property
    def _state_size(self) -> int:
        """Return the number of floats in the softmax state of one row, as `state_size` in forward.c does."""
        return 2 + -(-self.value_dim // native.VECTOR) * native.VECTOR

    def _prefix(self, prefix: SharedPrefix, head: int, heads: int) -> list[int]:
        """Return the tasks of a shared prefix, in the order in which one thread must compute them."""
        edges = [self.group * queries for queries in accumulate((row.queries for row in prefix.rows), initial=0)]
        states = np.zeros((heads, edges[-1], self._state_size), np.float32)
        states[:, :, 0] = -np.inf
        step = states[0].size
        rows = [
            row._replace(state=states[0, edge:].ctypes.data, state_head=step)
            for row, edge in zip(prefix.rows, edges, strict=False)
        ]
        readers = array("q")
        for row in rows:
            readers.extend(self._reader(row, head))
        self.memory += states, readers
        tasks = []
        for run in prefix.runs:
            together = rows[run.first]._replace(
                lse=0, sinks=0, queries=(edges[run.last] - edges[run.first]) // self.group, low=-UNBOUNDED,
                high=UNBOUNDED, state=0, readers=readers.buffer_info()[0] + run.first * len(READER) * readers.itemsize,
                reader_count=run.last - run.first,
            )  # fmt: skip
            tasks += self._task(together, head, heads, run.start, run.stop)
        for row, tail in zip(rows, prefix.tails, strict=True):
            tasks += self._task(row, head, heads, tail, row.stop)
        return tasks

    def _task(self, row: Rows, head: int, heads: int, start: int, stop: int, parts: int = 0) -> list[int]:
        """Return one `struct task` of forward.h: the members in TASK, in order."""
        query, (_, o, lse) = head * self.group, row.steps
        return [
            *self._reader(row, head),
            row.o + query * o.head, *o,
            _moved(row.lse, query * lse.head), *lse,
            _moved(row.slopes, 4 * query), _moved(row.sinks, 4 * query),
            _moved(row.mask, query * self.mask.head), *self.mask,
            _moved(row.blocks, query * self.blocks.head), *self.blocks,
            heads, head, start, stop, row.low, row.high, row.offset,
            row.spans, row.first, row.tokens,
            parts, row.sequence, self.first_head + query, row.query,
            row.readers, row.reader_count,
        ]  # fmt: skip

    def _reader(self, row: Rows, head: int) -> tuple[int, ...]:
        """Return one `struct reader` of forward.h: the members in READER, in order."""
        step = row.steps.q
        return row.q + head * self.group * step.head, *step, row.queries, row.state, row.state_head

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
    """Return addresses plus an offset in bytes; an address of 0 (absent) stays 0."""
    return address + by if isinstance(address, np.ndarray) or address else 0
