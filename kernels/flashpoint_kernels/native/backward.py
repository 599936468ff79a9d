"""Call backward.c: cut the gradient of attention into shares, and run them on one or several threads."""

from __future__ import annotations

import ctypes
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashpoint_contract.spec import Row, Spec
from flashpoint_kernels import native
from flashpoint_kernels.native import calls, forward
from flashpoint_kernels.native.forward import OF_BLOCKS, OF_SCORES, TYPES, of_scores
from flashpoint_kernels.native.rows import Place, numbers_of
from flashpoint_kernels.problems.reproducible import spread

QUERIES = 128  # the queries of a part are a multiple of this, except in the last part of a sequence
# Minimum rows of a part, over the query heads of a key/value head: each part of a head needs memory of its own for the
# gradients of the keys.
_ROWS = 2048
_PARTS = 8  # maximum number of parts into which the queries of a key/value head are cut
_LEAST_FLOPS = 1 << 21  # minimum work of a thread: waking a thread takes about half as long


class _Call(ctypes.Structure):
    """`struct call` of backward.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("type", "dim", "value_dim", "group")),
        *OF_SCORES,
        *((name, ctypes.c_int64) for name in ("dmask_step", "dmask_adds")),
        *OF_BLOCKS,
        ("count", ctypes.c_int64),
        ("parts", ctypes.c_void_p),
    )


class _Part(NamedTuple):
    """Queries of one sequence and some key/value heads, with an estimate of their (query, key) pairs.

    `cut`: the queries of the sequence are cut into several parts, which have the same keys; each has a single head.
    """

    row: Row
    head: int
    heads: int
    first: int
    queries: int
    pairs: int
    cut: bool


class Step(NamedTuple):
    """The tasks of one call of the C function.

    `sum_and_part`: if a mask's gradient is summed over sequences, the sum, and the gradient of this call's sequence,
    which is added to it after the call; else None.
    """

    tasks: array[int]
    sum_and_part: tuple[Tensor, Tensor] | None


@dataclass(eq=False, slots=True)
class Backward:
    """The gradients of several sequences.

    `t` has the tensors by name, as canonical views (see `problem`), with adjacent elements in the rows of q, k, v, o
    and do; lse, dlse, alibi_slopes and sinks are float32. It contains only the requested ones of dq, dk, dv, dattn_mask
    and dsinks. With `adds`, dattn_mask is float32 and initially 0, and gradients are summed over its dimensions of
    stride 0; without, it has the mask's dtype and one element for each score. The gradients of sequences that share a
    mask are added in order, one sequence after another.
    """

    spec: Spec
    t: Mapping[str, Tensor]
    seed: int | None = None  # of dropout
    first_head: int = 0  # index of the first query head in the request: dropout's random words depend on it
    adds: bool = False
    _places: dict[str, Place] = field(init=False)
    _sums: dict[tuple[Row, int], list[Tensor]] = field(default_factory=dict, init=False)
    _dsinks: list[NDArray[np.float64]] = field(default_factory=list, init=False)  # arrays (parts, Hq)
    _dmask: Tensor | None = field(default=None, init=False)  # sum over sequences; broadcast dimensions have size 1

    def __post_init__(self) -> None:
        self._places = {name: Place.of(self.t.get(name)) for name in (*_OF_QUERIES, *_OF_KEYS, *_OF_PAIRS)}

    def shares(self, rows: Sequence[Row], threads: int) -> list[list[Step]]:
        """Return the work for sequences with queries in equal shares for at most `threads` threads.

        Pass the shares to `run`, then call `finish`.
        """
        if self._takes_together(len(rows), max((row.q_len for row in rows), default=0)):
            return self._shares_together(Row(*numbers_of(rows)), threads)
        return self._several(rows, threads)

    def _takes_together(self, rows: int, queries: int) -> bool:
        """Return whether `_shares_together` supports `rows` sequences, the longest of which has this many queries."""
        q_heads, kv_heads = (self.t[name].shape[1] for name in "qk")
        return rows >= forward.TOGETHER and not self.adds and queries <= _ROWS * kv_heads // q_heads

    def _shares_together(self, row: Row, threads: int) -> list[list[Step]]:
        """Return the tasks of many short sequences. The members of `row` are arrays: see `Forward.shares_together`."""
        pairs = self._pairs(row, 0, row.q_len)
        tasks = np.empty((len(pairs), len(PART)), np.int64)
        dsinks = self._memory_of_dsinks(len(tasks)) + 8 * self.t["q"].shape[1] * np.arange(len(tasks))
        part = _Part(row, 0, self.t["k"].shape[1], 0, row.q_len, pairs, cut=False)
        for column, member in enumerate(self._task(part, 0, False, dsinks)):
            tasks[:, column] = member
        edges = pairs.cumsum()
        workers = self._workers(threads, int(edges[-1]))
        cuts = [0, *np.searchsorted(edges, edges[-1] * np.arange(1, workers) // workers), len(tasks)]
        edges_of = [(first, last) for first, last in pairwise(cuts) if first < last]
        return [[Step(array("q", tasks[first:last].tobytes()), None)] for first, last in edges_of]

    def _pairs(self, row: Row, first: int, count: Any) -> Any:
        """Estimate the number of (query, key) pairs of `count` queries from `first` on, at least one for each query.

        Members of `row` and `count` may be arrays with one element per sequence.
        """
        minimum, maximum = (np.minimum, np.maximum) if isinstance(row.kv_len, np.ndarray) else (min, max)
        seen, (left, right) = 0, self.spec.window
        for query in (first, first + count // 2, first + count - 1):
            key = query + row.offset
            seen += maximum(1, minimum(key + right + 1, row.kv_len) - maximum(key - left, 0))
        return count * seen // 3

    def _workers(self, threads: int, pairs: int) -> int:
        """Return the number of threads for the work, at most `threads`. Each head has `pairs` scores."""
        flops = 5 * pairs * self.t["q"].shape[1] * (self.t["q"].shape[3] + self.t["v"].shape[3])
        return max(1, min(threads, flops // _LEAST_FLOPS))

    def _several(self, rows: Sequence[Row], threads: int) -> list[list[Step]]:
        if self.adds and not self._places["dattn_mask"].batch and len(rows) > 1:
            self._dmask = torch.zeros_like(_once(self.t["dattn_mask"]))
        workers = self._workers(threads, sum(self._pairs(row, 0, row.q_len) for row in rows))
        whole = workers == 1 or len(rows) >= 4 * workers
        groups = self._groups(rows, self.t["k"].shape[1] if whole else 1)
        edges = [0, *accumulate(sum(part.pairs for part in group) for group in groups)]
        cuts = [bisect_left(edges, edges[-1] * n // workers) for n in range(workers)] + [len(groups)]
        return [self._share(groups[first:last]) for first, last in pairwise(cuts) if first < last]

    def run(self, shares: list[list[Step]]) -> None:
        """Compute the shares, each on its own thread."""
        if self._dmask is not None:
            spread([partial(self._add, share) for share in shares])
        elif shares:
            calls.share(self._function(), [self._call(step.tasks) for share in shares for step in share])

    def call(self, shares: list[list[Step]]) -> Callable[[], None]:
        """Return the call that runs and finishes `shares`, for gradients other than dattn_mask and dsinks.

        It may be called again while the tensors stay at their addresses.
        """
        tasks = [self._call(step.tasks) for share in shares for step in share]
        compute = calls.prepared(self._function(), tasks, (self, shares))

        def compute_and_finish() -> None:
            compute()
            self.finish()

        return compute_and_finish if self._sums else compute

    def _add(self, share: list[Step]) -> None:
        """Compute a share in this thread. After each sequence, add the gradient of its mask to the sum."""
        for step in share:
            calls.share(self._function(), [self._call(step.tasks)])
            if step.sum_and_part is not None:
                total, partial_sums = step.sum_and_part
                total += partial_sums
                partial_sums.zero_()

    def replay(self, shares: list[list[Step]], tensors: Mapping[str, int]) -> calls.Replay | None:
        """Return a call that repeats the shares with other tensors, whose current addresses are in `tensors`.

        Return None if several parts add to the same elements, or if the call is too large to be kept.
        """
        if self._sums or self._dmask is not None or not shares:
            return None
        steps = [step.tasks for share in shares for step in share]
        if 8 * sum(map(len, steps)) > calls.LARGEST:
            return None
        called, parts = calls.Table.of(list(map(self._call, steps))), calls.Table(np.concatenate(steps), len(PART))
        called.followed_by(-1, steps)
        for number, (name, address) in enumerate(tensors.items()):
            parts.of_tensor(PART.index(name), number, address)
        return calls.Replay(self._function(), called, parts)

    def _function(self) -> Any:
        library = native.library()
        assert library is not None
        return library.of(native.DTYPES[TYPES[self.t["q"].dtype]], "backward").backward

    def _call(self, tasks: array[int]) -> _Call:
        q, v = self.t["q"], self.t["v"]
        mask, dmask = self.t.get("attn_mask"), self.t.get("dattn_mask")
        return _Call(
            type=TYPES[q.dtype], dim=q.shape[3], value_dim=v.shape[3], group=q.shape[1] // v.shape[1],
            dmask_step=0 if dmask is None else dmask.stride(3) * dmask.itemsize, dmask_adds=self.adds,
            count=len(tasks) // len(PART), parts=tasks.buffer_info()[0], **of_scores(self.spec, mask, self.seed),
        )  # fmt: skip

    def finish(self) -> Tensor | None:
        """Write the gradients to which several parts add. Return dsinks, (Hq,) float64, if requested."""
        if self._dmask is not None:
            _once(self.t["dattn_mask"]).copy_(self._dmask)
        for (row, head), (total, *others) in self._sums.items():
            for more in others:
                total += more
            for name, sums in zip(self._of_keys, torch.split(total, self._widths, 1), strict=True):
                self.t[name][row.batch, head].narrow(0, row.kv_start, row.kv_len).copy_(sums)
        if "dsinks" not in self.t:
            return None
        each = np.concatenate([np.zeros((1, self.t["q"].shape[1])), *self._dsinks])
        return torch.from_numpy(np.add.accumulate(each)[-1])  # sum in this order, one part after another

    @property
    def _of_keys(self) -> list[str]:
        """Return the requested gradients to which several parts may add."""
        return [name for name in ("dk", "dv") if name in self.t]

    @property
    def _widths(self) -> list[int]:
        return [self.t[name].shape[3] for name in self._of_keys]

    def _memory_of_dsinks(self, count: int) -> int:
        """Return the address of new memory for the dsinks of `count` parts; 0 if dsinks is not requested."""
        if "dsinks" not in self.t:
            return 0
        self._dsinks.append(np.zeros((count, self.t["q"].shape[1])))
        return self._dsinks[-1].ctypes.data

    def _groups(self, rows: Sequence[Row], together: int) -> list[list[_Part]]:
        """Return the parts in groups. Parts that add to the same elements of a mask's gradient are in one group."""
        if not self.adds:
            return [[part] for part in self._parts(rows, together)]
        groups: dict[tuple[int, int], list[_Part]] = {}
        place = self._places["dattn_mask"]
        for part in self._parts(rows, 1):
            shared = part.row.batch if place.batch else 0, part.head if place.steps.head else 0
            groups.setdefault(shared, []).append(part)
        return list(groups.values())

    def _parts(self, rows: Sequence[Row], together: int) -> Iterator[_Part]:
        """Yield the parts: all queries of some heads, or for a long sequence some queries of one head."""
        heads = self.t["k"].shape[1]
        for row in rows:
            queries = max(_ROWS * heads // self.t["q"].shape[1], -(-row.q_len // _PARTS))
            queries += -queries % QUERIES
            chunks = [(n, min(queries, row.q_len - n)) for n in range(0, row.q_len, queries)]
            cut = len(chunks) > 1
            pairs = [self._pairs(row, *chunk) for chunk in chunks]
            step = 1 if cut else together
            for head in range(0, heads, step):
                for chunk, pairs_of_chunk in zip(chunks, pairs, strict=True):
                    yield _Part(row, head, step, *chunk, step * pairs_of_chunk, cut)

    def _share(self, groups: list[list[_Part]]) -> list[Step]:
        """Return a thread's steps: one, or if masks' gradients are summed over sequences, one for each sequence."""
        if self._dmask is None:
            return [Step(self._tasks([part for group in groups for part in group]), None)]
        steps, (dmask, each) = [], (_once(self.t["dattn_mask"]), self.t["q"].shape[1] // self.t["k"].shape[1])
        for group in groups:
            heads = slice(None)
            if self._places["dattn_mask"].steps.head:
                heads = slice(group[0].head * each, (group[0].head + 1) * each)
            for _, alike in groupby(group, lambda part: part.row):
                steps.append(Step(self._tasks(list(alike)), (self._dmask[:, heads], dmask[:, heads])))
        return steps

    def _tasks(self, parts: list[_Part]) -> array[int]:
        """Return the tasks of a call: the members of one `struct part` for each of `parts`.

        If the call contains the first part of a head that is cut, the head's later parts in this call add to the sums
        of the first, in order. Else each part has sums of its own, which `finish` adds.
        """
        tasks = array("q")
        for _, alike in groupby(parts, lambda part: part[:2]):
            run = list(alike)
            for part in run:
                adds, address = False, 0
                if part.cut:
                    sums = self._sums.setdefault((part.row, part.head), [])
                    adds = part is not run[0] and not run[0].first
                    if not adds:
                        shape = part.row.kv_len, sum(self._widths)
                        sums.append(torch.empty(shape, dtype=torch.float32, device="cpu"))
                    address = sums[-1].data_ptr()
                tasks.extend(self._task(part, address, adds, self._memory_of_dsinks(1)))
        return tasks

    def _task(self, part: _Part, sums: int, adds: bool, dsinks: Any) -> list[Any]:
        """Return one `struct part` of backward.h with the members in PART. `dsinks` is the address for head 0, or 0."""
        row, t, (left, right) = part.row, self.t, self.spec.window
        query = part.head * t["q"].shape[1] // t["k"].shape[1]
        numbers: list[Any] = [part.heads]
        for name in _OF_QUERIES:
            place = self._places[name]
            numbers += place.at(row.batch, row.q_start, query), *place.steps
        for name in _OF_KEYS:
            place = self._places[name]
            numbers += place.at(row.batch, row.kv_start, part.head), *place.steps
        slopes, sinks = t.get("alibi_slopes"), t.get("sinks")
        first_slope = query if slopes is None or slopes.ndim == 1 else query + row.index * slopes.shape[1]
        numbers += (
            sums, adds,
            0 if slopes is None else slopes.data_ptr() + 4 * first_slope,
            0 if sinks is None else sinks.data_ptr() + 4 * query,
            dsinks + 8 * query if "dsinks" in t else 0,
            part.first, part.queries, row.kv_len, row.offset - left, row.offset + right + 1, row.offset,
        )  # fmt: skip
        for name in _OF_PAIRS:
            place = self._places[name]
            numbers += place.at(row.batch, 0, query), *place.steps
        return [*numbers, row.index, self.first_head + query]


def _once(t: Tensor) -> Tensor:
    """Return a view that has size 1 in each dimension whose stride is 0."""
    for axis, step in enumerate(t.stride()):
        if not step:
            t = t.narrow(axis, 0, min(1, t.shape[axis]))
    return t


# The tensors in `struct part`, in its order.
_OF_QUERIES = ("q", "o", "do", "lse", "dlse", "dq")
_OF_KEYS = ("k", "v", "dk", "dv")
_OF_PAIRS = ("attn_mask", "dattn_mask", "block_mask")

# The members of `struct part`, each of 8 bytes.
PART = (
    "heads", *(f"{name}{member}" for name in (*_OF_QUERIES, *_OF_KEYS) for member in ("", "_head", "_row")), "sums",
    "add", "slopes", "sinks", "dsinks", "first", "count", "keys", "low", "high", "offset",
    *(f"{name}{member}" for name in _OF_PAIRS for member in ("", "_head", "_row")), "sequence", "head",
)  # fmt: skip
