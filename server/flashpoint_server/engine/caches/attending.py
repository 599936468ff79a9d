"""Attention over caches: new tokens are written, and the problem is made of what the caches then hold.

On the CPU the `torch` backend reads chunks where they lie (flashpoint_kernels.chunked). For every other backend, and
with a mask, a problem's keys are brought together as pages: any option, and any device, at the price of a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashpoint_contract.caches import CHUNK, SMALLEST_CHUNK
from flashpoint_contract.options import ProblemError
from flashpoint_contract.spec import Row, Spec
from flashpoint_kernels import Problem
from flashpoint_kernels.chunked import attend
from flashpoint_kernels.cost import NOMINAL, row_seconds
from flashpoint_kernels.reproducible import CORES, PART_SECONDS, split
from flashpoint_server.engine.caches.cache import Terms
from flashpoint_server.engine.caches.chunks import Track
from flashpoint_server.engine.caches.store import CacheStore
from flashpoint_server.ipc.messages import Held
from flashpoint_server.refusal import invalid

# Bytes of keys and values: a part below takes less than what another costs; one above holds a core for milliseconds.
LEAST_BYTES, MOST_BYTES = 1 << 20, 1 << 25


@dataclass(frozen=True, eq=False)
class HeldCall:
    """A call over caches: its problem, with the tensors that it brought and the places of its answers.

    `spec` is `plan_cached`'s, whose k and v stand for the caches.
    """

    spec: Spec
    held: Held
    tensors: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    rows: tuple[Row, ...]

    @classmethod
    def of(cls, spec: Spec, held: Held, tensors: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> HeldCall:
        """Raises Refusal 422 where lengths of queries do not fit."""
        index = {name: tensors[name].tolist() for name in ("q_lengths", "cu_seqlens_q") if name in tensors}
        if spec.ragged:  # any, for keys are the caches'
            index["cu_seqlens_k"] = [0] * spec.batch + [spec.kv_len]
        try:
            return cls(spec, held, tensors, outputs, spec.rows(index))
        except ProblemError as error:
            raise invalid(error.errors) from None

    @property
    def terms(self) -> Terms:
        return Terms(self.held.owner, self.held.quota, self.held.key)

    def lowest(self, queries: int, length: int) -> int:
        """Return the first position that a sequence's queries see, its cache having that length."""
        left = self.held.left if self.held.left >= 0 else self.spec.window[0]
        return max(0, min(self.spec.offset(queries, length) - left, length)) if queries else length

    def write(self, store: CacheStore) -> None:
        """Write the new tokens, or check that what is read is there. Raises Refusal, and MemoryError."""
        held = self.held
        if "k" in self.tensors:
            shell = self._shell(self.tensors)
            k, v = (shell.canonical(name, self.tensors[name]) for name in ("k", "v"))
            tokens = [(_own(k, row), _own(v, row)) for row in self.rows]
            caches = store.write(self.terms, held.caches, held.layer, held.at, tokens, self._first_seen)
        else:
            caches = store.find(self.terms, held.caches)
            lengths = [cache.tracks[held.layer].length for cache in caches]
            first = [self.lowest(row.q_len, length) for row, length in zip(self.rows, lengths, strict=True)]
            store.readable(caches, held.layer, first)
        asked = [c.tracks[held.layer].length for c, row in zip(caches, self.rows, strict=True) if row.q_len]
        self._check_mask(max(asked, default=0))

    def _first_seen(self, queries: int, length: int) -> int:
        """As `lowest`, of a cache that is about to be written. Raises Refusal 422 where the mask is too short."""
        self._check_mask(length)
        return self.lowest(queries, length)

    def _check_mask(self, length: int) -> None:
        mask = self.tensors.get("attn_mask")
        if mask is not None and mask.ndim and 1 < mask.shape[-1] < length:
            raise invalid([("attn_mask", f"has {mask.shape[-1]} columns where a cache has {length} tokens")])

    def parts(self, store: CacheStore, backend: str) -> list[Problem | CachedPart]:
        """Return what cores of the CPU compute side by side, once tokens are written."""
        if backend != "torch" or "attn_mask" in self.tensors:
            return list(split(self.problem(store), backend))
        shell = self._shell({"q": self.tensors["q"]})
        views = {name: shell.canonical(name, t) for name, t in (*shell.tensors.items(), *self.outputs.items())}
        tracks = self._tracks(store)
        sequences = [
            Attended(row, track, self.lowest(row.q_len, track.length), self._edge(row, track),
                      {name: _own(view, row) for name, view in views.items()})
            for row, track in zip(self.rows, tracks, strict=True)
        ]  # fmt: skip
        shell.clear_outputs()
        return list(_parts(self.spec, [one for one in sequences if one.row.q_len])) or [CachedPart(self.spec, ())]

    def _edge(self, row: Row, track: Track) -> int | None:
        offset = self.spec.offset(row.q_len, track.length)
        return offset if self.spec.options.causal and offset < track.length - 1 else None

    def _tracks(self, store: CacheStore) -> list[Track]:
        return [cache.tracks[self.held.layer] for cache in store.find(self.terms, self.held.caches)]

    def _shell(self, tensors: Mapping[str, Tensor]) -> Problem:
        """Return a problem whose canonical views are those of the call's tensors."""
        return Problem(self.spec, self.rows, None, self.tensors["q"].device, dict(tensors), dict(self.outputs))

    def problem(self, store: CacheStore) -> Problem:
        """Return the problem with the caches' keys as pages. Raises Refusal 422."""
        spec, device = self.spec, self.tensors["q"].device
        tracks = self._tracks(store)
        cut = spec.options.causal_alignment == "bottom_right" and not ({"attn_mask"} & self.tensors.keys())
        starts = [
            self.lowest(row.q_len, t.length) if cut and not spec.options.dropout_p else 0
            for row, t in zip(self.rows, tracks, strict=True)
        ]
        lengths = [track.length - start for track, start in zip(tracks, starts, strict=True)]
        longest = max(lengths)
        page = min(CHUNK, max(SMALLEST_CHUNK, -(-longest // SMALLEST_CHUNK) * SMALLEST_CHUNK))
        counts = [-(-length // page) for length in lengths]
        pool = max(1, sum(counts))
        k = torch.empty(pool, spec.kv_heads, page, spec.head_dim, dtype=self.tensors["q"].dtype, device=device)
        v = torch.empty(pool, spec.kv_heads, page, spec.value_dim, dtype=self.tensors["q"].dtype, device=device)
        table = torch.zeros(spec.batch, max(1, *counts), dtype=torch.int32)
        edges = [0]
        for count in counts:
            edges.append(edges[-1] + count)
        for n, (track, start, (first, last)) in enumerate(zip(tracks, starts, pairwise(edges), strict=True)):
            table[n, : last - first] = torch.arange(first, last, dtype=torch.int32)
            _gather(track, start, k[first:last], v[first:last])
        if spec.options.layout != "bhsd" and (spec.ragged or spec.rank == 4):
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        given = self._four_dimensional() | {
            "k": k, "v": v, "block_table": table, "kv_lengths": torch.tensor(lengths),
        }  # fmt: skip
        if "attn_mask" in given:
            given["attn_mask"] = _columns(given["attn_mask"], table.shape[1] * page)
        options = spec.options if spec.rank == 4 or spec.ragged else replace(spec.options, layout="bhsd")
        outputs = {name: self._heads(t, name != "lse") for name, t in self.outputs.items()}
        try:
            return Problem.create(given, options, outputs=outputs)
        except ProblemError as error:
            raise invalid(error.errors) from None

    def _four_dimensional(self) -> dict[str, Tensor]:
        """Return the call's tensors but k and v, those of one head with its dimension."""
        given = {name: t for name, t in self.tensors.items() if name not in ("k", "v")}
        given["q"] = self._heads(given["q"], True)
        if "attn_mask" in given and self.spec.rank == 3 and given["attn_mask"].ndim == 3:
            given["attn_mask"] = given["attn_mask"][:, None]
        return given

    def _heads(self, t: Tensor, columns: bool) -> Tensor:
        """Return q, o (with columns) or lse with a dimension of heads."""
        if self.spec.ragged or self.spec.rank == 4:
            return t
        return t.unsqueeze(-3 if columns else -2) if self.spec.rank == 3 else t[None, None]


@dataclass(frozen=True, eq=False)
class Attended:
    """A sequence of a call: its cache's layer, the first key that it sees, its diagonal, and its views.

    `views` are q (Hq, sq, D), o (Hq, sq, Dv) and lse (Hq, sq).
    """

    row: Row
    track: Track
    start: int
    edge: int | None
    views: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        return (self.track.length - self.start) * self.track.size.nbytes


@dataclass(frozen=True, eq=False)
class Share:
    """Some key/value heads of a sequence."""

    sequence: Attended
    first: int
    last: int


@dataclass(frozen=True, eq=False)
class CachedPart:
    """What one core computes of a call: heads of sequences, read in the caches' own memory."""

    spec: Spec
    shares: Sequence[Share]
    seed: None = None

    @property
    def rows(self) -> list[Row]:
        """Its sequences, each in the part that has its first head, with the keys that it has."""
        return [
            share.sequence.row._replace(kv_len=share.sequence.track.length) for share in self.shares if not share.first
        ]

    @property
    def first_head(self) -> int:
        """0: `rows` tells of no sequence twice."""
        return 0

    def compute(self) -> None:
        """Write o and lse."""
        group = self.spec.q_heads // self.spec.kv_heads
        for share in self.shares:
            one, heads = share.sequence, slice(share.first * group, share.last * group)
            pieces = one.track.pieces(one.start, one.track.length)
            own = ((p.start, p.k[share.first : share.last], p.v[share.first : share.last]) for p in pieces)
            if one.track.length == one.start:
                one.views["o"][heads] = 0.0
                if "lse" in one.views:
                    one.views["lse"][heads] = float("-inf")
                continue
            o, lse = attend(one.views["q"][heads], own, self.spec.scale, one.edge)
            one.views["o"][heads] = o
            if "lse" in one.views:
                one.views["lse"][heads] = lse


def _parts(spec: Spec, sequences: Sequence[Attended]) -> list[CachedPart]:
    """Cut a call between its sequences, and these between their key/value heads, into parts of about equal bytes."""
    rates = NOMINAL["torch"]
    total = sum(one.nbytes for one in sequences)
    seconds = sum(row_seconds(spec, rates, one.row._replace(kv_len=one.track.length)) for one in sequences)
    count = max(min(CORES, total // LEAST_BYTES), total // MOST_BYTES, int(seconds / PART_SECONDS), 1)
    units = len(sequences) * spec.kv_heads  # heads of sequences
    edges = [n * units // min(count, max(units, 1)) for n in range(min(count, max(units, 1)) + 1)]
    parts = []
    for start, stop in pairwise(edges):
        shares = []
        while start < stop:
            number, first = divmod(start, spec.kv_heads)
            last = min(spec.kv_heads, first + stop - start)
            shares.append(Share(sequences[number], first, last))
            start += last - first
        if shares:
            parts.append(CachedPart(spec, shares))
    return parts


def _own(view: Tensor, row: Row) -> Tensor:
    """Return a sequence's valid rows of a canonical view of q, o, lse, or of new k and v."""
    return view[row.batch].narrow(1, row.q_start, row.q_len)


def _gather(track: Track, start: int, k: Tensor, v: Tensor) -> None:
    """Copy a track's tokens from `start` on into pages (n, Hk, page, D); what has been dropped is 0."""
    page = k.shape[2]
    held = max(start, track.first)
    for n in range((held - start) // page + 1 if held > start else 0):
        k[n].zero_()
        v[n].zero_()
    for piece in track.pieces(held, track.length):
        done = 0
        while done < piece.k.shape[1]:
            n, inside = divmod(piece.start + done - start, page)
            count = min(page - inside, piece.k.shape[1] - done)
            k[n, :, inside : inside + count] = piece.k[:, done : done + count]
            v[n, :, inside : inside + count] = piece.v[:, done : done + count]
            done += count


def _columns(mask: Tensor, count: int) -> Tensor:
    """Return a mask with so many columns, where it has more than one: those beyond are not looked at."""
    if not mask.ndim or mask.shape[-1] in (1, count):
        return mask
    return mask[..., :count] if mask.shape[-1] > count else pad(mask, (0, count - mask.shape[-1]))
