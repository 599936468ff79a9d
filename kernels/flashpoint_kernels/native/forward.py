"""Call forward.c: compute attention over keys at any addresses, on one or several threads."""

from __future__ import annotations

import ctypes
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flashpoint_contract.spec import Row, Spec
from flashpoint_kernels import native
from flashpoint_kernels.native import calls
from flashpoint_kernels.native.prefix import SharedPrefix, together
from flashpoint_kernels.native.rows import ABSENT, CHUNK, TILE, UNBOUNDED, Place, QuerySteps, Rows, Spans
from flashpoint_kernels.problems.dropout import drop_below

TOGETHER = 256  # from this many sequences on, `shares_together` makes all tasks at once
_LEAST_BYTES, _LEAST_FLOPS = 1 << 18, 1 << 20  # minimum work of a thread: takes about twice as long as waking one

_OF_ROWS = ("q", "o", "lse", "attn_mask", "block_mask")  # the tensors (N, H, S, …) of `Forward.t`

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
OF_BLOCKS = (("block_queries", ctypes.c_int64), ("block_keys", ctypes.c_int64))


def of_scores(spec: Spec, mask: Tensor | None, seed: int | None = None) -> dict[str, Any]:
    """Return the members in OF_SCORES and OF_BLOCKS. If all keys share an element of the mask, its step is 0."""
    options, p = spec.options, spec.options.dropout_p
    return {
        "scale": spec.scale, "softcap": options.softcap, "mask_type": TYPES[torch.bool if mask is None else mask.dtype],
        "mask_step": 0 if mask is None or mask.shape[3] == 1 else mask.stride(3) * mask.itemsize, "keep": 1.0 - p,
        "dropout": Dropped.of(seed, p), "block_queries": options.block_size[0], "block_keys": options.block_size[1],
    }  # fmt: skip


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
        *OF_BLOCKS,
        ("count", ctypes.c_int64),
        ("tasks", ctypes.c_void_p),
    )


@dataclass(eq=False, slots=True)
class Queries:
    """A forward without its keys: the queries, the memory for the answers, and the options.

    `t` has canonical views (see `problem`) of q, o, lse, attn_mask, block_mask, alibi_slopes and sinks, as far as they
    are given; the rows of q, o and masks have adjacent elements, slopes and sinks are contiguous. The forwards of a
    caller who writes other values into these tensors may share it.
    """

    spec: Spec
    t: Mapping[str, Tensor]
    first_head: int = 0  # index in the request of the first query head; dropout depends on it
    heads: int = field(init=False)
    group: int = field(init=False)
    places: tuple[Place, ...] = field(init=False)  # of the tensors in _OF_ROWS
    steps: QuerySteps = field(init=False)
    functions: native.Functions = field(init=False)
    call: _Call = field(init=False)  # without what depends on keys, seed and tasks

    def __post_init__(self) -> None:
        spec, t, library = self.spec, self.t, native.library()
        self.heads, self.group = spec.kv_heads, spec.q_heads // spec.kv_heads
        self.places = q, o, lse, _, _ = tuple([Place.of(t[name]) if name in t else ABSENT for name in _OF_ROWS])
        self.steps = QuerySteps(q.steps, o.steps, lse.steps)
        assert library is not None
        self.functions = library.of(native.DTYPES[TYPES[t["q"].dtype]])
        self.call = _Call(
            q_type=TYPES[t["q"].dtype], dim=spec.head_dim, value_dim=spec.value_dim, group=self.group,
            **of_scores(spec, t.get("attn_mask")),
        )  # fmt: skip


