"""Let sequences that begin with the same keys read these keys once, together.

Forks of a KV cache, and sequences whose block tables name the same pages, have their first chunks at the same places in
memory. One task reads such a chunk for the rows of all these sequences, as cascade attention does; then each sequence
reads the rest of its keys alone. A row's softmax goes over the same chunks in the same order as without sharing, so its
bits do not change.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy as np

from flashpoint_kernels.native.rows import CHUNK, SPAN, TILE, Rows


class Run(NamedTuple):
    """Keys [start, stop), which `SharedPrefix.rows[first:last]` read together."""

    start: int
    stop: int
    first: int
    last: int


@dataclass(frozen=True, eq=False, slots=True)
class SharedPrefix:
    """Sequences whose first keys are the same; `tails` are the positions where their own keys begin.

    In `runs`, each run comes after all runs that include its rows and more rows.
    """

    rows: Sequence[Rows]
    runs: Sequence[Run]
    tails: Sequence[int]

    @property
    def keys(self) -> int:
        """Return the number of keys that are read; count shared keys once."""
        keys_alone = sum(row.stop - tail for row, tail in zip(self.rows, self.tails, strict=True))
        return keys_alone + sum(run.stop - run.start for run in self.runs)

    @property
    def pairs(self) -> int:
        """Return the number of (query, key) pairs."""
        return sum(row.pairs for row in self.rows)

    def reads(self) -> list[float]:
        """Return the number of keys that each sequence reads; a run's keys are divided equally among its sequences."""
        reads = [float(row.stop - tail) for row, tail in zip(self.rows, self.tails, strict=True)]
        for run in self.runs:
            for n in range(run.first, run.last):
                reads[n] += (run.stop - run.start) / (run.last - run.first)
        return reads


def together(rows: Sequence[Rows], group: int, parts: int) -> Iterator[Rows | SharedPrefix]:
    """Yield every element of `rows`, alone or combined with others that share its first chunks in a `SharedPrefix`.

    Each query counts as `group` rows, one for each query head. Sequences that share their first chunk are divided into
    prefixes of about TILE rows or fewer, and into at least `parts` prefixes if there are enough sequences.
    """
    tables: dict[tuple[int, int, bytes], list[tuple[bytes, Rows]]] = {}
    for row in rows:
        table = _shareable(row)
        chunk = table[: _chunk_size(row)]
        if not chunk or not 0 < 2 * row.queries * group <= TILE:
            yield row
        else:
            tables.setdefault((row.start, row.tokens, chunk), []).append((table, row))
    for alike in tables.values():
        alike.sort(key=lambda member: member[0])  # then sequences with long common prefixes are neighbours
        edges = list(accumulate(row.queries * group for _, row in alike))
        count = min(max(-(-edges[-1] // TILE), parts), max(len(alike) // 2, 1))
        numbers = [(edge - 1) * count // edges[-1] for edge in edges]
        for _, members in groupby(range(len(alike)), numbers.__getitem__):
            yield from _shared([alike[n] for n in members])


def _shareable(row: Rows) -> bytes:
    """Return the spans of the first chunks, whose keys all queries see, as bytes; empty if these cannot be shared."""
    if row.mask or row.blocks or row.slopes or row.start % CHUNK or CHUNK % row.tokens or row.first % CHUNK:
        return b""
    stop = min(row.stop, row.high) // CHUNK * CHUNK
    if row.queries - 1 + row.low > row.start or stop <= row.start:
        return b""
    span = (row.start - row.first) // row.tokens
    return ctypes.string_at(row.spans + SPAN * span, (stop - row.start) // row.tokens * SPAN)


def _chunk_size(row: Rows) -> int:
    """Return the size in bytes of one chunk's spans, the addresses of its keys."""
    return CHUNK // row.tokens * SPAN


def _shared(members: Sequence[tuple[bytes, Rows]]) -> Iterator[Rows | SharedPrefix]:
    """Yield one `SharedPrefix` for rows with the same first chunk; yield a single row unchanged."""
    if len(members) == 1:
        yield members[0][1]
        return
    tables, rows = [table for table, _ in members], [row for _, row in members]
    size, start = _chunk_size(rows[0]), rows[0].start
    runs, tails, branches = [], [start] * len(rows), [(0, 0, len(rows))]
    while branches:
        done, first, last = branches.pop()
        common = _common(tables[first], tables[last - 1]) // size
        runs.append(Run(start + done * CHUNK, start + common * CHUNK, first, last))
        tails[first:last] = [start + common * CHUNK] * (last - first)
        next_chunks = [table[common * size : (common + 1) * size] for table in tables[first:last]]
        for chunk, some in groupby(next_chunks):
            count = len(list(some))
            if chunk and count > 1:
                branches.append((common, first, first + count))
            first += count
    yield SharedPrefix(rows, runs, tails)


def _common(a: bytes, b: bytes) -> int:
    """Return the length in bytes of the longest common prefix of two tables of addresses."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    x, y = (np.frombuffer(t, np.uint8, length) for t in (a, b))
    return int((x != y).argmax())
