"""Compute attention over caches on the CPU, in parts that several cores run in parallel.

The kernels in C (flashpoint_kernels.native) read all chunks in place, also 8-bit chunks. Many queries are cut into
tiles, and each tile reads the keys again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flashpoint_contract.spec import Row, Spec
from flashpoint_kernels import Problem
from flashpoint_kernels.cpu_backend import supports
from flashpoint_kernels.native.forward import Forward
from flashpoint_kernels.problems.cost import NOMINAL, row_seconds
from flashpoint_kernels.problems.reproducible import PART_SECONDS, split
from flashpoint_server.engine.caches.attending import CachedCall
from flashpoint_server.engine.caches.cache import StoredCache

# Bytes of keys and values in one part. A smaller part has too much overhead; a larger one occupies a core for too long.
LEAST_BYTES, MOST_BYTES = 1 << 21, 1 << 26


@dataclass(frozen=True, eq=False, slots=True)
class CachedPart:
    """The part of a call that one core computes: the units [first, last) of `forward`.

    A unit is one key/value head for one tile of queries.
    """

    forward: Forward
    first: int
    last: int

    def compute(self) -> None:
        """Compute this part's rows of o and lse, and write them to the outputs."""
        self.forward.compute(self.first, self.last)


class Sequences(NamedTuple):
    """The sequences of a call over caches, and its seed of dropout."""

    rows: Sequence[Row]
    seed: int | None


_SHARED = frozenset({  # the tensors and options of calls that are computed together
    "q", "k", "v", "sinks", "q_lengths", "kv_lengths", "cu_seqlens_q", "cu_seqlens_k",
    "layout", "causal", "causal_alignment", "window", "block_size", "scale", "softcap", "dropout_seed", "precision",
    "return_lse", "grads", "deterministic", "backend",
})  # fmt: skip


def shares(spec: Spec) -> bool:
    """Return whether calls over forks of a cache may be computed together, so that keys they share are read only once.

    This requires kernels in C that support the call, and no mask, ALiBi slopes or dropout.
    """
    return supports(spec) and spec.given <= _SHARED


def attend(
    calls: Sequence[tuple[CachedCall, Sequence[StoredCache]]], backend: str, cores: int
) -> tuple[list[Sequences], Sequence[Problem | CachedPart]]:
    """Cut calls over caches into parts for `cores` CPU cores. Return the sequences of each call, and the parts.

    The new tokens of the calls must already be in the caches. Several calls must have equal sizes, scale and softcap,
    and `shares` must be true for each. Raises Refusal 422.
    """
    spec = calls[0][0].of.spec
    if backend != "cpu" or not supports(spec):
        ((call, caches),) = calls
        parts = split(call.problem(caches), backend)
        rows = [row for part in parts if not part.first_head for row in part.rows]
        return [Sequences(rows, parts[0].seed)], parts
    readings = [call.reading(caches) for call, caches in calls]
    every = [Sequences(rows, forward.seed) for forward, rows in readings]
    forward = readings[0][0]
    for other, _ in readings[1:]:
        forward.join(other)
    if len(forward.rows) > 1 and shares(spec):
        forward.share_prefixes(cores)
    return every, cut(spec, forward, [row for rows, _ in every for row in rows], cores)


def cut(spec: Spec, forward: Forward, rows: Sequence[Row], cores: int) -> list[CachedPart]:
    """Cut a call into parts of about equal work, between tiles of queries and between key/value heads.

    There are `cores` parts: fewer if they would be small (LEAST_BYTES), more if they would be large (MOST_BYTES) or
    take long (PART_SECONDS). The number of parts does not change the bits of the answer.
    """
    if forward.units < 2:
        return [CachedPart(forward, 0, forward.units)]
    total, seconds = forward.nbytes, 0.0
    if spec.q_len > 1 or spec.q_heads > spec.kv_heads:  # otherwise reading keys takes most of the time
        seconds = sum(row_seconds(spec, NOMINAL["cpu"], row) for row in rows if row.q_len)
    wanted = max(min(cores, total // LEAST_BYTES), total // MOST_BYTES, int(seconds / PART_SECONDS), 1)
    count = min(wanted, forward.units)
    cuts = forward.cuts(count) if count > 1 else [(0, forward.units)]
    return [CachedPart(forward, start, stop) for start, stop in cuts]