@dataclass(eq=False, slots=True)
class Forward:
    """One forward computation: tiles of queries over keys at any addresses.

    `keys` describes the keys and values, which have one data type and one stride. A unit of work is one key/value head
    of one element of `rows`; the `group` query heads that share the head are rows of one tile.
    """

    of: Queries
    keys: Sequence[Spans]
    seed: int | None = None  # of dropout
    rows: list[Rows | SharedPrefix] = field(default_factory=list)
    memory: list[object] = field(default_factory=list)  # more memory to which tasks point, kept alive

    def add(self, row: Row, spans: Spans, number: int = 0, first: int = 0, start: int = 0) -> None:
        """Add the queries of one sequence, whose keys [first, row.kv_len) are number `number` in `spans`.

        Queries do not see keys before `start`.
        """
        placed, of = self._placed(row, spans, number, first, start), self.of
        self.rows += placed.tiles(of.group, of.places[3].steps.row) if row.q_len * of.group > TILE else (placed,)

    def _placed(self, row: Row, spans: Spans, number: Any, first: int = 0, start: int = 0) -> Rows:
        """Return the `Rows` of a sequence; of several if `number` and the members of `row` are arrays."""
        of, t, offset, (left, right) = self.of, self.of.t, row.offset, self.of.spec.window
        low, high = offset - left, offset + right + 1
        minimum, maximum = (min, max) if isinstance(number, int) else (np.minimum, np.maximum)
        start = minimum(maximum(low, start), row.kv_len)
        stop = maximum(minimum(row.kv_len, row.q_len - 1 + high), start)
        q, o, lse, mask, blocks = [  # with masks q_start is 0
            place.address and place.address + row.batch * place.batch + row.q_start * place.steps.row
            for place in of.places
        ]
        slopes, sinks = t.get("alibi_slopes"), t.get("sinks")
        first_slope = 0 if slopes is None or slopes.ndim == 1 else 4 * slopes.shape[1] * row.index
        return Rows(
            q, o, lse, of.steps, row.q_len, start, stop, spans.of_sequence(number), spans.tokens, first, low, high,
            offset, 0 if slopes is None else slopes.data_ptr() + first_slope, 0 if sinks is None else sinks.data_ptr(),
            mask, blocks, row.index,
        )  # fmt: skip

    def join(self, other: Forward) -> None:
        """Add the queries of another forward with the same sizes, types and options, and keep its memory alive."""
        self.rows += other.rows
        self.memory.append(other)

    def share_prefixes(self, workers: int) -> None:
        """Combine sequences that begin with the same chunks of keys, so that each such chunk is read about once.

        Form at least enough groups of sequences for `workers` threads, if there are enough sequences.
        """
        alone = [row for row in self.rows if isinstance(row, Rows)]
        if len(alone) > 1 and not self.of.spec.options.dropout_p:
            shared = [row for row in self.rows if isinstance(row, SharedPrefix)]
            self.rows = [*shared, *together(alone, self.of.group, -(-workers // self.of.heads))]

    @property
    def units(self) -> int:
        return len(self.rows) * self.of.heads

    @property
    def nbytes(self) -> int:
        """Return how many bytes of keys and values the forward reads."""
        keys = 0
        for row in self.rows:
            keys += row.keys
        return self._nbytes(keys)

    def _nbytes(self, keys: int) -> int:
        spec = self.of.spec
        return keys * spec.kv_heads * (spec.head_dim + spec.value_dim) * self.keys[0].dtype.itemsize

    def workers(self, threads: int) -> int:
        """Return the number of threads for the work, at most `threads`."""
        if threads == 1:
            return 1
        keys = pairs = 0
        for row in self.rows:
            keys, pairs = keys + row.keys, pairs + row.pairs
        return self._workers(threads, keys, pairs)

    def _workers(self, threads: int, keys: int, pairs: int) -> int:
        spec = self.of.spec
        flops = 2 * pairs * spec.q_heads * (spec.head_dim + spec.value_dim)
        return max(1, min(threads, max(self._nbytes(keys) // _LEAST_BYTES, flops // _LEAST_FLOPS)))

    def parts(self, count: int) -> list[Part]:
        """Return at most `count` parts with about equal work, which cover all units."""
        edges, parts, first = [0], [], 0
        for row in self.rows:
            pairs = row.pairs
            edges += range(edges[-1] + pairs, edges[-1] + pairs * self.of.heads + 1, pairs)
        for number in range(1, count + 1):
            if (last := bisect_left(edges, edges[-1] * number // count)) > first:
                parts.append(Part(self, first, last))
                first = last
        return parts

    def shares(self, workers: int) -> tuple[list[list[int]], list[tuple[list[int], Tensor]]]:
        """Divide the work about equally among `workers` threads: by units, or by chunks of keys if there are few units.

        Return the tasks of each thread; and for each unit that several threads share, its task for the C function
        flashpoint_merge and the memory for the states of its chunks.
        """
        if workers < 2:
            return [self._whole(0, self.units)], []
        rows = [row for row in self.rows if isinstance(row, Rows)]
        if self.units >= 4 * workers or len(rows) < len(self.rows):
            return [self._whole(part.first, part.last) for part in self.parts(workers)], []
        return self._between_chunks(rows, workers)

    def _between_chunks(
        self, rows: Sequence[Rows], workers: int
    ) -> tuple[list[list[int]], list[tuple[list[int], Tensor]]]:
        edges, scores = [0], []  # number of chunks up to each unit; scores of each chunk
        for row in rows:
            edges += [edges[-1] + row.chunks * (head + 1) for head in range(self.of.heads)]
            scores += [row.queries * max(1, keys) for keys in row.keys_of_chunks()] * self.of.heads
        done = [*accumulate(scores, initial=0)]
        middles = [end - own / 2 for end, own in zip(done[1:], scores, strict=True)]
        cuts = [0]
        for left in range(workers, 0, -1):
            cuts.append(bisect_left(middles, done[cuts[-1]] + (done[-1] - done[cuts[-1]]) / left))
        unit = 0
        shares: list[list[int]] = []
        merged: dict[int, Tensor] = {}
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
                row = self._at_head(rows[unit // self.of.heads], unit % self.of.heads)
                if unit not in merged:
                    size = self.of.group * row.queries * self._state_size
                    merged[unit] = torch.empty(row.chunks, size, dtype=torch.float32, device="cpu")
                tasks += self._part(row, start - edges[unit], end - edges[unit], merged[unit])
                start = end
            if tasks:
                shares.append(tasks)
        whole = [(self._at_head(rows[unit // self.of.heads], unit % self.of.heads), t) for unit, t in merged.items()]
        return shares, [(self._task(row, 1, row.start, row.stop, t.data_ptr()), t) for row, t in whole]

    def takes_together(self, rows: int, queries: int) -> bool:
        """Return whether `shares_together` supports `rows` sequences, the longest of which has this many queries."""
        return rows >= TOGETHER and queries * self.of.group <= TILE

    def shares_together(self, row: Row, threads: int) -> list[array[int]]:
        """Return the tasks of many short sequences for each of at most `threads` threads. Sequence n has keys number n.

        Members of `row` that differ between sequences are arrays (n,), because a Python loop over sequences would take
        longer than the kernel.
        """
        rows = self._placed(row, self.keys[0], np.arange(len(row.index)))  # type: ignore[arg-type]
        _, queries, keys = np.broadcast_arrays(rows.q, rows.queries, rows.stop - rows.start)
        tasks = np.empty((len(queries), len(TASK)), np.int64)
        for column, member in enumerate(self._task(rows, self.of.heads, rows.start, rows.stop)):
            tasks[:, column] = member
        workers = self._workers(threads, int(keys.sum()), int((queries * keys).sum()))
        edges = (queries * np.maximum(keys, 1)).cumsum()
        cuts = [0, *np.searchsorted(edges, edges[-1] * np.arange(1, workers) // workers), len(tasks)]
        return [array("q", tasks[first:last].tobytes()) for first, last in pairwise(cuts) if first < last]

    def call(
        self, shares: Sequence[Sequence[int]], merged: Sequence[tuple[list[int], Tensor]] = ()
    ) -> Callable[[], None]:
        """Return a function that computes each share on a different thread, and then merges the units in `merged`.

        The arguments are results of `shares`. The function may be called again while the tensors stay at their
        addresses.
        """
        functions, memory = self.of.functions, [array("q", tasks) for tasks in shares]
        compute = calls.prepared(functions.forward, [self._call(tasks) for tasks in memory], (self, memory))
        if not merged:
            return compute
        together = array("q", [number for task, _ in merged for number in task])
        merge = calls.prepared(functions.merge, [self._call(together)], (self, together, merged))

        def compute_and_merge() -> None:
            compute()
            merge()

        return compute_and_merge

    def replay(self, shares: Sequence[Sequence[int]], tensors: Mapping[str, int]) -> calls.Replay | None:
        """Return a `Replay` of the shares for other q, k, v, o and lse; None if it would exceed `calls.LARGEST`.

        `tensors` has the current addresses of these tensors, without lse if the shares do not write it. The replay
        takes the new addresses in the order of `tensors`.
        """
        (spans,) = self.keys
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
        return calls.Replay(self.of.functions.forward, called, tasks, keys)

    def _whole(self, first: int, last: int) -> list[int]:
        """Return the tasks for the units [first, last)."""
        tasks = []
        while first < last:
            number, head = divmod(first, self.of.heads)
            count = min(self.of.heads - head, last - first)
            row = self.rows[number]
            if isinstance(row, Rows):
                tasks += self._task(self._at_head(row, head) if head else row, count, row.start, row.stop)
            else:
                tasks += self._prefix(row, head, count)
            first += count
        return tasks

    def _part(self, row: Rows, first: int, last: int, states: Tensor) -> list[int]:
        """Return the task for the chunks [first, last) of a head's keys.

        `states` is memory for the states of all chunks of the head.
        """
        edge = row.start // CHUNK
        start, stop = max(row.start, (edge + first) * CHUNK), min(row.stop, (edge + last) * CHUNK)
        return self._task(row, 1, start, stop, states.data_ptr() + first * states.stride(0) * 4)

    @property
    def _state_size(self) -> int:
        """Return the number of floats in the softmax state of one row, as `state_size` in forward.c does."""
        return 2 + -(-self.of.spec.value_dim // native.VECTOR) * native.VECTOR

    def _prefix(self, prefix: SharedPrefix, head: int, heads: int) -> list[int]:
        """Return the tasks of a shared prefix, in the order in which one thread must compute them."""
        group = self.of.group
        edges = [group * queries for queries in accumulate((row.queries for row in prefix.rows), initial=0)]
        states = np.zeros((heads, edges[-1], self._state_size), np.float32)
        states[:, :, 0] = -np.inf
        step = states[0].size
        rows = [
            self._at_head(row, head)._replace(state=states[0, edge:].ctypes.data, state_head=step)
            for row, edge in zip(prefix.rows, edges, strict=False)
        ]
        readers = array("q")
        for row in rows:
            readers.extend(self._task(row, heads, 0, 0)[: len(READER)])
        self.memory += states, readers
        tasks = []
        for run in prefix.runs:
            together = rows[run.first]._replace(
                lse=0, sinks=0, queries=(edges[run.last] - edges[run.first]) // group, low=-UNBOUNDED, high=UNBOUNDED,
                state=0, readers=readers.buffer_info()[0] + run.first * len(READER) * readers.itemsize,
                reader_count=run.last - run.first,
            )  # fmt: skip
            tasks += self._task(together, heads, run.start, run.stop)
        for row, tail in zip(rows, prefix.tails, strict=True):
            tasks += self._task(row, heads, tail, row.stop)
        return tasks

    def _at_head(self, row: Rows, head: int) -> Rows:
        """Return rows from key/value head `head` on, in place of 0."""
        query, (*_, mask, blocks) = head * self.of.group, self.of.places
        return row._replace(
            head=head,
            q=row.q + query * row.steps.q.head,
            o=row.o + query * row.steps.o.head,
            lse=row.lse and row.lse + query * row.steps.lse.head,
            slopes=row.slopes and row.slopes + 4 * query,
            sinks=row.sinks and row.sinks + 4 * query,
            mask=row.mask and row.mask + query * mask.steps.head,
            blocks=row.blocks and row.blocks + query * blocks.steps.head,
        )

    def _task(self, row: Rows, heads: int, start: int, stop: int, parts: int = 0) -> list[int]:
        """Return one `struct task` of forward.h for `heads` heads: the members in TASK, in order."""
        of, (q, o, lse), (*_, mask, blocks) = self.of, row.steps, self.of.places
        return [
            row.q, *q, row.queries, row.state, row.state_head,
            row.o, *o, row.lse, *lse, row.slopes, row.sinks, row.mask, *mask.steps, row.blocks, *blocks.steps,
            heads, row.head, start, stop, row.low, row.high, row.offset,
            row.spans, row.first, row.tokens,
            parts, row.sequence, of.first_head + row.head * of.group, row.query,
            row.readers, row.reader_count,
        ]  # fmt: skip

    def _call(self, tasks: array[int]) -> _Call:
        """Return the argument of the C function for these tasks."""
        call, keys = _Call.from_buffer_copy(self.of.call), self.keys[0]
        call.k_type, call.k_row, call.v_row = TYPES[keys.dtype], keys.k_step, keys.v_step
        call.count, call.tasks = len(tasks) // len(TASK), tasks.buffer_info()[0]
        if p := self.of.spec.options.dropout_p:
            call.dropout = Dropped.of(self.seed, p)
        return call


class Part(NamedTuple):
    """The units [first, last) of a forward, which one core computes."""

    forward: Forward
    first: int
    last: int

    def compute(self) -> None:
        """Compute these rows of o and lse, in this thread."""
        tasks = array("q", self.forward._whole(self.first, self.last))
        calls.prepared(self.forward.of.functions.forward, [self.forward._call(tasks)])()
