"""Call backward.c: the gradient of attention, on one thread or shared by several."""

from __future__ import annotations

import ctypes
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from flashpoint_kernels import native
from flashpoint_kernels.native.forward import TYPES, Dropped, Steps

QUERIES = 64  # of a block, see backward.c
_ROWS = 2048  # of a part, at least: the gradients of its keys take as much memory again
_PARTS = 8  # of a key/value head, at most
_LEAST_FLOPS = 1 << 23  # work of a thread: to hand it over takes about half as long


class _Call(ctypes.Structure):
    """struct call of backward.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("type", "dim", "value_dim", "group")),
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
        ("mask_type", ctypes.c_int64),
        ("mask_step", ctypes.c_int64),
        ("keep", ctypes.c_double),
        ("dropout", Dropped),
        ("count", ctypes.c_int64),
        ("parts", ctypes.c_void_p),
    )


class Place(NamedTuple):
    """Address of a sequence's first row for head 0, and steps in bytes; 0 for a tensor that is not there."""

    address: int = 0
    head: int = 0
    row: int = 0

    def at(self, head: int) -> tuple[int, int, int]:
        """Return the address for a head, and both steps."""
        return self.address and self.address + head * self.head, self.head, self.row

    @classmethod
    def of(cls, t: Tensor | None, batch: int, row: int) -> Place:
        """Return the place of a sequence in a canonical view (N, H, S, …)."""
        if t is None:
            return NOWHERE
        steps = Steps(*(t.stride(n) * t.itemsize for n in (1, 2)))
        return cls(t.data_ptr() + batch * t.stride(0) * t.itemsize + row * steps.row, *steps)


NOWHERE = Place()


