"""Copy a portion of an answered request: one sequence, one head, some queries, and the keys that these see.

A gradient's portion has all queries of a key/value head if dk or dv were requested and the head is small; else it has
dq of some queries of one head. The copies hold neither a slot nor a cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashpoint_contract.options import Direction, Options
from flashpoint_contract.spec import Row, Spec
from flashpoint_contract.tensors import SCALES
from flashpoint_kernels import Problem
from flashpoint_kernels.problems import bounds
from flashpoint_server.engine.caches.attending import CallTensors
from flashpoint_server.engine.caches.chunks import Track
from flashpoint_server.engine.scheduling.engine_request import EngineRequest, Worker
from flashpoint_server.engine.state.memory import tensor_in

SCORES = 1 << 15  # maximum scores of some queries
WHOLE = 1 << 19  # maximum scores of a head whose dk and dv are computed: they need all its queries
MOST_QUERIES = 64
ELEMENTS = 1 << 19  # maximum elements of the keys that one query sees: an operation on them takes 1 ms in float64
_DRAWS = 4  # attempts to find queries that see so few keys


class Portion(NamedTuple):
    """A place in a request: sequence `row`, query heads, queries and keys; the last three are ranges."""

    row: Row
    heads: range
    queries: range
    keys: range


@dataclass(eq=False)
class Sample:
    """The copied tensors of a portion, as a problem of one sequence, and the answers of its `rows`."""

    worker: Worker
    about: dict[str, Any]  # for the log: shape, options, seed, kernel, index; no values
    labels: tuple[str, str, str]  # backend, data type, direction
    taken: float  # in `time.monotonic` seconds
    nbytes: int
    tensors: dict[str, Tensor]
    answers: dict[str, Tensor]
    options: Options
    sequence: int
    first_head: int
    rows: range

    def problem(self) -> Problem:
        """Return the problem. Dropout counts queries, heads and sequences as the request did."""
        direction: Direction = "backward" if "do" in self.tensors else "forward"
        problem = Problem.create(self.tensors, self.options, direction, trusted=True)
        rows = (problem.rows[0]._replace(index=self.sequence),)
        return replace(problem, rows=rows, first_head=self.first_head)


class Source(NamedTuple):
    """A request's tensors as canonical views, and the function that reads k and v of some keys of one head."""

    spec: Spec
    problem: Problem  # complete, or without keys and values for a call over caches
    rows: tuple[Row, ...]
    keys_of: Callable[[Row, int, range], dict[str, Tensor]]
    left: int = -1  # as `CacheRef.left`: the left bound of the window, if the options do not have it

    def seen(self, row: Row, queries: range) -> range:
        """Return the keys that some queries of a sequence see."""
        left, right = self.spec.window
        left = self.left if self.left >= 0 else left
        lo, hi = bounds.key_range(queries.start, queries.stop - 1, row.offset, left, right, row.kv_len)
        return range(lo, max(lo, hi))

    def options(self, answers: Mapping[str, Tensor], seed: int | None) -> Options:
        """Return the options of the copied problem: those that change its answers."""
        options = self.spec.options
        grads = tuple(name for name in answers if name.startswith("d")) or options.grads
        window = (self.left, options.window[1]) if self.left >= 0 else options.window
        return replace(
            options, layout="bhsd", causal_alignment="bottom_right", scale=self.spec.scale, dropout_seed=seed,
            return_lse="lse" in answers, grads=grads, backend="auto", window=window,
        )  # fmt: skip


def source_of(request: EngineRequest, whole: Problem | None, tracks: list[Track] | None) -> Source:
    """Return the tensors of a request: of the problem `whole`, or over the caches `tracks`."""
    if whole is not None:
        return Source(whole.spec, whole, whole.rows, lambda row, head, keys: _keys_of(whole, row, head, keys))
    assert tracks is not None
    given = {t.name: tensor_in(request.memory, t) for t in request.inputs}
    call = CallTensors.of(request.spec, given, {t.name: tensor_in(request.memory, t) for t in request.outputs})
    found = {row.index: track for row, track in zip(call.rows, tracks, strict=True)}
    rows = tuple(
        row._replace(kv_len=found[row.index].length, offset=call.spec.offset(row.q_len, found[row.index].length))
        for row in call.rows
    )
    ref = request.submit.cache_ref
    assert ref is not None

    def keys_of(row: Row, head: int, keys: range) -> dict[str, Tensor]:
        return _cached(found[row.index], head, keys)

    return Source(call.spec, call.shell(given), rows, keys_of, ref.left)


