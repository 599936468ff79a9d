"""Prepare attention over caches: write the new tokens, and make a `Problem` from all tokens of the caches.

On the CPU the `cpu` backend reads chunks in place. On a GPU chunks are pages, and the kernels read them in place
through a block table (pages.py). In other cases keys are copied into pages: on the CPU, for the other backends; on a
GPU, for calls with masks, dropout or top-left causal alignment over caches that have dropped tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from msgspec import structs
from torch import Tensor
from torch.nn.functional import pad

from flashpoint_contract.caches import CHUNK, SMALLEST_CHUNK
from flashpoint_contract.options import ProblemError
from flashpoint_contract.spec import Row, Spec
from flashpoint_kernels import Problem
from flashpoint_kernels.cpu_backend.forward import repeats
from flashpoint_kernels.cpu_backend.spans import CallOverSpans, Part, Queries, parts_of, queries_of
from flashpoint_kernels.problems.problem import drawn_seed
from flashpoint_kernels.problems.reproducible import split
from flashpoint_server.engine.caches.cache import StoredCache, Terms
from flashpoint_server.engine.caches.chunks import Track
from flashpoint_server.engine.caches.idempotency import payload_of
from flashpoint_server.engine.caches.pages import PagePool
from flashpoint_server.engine.caches.store import CacheStore
from flashpoint_server.engine.state.memory import MappedMemory
from flashpoint_server.ipc.bodies import CacheRef, PlacedTensor
from flashpoint_server.ipc.messages import Submit
from flashpoint_server.refusal import Refusal, invalid, of_problem

_MASKS = frozenset({"attn_mask", "block_mask"})  # tensors whose columns are positions in a cache, from 0


@dataclass(eq=False)
class CallTensors:
    """The tensors of a call over caches: its inputs, and the memory for its answers.

    `spec` comes from `plan_cached`: its k and v describe the keys and values in the caches, with an assumed length. On
    a GPU `outputs` is empty. `EngineRequest.tensors` reuses this object for calls with equal shapes in the same memory.

    `weights` is memory for the key weights, if the call returns them (weighing.py). They are computed from lse, after
    the rest, so `spec` does not have them.
    """

    spec: Spec
    tensors: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    rows: tuple[Row, ...]
    weights: Tensor | None = None
    _queries: Queries | None = None  # kept if the kernels in C read all tensors in place

    @classmethod
    def of(cls, spec: Spec, tensors: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> CallTensors:
        """Return the tensors of a call. Raises Refusal 422 if the lengths of queries are not valid."""
        outputs = dict(outputs)
        if (weights := outputs.pop("key_weights", None)) is not None:
            spec = replace(spec, options=replace(spec.options, return_key_weights=False))
        index = {name: tensors[name].tolist() for name in ("q_lengths", "cu_seqlens_q") if name in tensors}
        if spec.ragged:  # any values will do, because the keys come from the caches
            index["cu_seqlens_k"] = [0] * spec.batch + [spec.kv_len]
        try:
            return cls(spec, tensors, outputs, spec.rows(index), weights)
        except ProblemError as error:
            raise of_problem(error) from None

    @cached_property
    def new(self) -> list[tuple[Tensor, Tensor]] | None:
        """Return k (Hk, n, D) and v (Hk, n, Dv) of each sequence's new tokens; None for a call that only reads."""
        if "k" not in self.tensors:
            return None
        shell = self.shell(self.tensors)
        k, v = (shell.canonical(name, self.tensors[name]) for name in ("k", "v"))
        return [(_rows_of(k, row), _rows_of(v, row)) for row in self.rows]

    @cached_property
    def has_gaps(self) -> bool:
        """Whether some rows of the outputs may belong to no sequence."""
        return self.spec.ragged or "q_lengths" in self.tensors

    @property
    def queries(self) -> Queries:
        """The call without its keys, for the kernels in C."""
        if (queries := self._queries) is None:
            shell = self.shell({name: t for name, t in self.tensors.items() if name not in ("k", "v")})
            queries = queries_of(shell)
            if repeats(shell):
                self._queries = queries
        return queries

    def shell(self, tensors: Mapping[str, Tensor]) -> Problem:
        """Return an incomplete `Problem`, only for its canonical views of `tensors` and of the outputs."""
        return Problem(self.spec, self.rows, None, self.tensors["q"].device, dict(tensors), dict(self.outputs))