class Sequence(NamedTuple):
    """The tensors of one sequence. Query i sees the keys [i + low, i + high) among `keys`."""

    q: Place
    o: Place
    do: Place
    lse: Place
    dlse: Place
    k: Place
    v: Place
    dq: Place
    dk: Place
    dv: Place
    mask: Place
    dmask: Place
    slopes: int  # address, or 0; of the first head
    queries: int
    keys: int
    low: int
    high: int
    offset: int
    number: int  # for dropout
    dk_view: Tensor | None  # (Hk, keys, D)
    dv_view: Tensor | None  # (Hk, keys, Dv)

    def pairs(self, first: int, count: int) -> int:
        """Return about how many keys some queries see, at least one each."""
        seen = 0
        for query in (first, first + count // 2, first + count - 1):
            seen += max(1, min(query + self.high, self.keys) - max(query + self.low, 0))
        return count * seen // 3


class _Part(NamedTuple):
    """Queries of one sequence and one key/value head.

    `pairs`: about how many keys they see. `shared`: sequence and head, if other parts have the same keys; else sequence
    and −1.
    """

    sequence: int
    head: int
    first: int
    queries: int
    pairs: int
    shared: tuple[int, int]


@dataclass(eq=False, slots=True)
class Backward:
    """The gradients of several sequences. `held` keeps alive what the addresses point to."""

    dtype: torch.dtype
    head_dim: int
    value_dim: int
    heads: int  # of k and v
    group: int
    scale: float
    softcap: float
    mask_dtype: torch.dtype
    mask_step: int
    keep: float
    dropped: Dropped
    first_head: int  # of the request's query heads, for dropout
    sinks: int  # address, or 0
    has_dsinks: bool
    held: object
    sequences: list[Sequence] = field(default_factory=list)

    def compute(self, threads: int) -> Tensor | None:
        """Write all gradients, on at most `threads` threads. Return that of the sinks, (Hq,) float64, if wanted.

        The caller must not be one of the threads of `spread`.
        """
        from flashpoint_kernels.reproducible import spread

        parts = list(self._parts())
        edges = [0, *accumulate(part.pairs for part in parts)]
        flops = 5 * edges[-1] * self.group * (self.head_dim + self.value_dim)
        workers = max(1, min(threads, flops // _LEAST_FLOPS))
        cuts = [bisect_left(edges, edges[-1] * n // workers) for n in range(workers)] + [len(parts)]
        dsinks = torch.zeros(len(parts), self.heads * self.group, dtype=torch.float64) if self.has_dsinks else None
        sums: dict[tuple[int, int], list[Tensor]] = {}
        shares = []
        for first, last in pairwise(cuts):
            tasks: list[int] = []
            for (number, head), own in groupby(range(first, last), lambda n: parts[n].shared):
                run = list(own)
                if head < 0:
                    tasks += self._task(parts[run[0]], len(run), 0, False, dsinks, run[0])
                    continue
                held = sums.setdefault((number, head), [])
                for n in run:
                    adds = n > run[0] and not parts[run[0]].first  # sums are added in the order of parts
                    if not adds:
                        held.append(torch.empty(self.sequences[number].keys, self.head_dim + self.value_dim))
                    tasks += self._task(parts[n], 1, held[-1].data_ptr(), adds, dsinks, n)
            if tasks:
                shares.append(tasks)
        if len(shares) > 1:
            spread([partial(self._run, tasks) for tasks in shares])
        elif shares:
            self._run(*shares)
        for (number, head), own_sums in sums.items():
            self._gather(self.sequences[number], head, own_sums)
        return None if dsinks is None else torch.from_numpy(dsinks.numpy().sum(0))

    def _parts(self) -> Iterator[_Part]:
        for number, sequence in enumerate(self.sequences):
            queries = max(_ROWS // self.group, -(-sequence.queries // _PARTS))
            queries += -queries % QUERIES
            chunks = [
                (first, count, sequence.pairs(first, count))
                for first in range(0, sequence.queries, queries)
                for count in [min(queries, sequence.queries - first)]
            ]
            for head in range(self.heads):
                shared = number, head if len(chunks) > 1 else -1
                for chunk in chunks:
                    yield _Part(number, head, *chunk, shared)

    def _task(self, part: _Part, heads: int, sums: int, adds: bool, dsinks: Tensor | None, number: int) -> list[int]:
        """Return struct part of backward.c: the part, and the same of the next heads. `number`: its row of `dsinks`."""
        own = self.sequences[part.sequence]
        query, step = part.head * self.group, 4 * part.head * self.group
        return [
            heads, *own.q.at(query), *own.o.at(query), *own.do.at(query), *own.lse.at(query), *own.dlse.at(query),
            *own.k.at(part.head), *own.v.at(part.head), *own.dq.at(query), *own.dk.at(part.head),
            *own.dv.at(part.head), sums, adds,
            own.slopes and own.slopes + step, self.sinks and self.sinks + step,
            0 if dsinks is None else dsinks[number, query:].data_ptr(),
            part.first, part.queries, own.keys, own.low, own.high, own.offset,
            *own.mask.at(query), *own.dmask.at(query), own.number, self.first_head + query,
        ]  # fmt: skip

    def _run(self, tasks: list[int]) -> None:
        functions = native.library()
        assert functions is not None
        memory = array("q", tasks)
        call = _Call(
            TYPES[self.dtype], self.head_dim, self.value_dim, self.group, self.scale, self.softcap,
            TYPES[self.mask_dtype], self.mask_step, self.keep, self.dropped, len(tasks) // _TASK,
            memory.buffer_info()[0],
        )  # fmt: skip
        if functions.backward(ctypes.byref(call)):
            raise MemoryError

    def _gather(self, sequence: Sequence, head: int, sums: list[Tensor]) -> None:
        if not sums:
            return
        total, *others = sums
        for more in others:
            total += more
        for view, own in zip(
            (sequence.dk_view, sequence.dv_view), torch.split(total, [self.head_dim, self.value_dim], 1), strict=True
        ):
            if view is not None:
                view[head].copy_(own)


_TASK = 50  # integers of a struct part
