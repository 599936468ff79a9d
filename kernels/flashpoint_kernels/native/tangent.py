"""Call tangent.c: the tangents of o and lse along a direction of q, k and v, in float32, on one or several threads."""

from __future__ import annotations

import ctypes
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from torch import Tensor

from flashpoint_contract.spec import Row, Spec
from flashpoint_kernels import native
from flashpoint_kernels.native import calls
from flashpoint_kernels.native.rows import Place

_ROWS = 384  # most rows of a part, over the query heads of a key/value head: they stay in the L2 cache
_LEAST = 48  # least rows of a part, if that gives more threads work
_LEAST_FLOPS = 1 << 21  # minimum work of a thread: waking a thread takes about half as long

# The tensors in `struct part`, in its order, and its members, each of 8 bytes.
_OF_QUERIES = ("q", "q_dot", "o", "lse", "o_dot", "lse_dot")
_OF_KEYS = ("k", "k_dot", "v", "v_dot")
PART = (
    "heads", *(f"{name}{member}" for name in (*_OF_QUERIES, *_OF_KEYS) for member in ("", "_head", "_row")), "first",
    "count", "keys", "low", "high",
)  # fmt: skip


class _Call(ctypes.Structure):
    """`struct call` of tangent.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("dim", "value_dim", "group")),
        ("scale", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("q_dots", "k_dots", "v_dots")),
        ("unusual", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("parts", ctypes.c_void_p),
    )


class _Part(NamedTuple):
    """Some queries of one sequence and some key/value heads, with their number of (query, key) pairs."""

    row: Row
    head: int
    heads: int
    first: int
    queries: int
    pairs: int


def compute(spec: Spec, t: Mapping[str, Tensor], rows: Sequence[Row], threads: int) -> bool:
    """Write o_dot and lse_dot of sequences with queries, on at most `threads` threads.

    `t` has canonical views (see `problem`) of q, k, v, o, lse, o_dot and lse_dot, and of those of q_dot, k_dot and
    v_dot that are not 0: float32, with adjacent elements in each row. Return False, without valid answers, if an input
    has an infinity or NaN, or numbers so large that products may overflow.
    """
    parts = list(_parts(spec, rows, threads))
    places = {name: Place.of(t.get(name)) for name in (*_OF_QUERIES, *_OF_KEYS)}
    edges = [0, *accumulate(part.pairs * part.heads for part in parts)]
    flops = 5 * edges[-1] * spec.q_heads // spec.kv_heads * (spec.head_dim + spec.value_dim)
    workers = max(1, min(threads, flops // _LEAST_FLOPS))
    cuts = [bisect_left(edges, edges[-1] * n // workers) for n in range(workers)] + [len(parts)]
    shares = [
        array("q", [number for part in parts[first:last] for number in _task(spec, places, part)])
        for first, last in pairwise(cuts)
        if first < last
    ]
    unusual = np.zeros(len(shares), np.int64)
    library = native.library()
    assert library is not None
    calls.share(
        library.of("float32").tangent,
        [
            _Call(
                dim=spec.head_dim, value_dim=spec.value_dim, group=spec.q_heads // spec.kv_heads, scale=spec.scale,
                **{f"{name}_dots": f"{name}_dot" in t for name in "qkv"}, unusual=unusual[n:].ctypes.data,
                count=len(tasks) // len(PART), parts=tasks.buffer_info()[0],
            )
            for n, tasks in enumerate(shares)
        ],
    )  # fmt: skip
    return not unusual.any()


def _parts(spec: Spec, rows: Sequence[Row], threads: int) -> Iterator[_Part]:
    """Yield the parts: all heads of a sequence if that gives each thread work, else a single head."""
    heads, group = spec.kv_heads, spec.q_heads // spec.kv_heads
    together = heads if threads == 1 or len(rows) >= 4 * threads else 1
    several = sum(row.q_len for row in rows) * group * heads // (2 * threads)  # rows of a part for two parts a thread
    most = max(1, min(_ROWS, max(several, _LEAST)) // group)
    left, right = spec.window
    for row in rows:
        height = -(-row.q_len // -(-row.q_len // most))
        for head in range(0, heads, together):
            for first in range(0, row.q_len, height):
                queries = min(height, row.q_len - first)
                low, high = first + row.offset - left, first + queries + row.offset + right
                keys = max(1, min(high, row.kv_len) - max(low, 0))
                yield _Part(row, head, together, first, queries, queries * keys)


def _task(spec: Spec, places: Mapping[str, Place], part: _Part) -> list[int]:
    """Return one `struct part` of tangent.c with the members in PART."""
    row, (left, right) = part.row, spec.window
    numbers = [part.heads]
    for name in _OF_QUERIES:
        place = places[name]
        numbers += place.at(row.batch, row.q_start, part.head * spec.q_heads // spec.kv_heads), *place.steps
    for name in _OF_KEYS:
        place = places[name]
        numbers += place.at(row.batch, row.kv_start, part.head), *place.steps
    return [*numbers, part.first, part.queries, row.kv_len, row.offset - left, row.offset + right + 1]