def choose(source: Source, names: set[str], draw: random.Random) -> Portion | None:
    """Return a random portion of a request; None if its queries see too many keys."""
    spec, rows = source.spec, [row for row in source.rows if row.q_len]
    if not rows:
        return None
    row, group = draw.choice(rows), spec.q_heads // spec.kv_heads
    width = max(spec.head_dim, spec.value_dim, 1)
    if names & {"dk", "dv"} and group * row.q_len * row.kv_len <= WHOLE and row.kv_len * width <= ELEMENTS:
        first = group * draw.randrange(spec.kv_heads)
        return Portion(row, range(first, first + group), range(row.q_len), range(row.kv_len))
    if not names & {"o", "lse", "dq"}:
        return None
    head = draw.randrange(spec.q_heads)
    for attempt in range(_DRAWS):  # the first queries of a causal problem see the fewest keys
        start = 0 if attempt == _DRAWS - 1 else draw.randrange(row.q_len)
        keys = source.seen(row, range(start, start + 1))
        if len(keys) * width <= ELEMENTS:
            count = max(1, min(MOST_QUERIES, SCORES // max(1, len(keys)), row.q_len - start))
            queries = range(start, start + count)
            return Portion(row, range(head, head + 1), queries, source.seen(row, queries))
    return None


def views(
    source: Source, portion: Portion, outputs: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return views of the inputs of a portion, as a problem of one sequence in layout bhsd, and of its answers."""
    problem, spec, row = source.problem, source.spec, portion.row
    heads = slice(portion.heads.start, portion.heads.stop)
    queries, keys = _indexed(spec, portion)
    key_head = portion.heads.start // (spec.q_heads // spec.kv_heads)

    def of_queries(name: str, t: Tensor, some: range) -> Tensor:
        rows = slice(row.q_start + some.start, row.q_start + some.stop)
        return problem.canonical(name, t)[row.batch : row.batch + 1, heads, rows]

    given = problem.tensors
    names = [name for name in ("q", "do", "dlse") if name in given]
    tensors: dict[str, Tensor] = {name: of_queries(name, given[name], queries) for name in names}
    tensors |= source.keys_of(row, key_head, keys)
    for name in ("alibi_slopes", "sinks"):
        if (t := problem.tensors.get(name)) is not None:
            tensors[name] = (t[row.index] if t.ndim == 2 else t)[heads]
    if "attn_mask" in problem.tensors:
        mask = problem.mask_part(problem.tensors["attn_mask"], [row])
        tensors["attn_mask"] = _cut(_cut(_cut(mask, 1, portion.heads), 2, queries), 3, keys)
    if "block_mask" in problem.tensors:
        size = spec.options.block_size
        blocks = _cut(problem.block_part([row]), 1, portion.heads)
        tensors["block_mask"] = blocks[:, :, : -(-queries.stop // size[0]), : -(-keys.stop // size[1])]
    tensors["offset"] = torch.tensor([row.offset + queries.start - keys.start], dtype=torch.int64, device="cpu")
    answers = {}
    for name, t in outputs.items():
        if name in ("o", "lse", "dq"):
            answers[name] = of_queries(name, t, portion.queries)
        elif name in ("dk", "dv") and len(portion.queries) == row.q_len and len(keys) == row.kv_len:
            view = problem.canonical(name, t)[row.batch : row.batch + 1, key_head : key_head + 1]
            answers[name] = view[:, :, row.kv_start : row.kv_start + row.kv_len]
    return tensors, answers


def _indexed(spec: Spec, portion: Portion) -> tuple[range, range]:
    """Return the queries and keys to copy: from the first one on where dropout or a block mask counts from there."""
    counted = bool(spec.options.dropout_p) or spec.has("block_mask")
    queries, keys = portion.queries, portion.keys
    return (range(queries.stop), range(keys.stop)) if counted else (queries, keys)


def rows_in(source: Source, portion: Portion) -> range:
    """Return the portion's queries as rows of the copied problem."""
    first = _indexed(source.spec, portion)[0].start
    return range(portion.queries.start - first, portion.queries.stop - first)


def _cut(t: Tensor, axis: int, some: range) -> Tensor:
    return t if t.shape[axis] == 1 else t.narrow(axis, some.start, len(some))


def _keys_of(problem: Problem, row: Row, head: int, keys: range) -> dict[str, Tensor]:
    """Return k and v of one head, (1, 1, n, D), with the scales of 8-bit keys."""
    rows = slice(row.kv_start + keys.start, row.kv_start + keys.stop)
    given = {name: problem.view(name)[row.batch : row.batch + 1, head : head + 1, rows] for name in "kv"}
    for name in SCALES:
        if name in problem.tensors:
            view, per_row = problem.view(name), problem.spec.per_row(name)
            batch = row.batch if per_row else min(row.index, view.shape[0] - 1)
            scale = view[batch : batch + 1, head : head + 1]
            given[name] = scale[:, :, rows] if per_row else scale.expand(1, 1, len(keys))
    return given


def _cached(track: Track, head: int, keys: range) -> dict[str, Tensor]:
    """Return copies of k and v of one head in a cache; tokens that the cache has freed are 0."""
    size, n = track.size, len(keys)
    given = {
        name: torch.zeros(1, 1, n, dim, dtype=size.dtype, device="cpu")
        for name, dim in (("k", size.head_dim), ("v", size.value_dim))
    }
    runs = [(("k", "v"), track.stored)]
    if size.quantized:
        given |= {name: torch.ones(1, 1, n, dtype=torch.float32, device="cpu") for name in SCALES}
        runs.append((("k_scale", "v_scale"), track.scales))
    start = max(keys.start, track.first)
    for names, read in runs if start < keys.stop else ():
        for run in read(start, keys.stop):
            at = run.start - keys.start
            for name, t in zip(names, (run.k, run.v), strict=True):
                given[name][0, 0, at : at + t.shape[2]] = t[0, head]
    return given
