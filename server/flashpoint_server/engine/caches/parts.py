"""Attention over caches on the CPU: parts that cores compute in parallel, in the caches' own memory.

The kernels in C (flashpoint_kernels.native) read the chunks where they lie, 8-bit ones, too. Many queries are cut into
tiles, which read the keys again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from flashpoint_contract.spec import Row, Spec
from flashpoint_kernels.cost import NOMINAL, row_seconds
from flashpoint_kernels.native.forward import Forward
from flashpoint_kernels.reproducible import PART_SECONDS

# Bytes of keys and values. A smaller part takes less time than a part costs; a larger one uses a core for milliseconds.
LEAST_BYTES, MOST_BYTES = 1 << 21, 1 << 26


@dataclass(frozen=True, eq=False, slots=True)
class CachedPart:
    """One core's part of a call: units [first, last) of `forward`, which are key/value heads of tiles of queries.

    `rows` are the sequences that begin in this part. `seed` is that of dropout.
    """

    forward: Forward
    first: int
    last: int
    rows: Sequence[Row]
    seed: int | None

    @property
    def first_head(self) -> int:
        """Return 0, because `rows` never contains a sequence twice."""
        return 0

    def compute(self) -> None:
        """Write o and lse."""
        self.forward.compute(self.first, self.last)


def cut(spec: Spec, forward: Forward, every: Sequence[Row], cores: int, seed: int | None = None) -> list[CachedPart]:
    """Cut a call into parts of about equal work, between tiles of queries and between key/value heads.

    There are enough parts for `cores` cores. The cut does not change the bits.
    """
    rows = [row for row in every if row.q_len]
    if forward.units < 2:
        return [CachedPart(forward, 0, forward.units, rows, seed)]
    total, seconds = forward.nbytes, 0.0
    if spec.q_len > 1 or spec.q_heads > spec.kv_heads:  # otherwise most of the time is for reading keys
        seconds = sum(row_seconds(spec, NOMINAL["torch"], row) for row in rows)
    wanted = max(min(cores, total // LEAST_BYTES), total // MOST_BYTES, int(seconds / PART_SECONDS), 1)
    count = min(wanted, forward.units)
    edges = [n * forward.units // count for n in range(count + 1)]
    return [CachedPart(forward, start, stop, () if start else rows, seed) for start, stop in pairwise(edges)]