class CachedCall(NamedTuple):
    """A call over caches: its tensors, its caches, and the caller's dropout seed. `payload`: as in `Terms`."""

    of: CallTensors
    cache_ref: CacheRef
    seed: int | None = None
    payload: bytes = b""

    @classmethod
    def of_request(
        cls, of: CallTensors, submit: Submit, inputs: Sequence[PlacedTensor], memory: MappedMemory
    ) -> CachedCall:
        """Return the call that a message submits, with `inputs` in shared memory."""
        cache_ref, seed = submit.cache_ref, submit.seed
        assert cache_ref is not None
        if not cache_ref.key:
            return cls(of, cache_ref, seed)
        named = structs.replace(cache_ref, owner="", key="", quota=None)
        return cls(of, cache_ref, seed, payload_of((named, seed), inputs, memory))

    @property
    def terms(self) -> Terms:
        return Terms(self.cache_ref.owner, self.cache_ref.quota, self.cache_ref.key, self.payload)

    def lowest(self, queries: int, length: int) -> int:
        """Return the first position to which a sequence's `queries` queries attend, in a cache of `length` tokens."""
        spec = self.of.spec
        left = self.cache_ref.left if self.cache_ref.left >= 0 else spec.window[0]
        return max(0, min(spec.offset(queries, length) - left, length)) if queries else length

    def write(self, store: CacheStore) -> list[StoredCache]:
        """Write the call's new tokens, and return the caches. Raises Refusal, and MemoryError.

        Without new tokens, check that the caches still have the tokens to read, and that the masks are long enough.
        """
        cache_ref, of = self.cache_ref, self.of
        if of.weights is not None:
            self._check_weights(store, of.weights)
        if (new := of.new) is not None:
            return store.write(self.terms, cache_ref.caches, cache_ref.layer, cache_ref.at, new, self._first_seen)
        caches = store.find(self.terms, cache_ref.caches)
        lengths = [cache.tracks[cache_ref.layer].length for cache in caches]
        first = [self.lowest(row.q_len, length) for row, length in zip(of.rows, lengths, strict=True)]
        store.readable(caches, cache_ref.layer, first)
        self._check_mask(max([length for length, row in zip(lengths, of.rows, strict=True) if row.q_len], default=0))
        return caches

    def _check_weights(self, store: CacheStore, room: Tensor) -> None:
        """Raise Refusal 409 if the memory for key weights is shorter than a cache will be: it grew since its look."""
        ref, count = self.cache_ref, 0 if self.of.new is None else self.of.spec.q_len
        at = ref.at or [cache.tracks[ref.layer].length for cache in store.find(self.terms, ref.caches)]
        if max(at) + count > room.shape[-1]:
            raise Refusal("cache_position", "a cache grew while memory for its key weights was reserved: send it again")

    def _first_seen(self, queries: int, length: int) -> int:
        """Return `lowest` for a cache that will have `length` tokens. Raises Refusal 422 if a mask is shorter."""
        if not _MASKS.isdisjoint(self.of.tensors):
            self._check_mask(length)
        return self.lowest(queries, length)

    def _check_mask(self, length: int) -> None:
        """Raise Refusal 422 if a mask has fewer columns than `length`."""
        mask = self.of.tensors.get("attn_mask")
        if mask is not None and mask.ndim and mask.shape[-1] != 1 and mask.shape[-1] < length:
            raise invalid([("attn_mask", f"has {mask.shape[-1]} columns, but a cache has {length} tokens")])
        blocks, size = self.of.tensors.get("block_mask"), self.of.spec.options.block_size[1]
        if blocks is not None and blocks.shape[-1] * size < length:
            mismatch = f"has {blocks.shape[-1]} blocks of {size} keys, but a cache has {length} tokens"
            raise invalid([("block_mask", mismatch)])

    def over_spans(self, caches: Sequence[StoredCache]) -> CallOverSpans:
        """Return the call with the places of its keys, for the kernels in C. Call this after `write`."""
        of, spec, seed, left = self.of, self.of.spec, self.seed, self.cache_ref.left
        if of.has_gaps:
            of.shell({}).clear_outputs()
        if seed is None and spec.options.dropout_p:
            seed = drawn_seed(spec.options)
        call = CallOverSpans(of.queries, [], [], [], [], seed)
        for row, cache in zip(of.rows, caches, strict=True):
            track = cache.tracks[self.cache_ref.layer]
            offset = spec.offset(row.q_len, track.length)
            call.rows.append(row._replace(kv_len=track.length, offset=offset))
            call.spans.append(track.spans())
            call.first.append(track.first // CHUNK * CHUNK)
            call.start.append(track.first if left < 0 else max(offset - left, track.first))
        return call

    def problem(self, caches: Sequence[StoredCache]) -> Problem:
        """Return the call's problem, with the keys and values of the caches as pages. Raises Refusal 422."""
        spec, q = self.of.spec, self.of.tensors["q"]
        tracks = [cache.tracks[self.cache_ref.layer] for cache in caches]
        from_start = not self.of.tensors.keys().isdisjoint(_MASKS) or spec.options.dropout_p
        whole = from_start or spec.options.causal_alignment != "bottom_right"
        if (pool := tracks[0].size.pool) is None:
            starts = [
                0 if whole else self.lowest(row.q_len, track.length)
                for row, track in zip(self.of.rows, tracks, strict=True)
            ]
            pages, table, lengths = _copied(tracks, starts, q)
        elif whole and any(track.first for track in tracks):
            pages, table, lengths = _from_start(tracks, pool)
        else:
            pages, table, lengths = _paged(tracks, pool)
        page = pages["k"].shape[2]
        if spec.options.layout != "bhsd" and (spec.ragged or spec.rank == 4):
            pages = {name: t.transpose(1, 2) for name, t in pages.items()}
        given = (
            self._four_dimensional()
            | pages
            | {"block_table": table, "kv_lengths": torch.tensor(lengths, dtype=torch.int64, device="cpu")}
        )
        if "attn_mask" in given:
            given["attn_mask"] = _columns(given["attn_mask"], table.shape[1] * page)
        if "block_mask" in given:
            given["block_mask"] = _of_width(
                given["block_mask"], -(-table.shape[1] * page // spec.options.block_size[1])
            )
        options = spec.options if spec.rank == 4 or spec.ragged else replace(spec.options, layout="bhsd")
        outputs = {name: self._heads(t, name != "lse") for name, t in self.of.outputs.items()}
        try:
            return Problem.create(given, options, outputs=outputs, trusted=True, fixed_pages=True, seed=self.seed)
        except ProblemError as error:
            raise of_problem(error) from None

    def _four_dimensional(self) -> dict[str, Tensor]:
        """Return the call's tensors except k and v. A dimension of heads is added where it is missing."""
        given = {name: t for name, t in self.of.tensors.items() if name not in ("k", "v")}
        given["q"] = self._heads(given["q"], True)
        for name in given.keys() & _MASKS if self.of.spec.rank == 3 else ():
            given[name] = given[name][:, None] if given[name].ndim == 3 else given[name]
        return given

    def _heads(self, t: Tensor, columns: bool) -> Tensor:
        """Return q, o or lse with a dimension of heads. `columns` is False for lse, which has no column dimension."""
        if self.of.spec.ragged or self.of.spec.rank == 4:
            return t
        return t.unsqueeze(-3 if columns else -2) if self.of.spec.rank == 3 else t[None, None]


class Sequences(NamedTuple):
    """The sequences of a call over caches, and its seed of dropout."""

    rows: Sequence[Row]
    seed: int | None


def attend(
    calls: Sequence[tuple[CachedCall, Sequence[StoredCache]]], backend: str, cores: int
) -> tuple[list[Sequences], Sequence[Problem | Part]]:
    """Cut calls over caches into parts for `cores` CPU cores. Return the sequences of each call, and the parts.

    The new tokens of the calls must already be in the caches. Several calls must have equal sizes, scale and softcap,
    and `shares` must be true for each. Raises Refusal 422.
    """
    if backend != "cpu":
        ((call, caches),) = calls
        parts = split(call.problem(caches), backend)
        rows = [row for part in parts if not part.first_head for row in part.rows]
        return [Sequences(rows, parts[0].seed)], parts
    spanned, sequences = [], []
    for call, caches in calls:
        over_spans = call.over_spans(caches)
        spanned.append(over_spans)
        sequences.append(Sequences(over_spans.rows, over_spans.seed))
    return sequences, parts_of(spanned, cores)


def _rows_of(view: Tensor, row: Row) -> Tensor:
    """Return the rows of one sequence in a canonical view (batch, heads, rows, …), as `Problem` makes them."""
    return view[row.batch].narrow(1, row.q_start, row.q_len)


# k, v and their scales in pages, by name; the block table, one row of page numbers per sequence; and the sequences'
# numbers of keys
_Pages = tuple[dict[str, Tensor], Tensor, list[int]]


def _paged(tracks: Sequence[Track], pool: PagePool) -> _Pages:
    """Return all pages of `pool`, and the page numbers and the number of keys of each track, without dropped tokens."""
    lengths = [track.length - track.first for track in tracks]
    table = torch.zeros(len(tracks), _pages_of(max(lengths)), dtype=torch.int32, device="cpu")
    for row, track in zip(table, tracks, strict=True):
        numbers = track.numbers(track.first)
        row[: len(numbers)] = numbers
    return pool.tensors, table, lengths


def _from_start(tracks: Sequence[Track], pool: PagePool) -> _Pages:
    """Like `_paged`, but with all positions from 0, in copied pages.

    Page 0 has zeros; the block table names it for dropped tokens.
    """
    lengths = [track.length for track in tracks]
    table = torch.zeros(len(tracks), _pages_of(max(lengths)), dtype=torch.int32, device="cpu")
    numbers = [track.numbers(track.first) for track in tracks]
    count = 1
    for row, track, pages_of_track in zip(table, tracks, numbers, strict=True):
        first = track.first // SMALLEST_CHUNK
        row[first : first + len(pages_of_track)] = torch.arange(
            count, count + len(pages_of_track), dtype=torch.int32, device="cpu"
        )
        count += len(pages_of_track)
    index = torch.cat(numbers).to(pool.k.device)
    pages = {}
    for name, t in pool.tensors.items():
        plain = t.view(torch.uint8) if t.itemsize == 1 else t  # not every device can index float8 tensors
        copy = plain.new_zeros(count, *t.shape[1:])
        pages[name] = copy.view(t.dtype)
        copy[1:] = plain.index_select(0, index)
    return pages, table, lengths


def _pages_of(length: int) -> int:
    return max(1, -(-length // SMALLEST_CHUNK))


def _copied(tracks: Sequence[Track], starts: Sequence[int], q: Tensor) -> _Pages:
    """Like `_paged`, but the pages are copies in q's dtype, of each track's tokens from its position in `starts` on."""
    size, lengths = tracks[0].size, [track.length - start for track, start in zip(tracks, starts, strict=True)]
    page = min(CHUNK, max(SMALLEST_CHUNK, -(-max(lengths) // SMALLEST_CHUNK) * SMALLEST_CHUNK))
    counts = [-(-length // page) for length in lengths]
    pool = max(1, sum(counts))
    k = torch.empty(pool, size.heads, page, size.head_dim, dtype=q.dtype, device=q.device)
    v = torch.empty(pool, size.heads, page, size.value_dim, dtype=q.dtype, device=q.device)
    table = torch.zeros(len(tracks), max(1, *counts), dtype=torch.int32, device="cpu")
    edges = [0, *accumulate(counts)]
    for n, (track, start, (first, last)) in enumerate(zip(tracks, starts, pairwise(edges), strict=True)):
        table[n, : last - first] = torch.arange(first, last, dtype=torch.int32, device="cpu")
        _gather(track, start, k[first:last], v[first:last])
    return {"k": k, "v": v}, table, lengths


def _gather(track: Track, start: int, k: Tensor, v: Tensor) -> None:
    """Copy a track's tokens from `start` on into pages (n, Hk, page, D); dropped tokens are 0."""
    page = k.shape[2]
    first = max(start, track.first)
    for n in range(min(len(k), (first - start) // page + 1) if first > start else 0):
        k[n].zero_()
        v[n].zero_()
    for piece in track.pieces(first, track.length):
        done = 0
        while done < piece.k.shape[2]:
            n, inside = divmod(piece.start + done - start, page)
            count = min(page - inside, piece.k.shape[2] - done)
            k[n, :, inside : inside + count] = piece.k[0, :, done : done + count]
            v[n, :, inside : inside + count] = piece.v[0, :, done : done + count]
            done += count


def _columns(mask: Tensor, count: int) -> Tensor:
    """Return a mask cut or padded to `count` columns. A mask with one column, which is broadcast, stays unchanged."""
    return _of_width(mask, count) if mask.ndim and mask.shape[-1] != 1 else mask


def _of_width(mask: Tensor, count: int) -> Tensor:
    """Return a mask cut or padded to `count` columns."""
    return mask[..., :count] if mask.shape[-1] >= count else pad(mask, (0, count - mask.shape[-1]))
