"""Work lists: the tiles of a launch, heaviest first.

A sequence's shape alone decides how it is cut into tiles and whether its keys are split over programs. Other sequences
of the launch change a tile's place in the list, never the tile.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from flashpoint_kernels.bounds import key_range, query_range
from flashpoint_kernels.triton_backend.configurations import Config, Tile


class Shape(NamedTuple):
    """The values that decide how a sequence is cut: valid and padded lengths, and the visible band (bounds.py)."""

    q_len: int
    q_rows: int
    kv_len: int
    kv_rows: int
    offset: int
    left: int
    right: int
    group: int  # query heads that share a key/value head


class Cut(NamedTuple):
    """The kind of blocks of queries: packed blocks of `rows` rows, or with 0, blocks of one head."""

    config: Config
    rows: int


class Parts(NamedTuple):
    """A sequence's programs: `items` has one row per program, `cost` is the number of keys or queries that it uses."""

    items: np.ndarray
    cost: np.ndarray


def block_rows(shape: Shape, config: Config) -> int:
    """Return the rows of a sequence's packed blocks, 0 if its blocks are of one head; only its shape decides."""
    if not 0 < shape.q_rows <= config.few_queries:
        return 0
    sizes = config.packed_rows
    return next((rows for rows in sizes if shape.q_rows * shape.group <= rows), sizes[-1])


@lru_cache(maxsize=8192)
def forward_parts(shape: Shape, cut: Cut) -> Parts:
    """Return (first row, part's first and last key, part number or -1) of each program of a sequence."""
    config, rows = cut
    tile = config.forward_of(rows)
    items, cost = [], []
    for i0 in _starts(shape, cut, tile):
        lo, hi = _visible_keys(i0, shape, tile, packed=rows > 0)
        edges = [0, shape.kv_len]
        if (rows or shape.q_rows <= tile.block_m) and hi - lo > config.split_keys:
            first = lo // config.split_keys + 1
            edges[1:1] = range(first * config.split_keys, hi, config.split_keys)
        split = len(edges) > 2
        for part, (a, b) in enumerate(itertools.pairwise(edges)):
            items.append((i0, a, b, part if split else -1))
            cost.append(max(min(b, hi) - max(a, lo), 0))
    return Parts(np.array(items, np.int32).reshape(-1, 4), np.array(cost, np.int64))


def _starts(shape: Shape, cut: Cut, tile: Tile) -> range:
    """Return the first rows of a sequence's blocks; none if it has the other kind of blocks."""
    if block_rows(shape, cut.config) != cut.rows:
        return range(0)
    return range(0, shape.q_rows * (shape.group if cut.rows else 1), tile.block_m)


@lru_cache(maxsize=8192)
def gradient_parts(shape: Shape, cut: Cut) -> Parts:
    """Return the first row of each program of dQ."""
    tile = cut.config.backward_q_of(cut.rows)
    starts = _starts(shape, cut, tile)
    spans = (_visible_keys(i0, shape, tile, packed=cut.rows > 0) for i0 in starts)
    cost = [max(hi - lo, 0) for lo, hi in spans]
    return Parts(np.array(starts, np.int32).reshape(-1, 1), np.array(cost, np.int64))


@lru_cache(maxsize=8192)
def query_parts(shape: Shape, tile: Tile) -> Parts:
    """Return the first query of each program, for blocks of one head's queries."""
    starts = range(0, shape.q_rows, tile.block_m)
    cost = [max(hi - lo, 0) for lo, hi in (_visible_keys(i0, shape, tile) for i0 in starts)]
    return Parts(np.array(starts, np.int32).reshape(-1, 1), np.array(cost, np.int64))


@lru_cache(maxsize=8192)
def key_parts(shape: Shape, tile: Tile) -> Parts:
    """Return the first key of each program, for blocks of keys."""
    starts, cost = range(0, shape.kv_rows, tile.block_n), []
    for j0 in starts:
        j_last = min(j0 + tile.block_n, shape.kv_len) - 1
        lo, hi = query_range(j0, j_last, shape.offset, shape.left, shape.right, shape.q_len)
        cost.append(max(hi - lo, 0) if j0 < shape.kv_len else 0)
    return Parts(np.array(starts, np.int32).reshape(-1, 1), np.array(cost, np.int64))


