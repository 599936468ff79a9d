"""Plan the lists of tiles for a launch with block masks: their positions in memory, and the call that writes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from flashpoint_kernels.triton_backend.host.calls import Call
from flashpoint_kernels.triton_backend.host.configurations import Tile
from flashpoint_kernels.triton_backend.host.grouped import Launch
from flashpoint_kernels.triton_backend.kernels import columns
from flashpoint_kernels.triton_backend.kernels.blocks import HEADER, UNIT, list_key_tiles, list_query_tiles


@dataclass(frozen=True, eq=False)
class Lists:
    """The lists of tiles for one kernel (blocks.py describes a list).

    `items` are the kernel's work items, with one more column: the position of the item's lists in `memory`. `call`
    writes the lists.
    """

    items: np.ndarray
    call: Call
    memory: Callable[[], Tensor]


def of_queries(launch: Launch, items: np.ndarray, tile: Tile, packed: bool, parts: np.ndarray | None = None) -> Lists:
    """Return the lists for blocks of queries, of tiles of keys.

    `parts` (n, 2) has the keys [first, end) of each item's part; None means all keys.
    """
    if parts is None:
        keys = launch.column(columns.KV_LEN)[items[:, 0]]
        parts = np.column_stack([np.zeros_like(keys), keys])
    tiles = -(-(parts[:, 1] - parts[:, 0]) // tile.block_n)
    heads = launch.column(columns.HEADS)
    heads = heads // launch.column(columns.GROUP) if packed else heads
    return _lists(launch, list_key_tiles, items, parts, tiles, heads, tile, packed)


def of_keys(launch: Launch, items: np.ndarray, tile: Tile) -> Lists:
    """Return the lists for blocks of keys: for each key/value head, the tiles of queries that see the block."""
    heads, group = launch.column(columns.HEADS), launch.column(columns.GROUP)
    queries = launch.column(columns.Q_LEN)[items[:, 0]]
    together = np.where(_own_blocks(launch), group, 1)[items[:, 0]]
    parts = np.column_stack([np.zeros_like(queries), queries])
    tiles = -(-queries // tile.block_m) * together
    return _lists(launch, list_query_tiles, items, parts, tiles, heads // group, tile, False)


def _own_blocks(launch: Launch) -> np.ndarray:
    """Return for each row of the table whether each head has its own block mask."""
    flags: np.ndarray = launch.column(columns.BLOCKS, 1) != 0
    return flags


def _lists(
    launch: Launch, kernel: object, items: np.ndarray, parts: np.ndarray, tiles: np.ndarray, heads: np.ndarray,
    tile: Tile, packed: bool,
) -> Lists:  # fmt: skip
    lists = np.where(_own_blocks(launch), heads, 1)
    units = -(-(tiles + HEADER.value) // UNIT.value) * lists[items[:, 0]]
    ends = np.cumsum(units)
    place = ends - units

    @cache
    def memory() -> Tensor:
        size = int(ends[-1]) * UNIT.value if len(ends) else 0
        return torch.empty(size, dtype=torch.int32, device=launch.route.device)

    most_lists = int(lists.max())
    constants = {"LEVEL": 1, "BLOCK_N": tile.block_n, "PACKED": packed}
    call = launch.call(
        launch.route.code(kernel, (tile, packed), lambda: (replace(tile, num_warps=1, num_stages=1), constants)),
        np.column_stack([items[:, :2], parts, place]).astype(np.int32), most_lists,
        lambda items_there: (launch.table, items_there, memory(), most_lists),
    )  # fmt: skip
    return Lists(np.column_stack([items, place]).astype(np.int32), call, memory)
