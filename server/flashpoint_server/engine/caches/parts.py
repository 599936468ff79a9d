"""Attention over caches on the CPU: parts that cores compute in parallel, in the caches' own memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from flashpoint_contract.spec import Row, Spec
from flashpoint_kernels.chunked import attend
from flashpoint_kernels.cost import NOMINAL, row_seconds
from flashpoint_kernels.reproducible import PART_SECONDS
from flashpoint_server.engine.caches.chunks import Track

# Bytes of keys and values. A smaller part takes less time than a part costs; a larger one uses a core for milliseconds.
LEAST_BYTES, MOST_BYTES = 1 << 21, 1 << 25


@dataclass(frozen=True, eq=False)
class Attended:
    """A sequence of a call: its cache's layer, the first key that it sees, its diagonal, and its views.

    `row` has all keys that the layer holds. `views` are q (Hq, sq, D), o (Hq, sq, Dv) and lse (Hq, sq).
    """

    row: Row
    track: Track
    start: int
    edge: int | None
    views: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        return (self.track.length - self.start) * self.track.size.read_bytes


@dataclass(frozen=True, eq=False)
class Share:
    """Some key/value heads of a sequence."""

    sequence: Attended
    first: int
    last: int


@dataclass(frozen=True, eq=False)
class CachedPart:
    """One core's part of a call: heads of sequences, read in the caches' own memory."""

    spec: Spec
    shares: Sequence[Share]
    seed: None = None

    @property
    def rows(self) -> list[Row]:
        """Return its sequences; each is in the part with its first head."""
        return [share.sequence.row for share in self.shares if not share.first]

    @property
    def first_head(self) -> int:
        """Return 0, because `rows` never contains a sequence twice."""
        return 0

    def compute(self) -> None:
        """Write o and lse."""
        for share in self.shares:
            self._attend(share)

    def _attend(self, share: Share) -> None:
        one, views, heads = share.sequence, share.sequence.views, None
        if share.last - share.first < self.spec.kv_heads:
            group = self.spec.q_heads // self.spec.kv_heads
            heads = slice(share.first, share.last)
            views = {name: t[share.first * group : share.last * group] for name, t in views.items()}
        if one.track.length == one.start:
            views["o"].zero_()
            if "lse" in views:
                views["lse"].fill_(float("-inf"))
            return
        runs = one.track.runs(one.start, one.track.length, heads)
        q = views["q"].float() if one.track.size.quantized else views["q"]
        o, lse = attend(q, runs, self.spec.scale, one.edge)
        views["o"].copy_(o)
        if "lse" in views:
            views["lse"].copy_(lse)


def cut(spec: Spec, every: Sequence[Attended], cores: int) -> list[CachedPart]:
    """Cut a call into parts of about equal bytes, first between its sequences, then between key/value heads.

    There are enough parts for `cores` cores. The cut does not change the bits.
    """
    sequences = [one for one in every if one.row.q_len]
    if not sequences:
        return [CachedPart(spec, ())]
    total, seconds = sum(one.nbytes for one in sequences), 0.0
    if spec.q_len > 1 or spec.q_heads > spec.kv_heads:  # otherwise most of the time is for reading keys
        seconds = sum(row_seconds(spec, NOMINAL["torch"], one.row) for one in sequences)
    units = len(sequences) * spec.kv_heads  # heads of sequences
    wanted = max(min(cores, total // LEAST_BYTES), total // MOST_BYTES, int(seconds / PART_SECONDS), 1)
    count = min(wanted, units)
    edges = [n * units // count for n in range(count + 1)]
    parts = []
    for start, stop in pairwise(edges):
        shares = []
        while start < stop:
            number, first = divmod(start, spec.kv_heads)
            last = min(spec.kv_heads, first + stop - start)
            shares.append(Share(sequences[number], first, last))
            start += last - first
        parts.append(CachedPart(spec, shares))
    return parts
