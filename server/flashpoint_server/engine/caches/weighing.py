"""Compute key weights over caches: how much attention each cached key receives.

The calls' attention runs first, and returns lse. With lse known, the weights of some keys need these keys alone. So
they are computed chunk by chunk, in place, on all cores. Only a chunk of 16 or 8 bits is converted to float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from flashpoint_contract.caches import CHUNK, SMALLEST_CHUNK, key_weights_info
from flashpoint_contract.spec import Row
from flashpoint_kernels import Problem, run
from flashpoint_kernels.dispatching.dispatch import run_part
from flashpoint_kernels.dispatching.key_weights import Views
from flashpoint_kernels.problems.cost import NOMINAL, row_seconds
from flashpoint_kernels.problems.reproducible import PART_SECONDS
from flashpoint_server.engine.caches.attending import CachedCall
from flashpoint_server.engine.caches.cache import StoredCache
from flashpoint_server.engine.caches.chunks import Track

_EVERY_KEY = frozenset({"reference"})  # backends whose gradients compute lse again, for which they need every key


@dataclass(frozen=True, eq=False)
class _Piece:
    """The keys [first, stop) of one sequence, all in one chunk unless the backend needs every key of the sequence."""

    call: Views
    row: Row
    track: Track
    weights: Tensor  # (1,Hq,L): those of all keys of the sequence
    first: int
    stop: int

    def problems(self, heads: tuple[int, int]) -> Iterator[Problem]:
        """Yield the problems that compute the weights for the key/value heads [start, end)."""
        k, weights = self.track.keys(self.first, self.stop), self.weights[:, :, self.first : self.stop]
        yield from self.call.of_keys(self.row, self.row.batch, self.first, k, weights).of_heads(*heads).turns()


@dataclass(frozen=True, eq=False)
class WeighingPart:
    """The part of a call's key weights that one core computes: some pieces, and some of their key/value heads."""

    pieces: Sequence[_Piece]
    heads: tuple[int, int]
    backend: str

    def compute(self) -> None:
        """Compute these key weights, and write them to the output."""
        for problem in self.problems():
            run_part(problem, self.backend)

    def problems(self) -> Iterator[Problem]:
        """Yield the part's problems, which share one launch key."""
        for piece in self.pieces:
            yield from piece.problems(self.heads)


def weighing(
    call: CachedCall, caches: Sequence[StoredCache], backend: str, lse: Tensor, room: Tensor
) -> tuple[Tensor, list[WeighingPart]]:
    """Return the key weights of a call, (B,Hq,L) with zeros, and the parts that write them once lse is computed.

    L is the largest length of the caches. The weights are the first numbers of `room`, on the device of q.
    """
    of, tracks = call.of, [cache.tracks[call.cache_ref.layer] for cache in caches]
    info = key_weights_info(of.spec, max(track.length for track in tracks))
    size, heads = tracks[0].size, tracks[0].size.heads
    out = room.flatten()[: info.nbytes // room.itemsize].zero_().view(info.shape)
    whole = out.view(of.spec.batch, of.spec.q_heads, info.shape[-1])
    rows = [
        row._replace(kv_len=n, kv_rows=n, kv_start=0, offset=of.spec.offset(row.q_len, n))
        for row, n in zip(of.rows, [track.length for track in tracks], strict=True)
    ]
    views = Views.of(_shell(call), backend, lse, torch.empty(0, dtype=size.dtype, device=lse.device), whole)
    parts: list[WeighingPart] = []
    some: list[_Piece] = []
    seconds = 0.0
    for row, track in zip(rows, tracks, strict=True):
        for first, stop in _ranges(call, row, track, backend):
            piece = _Piece(views, row, track, whole[row.index][None], first, stop)
            took = row_seconds(of.spec, NOMINAL[backend], row._replace(kv_len=stop - first, offset=row.offset - first))
            if (count := min(int(took / PART_SECONDS), heads)) > 1:
                edges = pairwise([n * heads // count for n in range(count + 1)])
                parts += [WeighingPart([piece], each, backend) for each in edges]
                continue
            if some and seconds + took > PART_SECONDS:
                parts.append(WeighingPart(some, (0, heads), backend))
                some, seconds = [], 0.0
            some.append(piece)
            seconds += took
    if some:
        parts.append(WeighingPart(some, (0, heads), backend))
    return out, parts


def weigh(call: CachedCall, caches: Sequence[StoredCache], backend: str, lse: Tensor) -> None:
    """Compute the key weights of a call whose lse is computed, in one launch, and write them to the call's output."""
    room = call.of.weights
    assert room is not None
    there = room if room.device == lse.device else torch.empty(room.shape, dtype=room.dtype, device=lse.device)
    out, parts = weighing(call, caches, backend, lse, there)
    run([problem for part in parts for problem in part.problems()], backend)
    if there is not room:
        room.flatten()[: out.numel()].copy_(out.flatten())


def _ranges(call: CachedCall, row: Row, track: Track, backend: str) -> Iterator[tuple[int, int]]:
    """Yield the ranges of keys that the queries of a sequence may see, as [first, stop)."""
    if not row.q_len:
        return
    start = max(call.lowest(row.q_len, track.length), track.first)
    if "block_mask" in call.of.tensors:
        start = start // SMALLEST_CHUNK * SMALLEST_CHUNK
    if backend in _EVERY_KEY:
        if start < track.length:
            yield start, track.length
        return
    edges = [start, *range((start // CHUNK + 1) * CHUNK, track.length, CHUNK), track.length]
    yield from pairwise(edges) if start < track.length else ()


def _shell(call: CachedCall) -> Problem:
    """Return an incomplete problem with the call's tensors except k and v.

    Blocks of the block mask are cut along the keys to SMALLEST_CHUNK, so that a block begins at each chunk.
    """
    given = {name: t for name, t in call.of.tensors.items() if name not in ("k", "v")}
    shell = call.of.shell(given)
    if "block_mask" not in given:
        return shell
    queries, keys = shell.spec.options.block_size
    narrow = given["block_mask"].repeat_interleave(keys // SMALLEST_CHUNK, -1)
    options = replace(shell.spec.options, block_size=(queries, SMALLEST_CHUNK))
    return replace(shell, spec=replace(shell.spec, options=options), tensors=given | {"block_mask": narrow})