def _visible_keys(start: int, shape: Shape, tile: Tile, *, packed: bool = False) -> tuple[int, int]:
    """Return the keys [lo, hi) that are visible to the block with first row `start`."""
    share = shape.group if packed else 1
    i0, i_last = start // share, (start + tile.block_m - 1) // share
    if i0 >= shape.q_len:
        return 0, 0
    i_last = min(i_last, shape.q_len - 1)
    lo, hi = key_range(i0, i_last, shape.offset, shape.left, shape.right, shape.kv_len)
    return lo, hi


# the number of launches whose lists are cached, and the largest number of sequences of a cached launch
_KEPT, _FEW = 64, 64


def work_list(shapes: tuple[Shape, ...], parts_of: Callable[[Shape, Any], Parts], tiles: Cut | Tile) -> np.ndarray:
    """Return (n, 1 + columns) int32: table row and item of every program, heaviest first, ties in table order.

    If there are few sequences, the list is cached for later launches with the same shapes: do not write to it.
    """
    return (_kept_list if len(shapes) <= _FEW else _work_list)(shapes, parts_of, tiles)


def _work_list(shapes: tuple[Shape, ...], parts_of: Callable[[Shape, Any], Parts], tiles: Cut | Tile) -> np.ndarray:
    parts = [parts_of(shape, tiles) for shape in shapes]
    rows = np.repeat(np.arange(len(parts), dtype=np.int32), [len(p.items) for p in parts])
    items = np.column_stack([rows, np.concatenate([p.items for p in parts])])
    order = np.argsort(-np.concatenate([p.cost for p in parts]), kind="stable")
    return np.ascontiguousarray(items[order], np.int32)


_kept_list = lru_cache(_KEPT)(_work_list)


def forward_list(shapes: tuple[Shape, ...], cut: Cut) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the work list of `forward_parts`, the merge list, and the number of scratch slots. Do not write to the
    lists.

    Each part of a split block has a slot in place of its part number; the parts of a block have consecutive slots. The
    merge list is (n, 4) int32: table row, first row of the block, first slot, number of parts.
    """
    return (_kept_forward_list if len(shapes) <= _FEW else _forward_list)(shapes, cut)


def _forward_list(shapes: tuple[Shape, ...], cut: Cut) -> tuple[np.ndarray, np.ndarray, int]:
    items = work_list(shapes, forward_parts, cut)
    if not (items[:, 4] >= 0).any():
        return items, np.empty((0, 4), np.int32), 0
    items = items.copy()
    split = np.flatnonzero(items[:, 4] >= 0)
    order = split[np.lexsort((items[split, 4], items[split, 1], items[split, 0]))]
    items[order, 4], part = np.arange(len(order), dtype=np.int32), items[order, 4]
    first = np.flatnonzero(part == 0)
    merges = np.column_stack([items[order[first], 0], items[order[first], 1], first, np.diff([*first, len(order)])])
    return items, np.ascontiguousarray(merges, np.int32), len(order)


_kept_forward_list = lru_cache(_KEPT)(_forward_list)


def mask_parts(
    mask: Sequence[int], q_len: int, kv_len: int, batch: int, heads: int, tile: Tile
) -> list[tuple[int, int, int, int, int, int, int, int]]:
    """Return the programs of a mask's gradient: (first row, rows, first head, heads, m_lo, m_hi, n_lo, n_hi), see
    MASK_ITEM.

    `mask` is the shape (B, H, Sq, Sk) of the mask itself: 1 in each dimension that it broadcasts.
    """

    def spans(own: int, full: int, block: int) -> list[tuple[int, int]]:
        return [(0, full)] if own < full else [(at, min(at + block, full)) for at in range(0, full, block)]

    return [
        (b, b_end - b, h, h_end - h, m, m_end, n, n_end)
        for b, b_end in spans(mask[0], batch, 1)
        for h, h_end in spans(mask[1], heads, 1)
        for m, m_end in spans(mask[2], q_len, tile.block_m)
        for n, n_end in spans(mask[3], kv_len, tile.block_n)
    ]
