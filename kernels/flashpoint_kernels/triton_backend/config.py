"""Tile sizes: one table per kind of chip, by dtype and padded head dimension; a pure function of the problem's own shape.

Numbers are starting points from the published kernels (FlashAttention-2's and the Triton tutorial's tiles) that compile
without spills for sm_80 and sm_90 (tests/kernels/test_compile.py). They have not been measured on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from flashpoint_kernels.triton_backend.interpret import INTERPRETED


@dataclass(frozen=True)
class Tile:
    """BLOCK_M queries by BLOCK_N keys, and how the compiler spreads and pipelines them."""

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True)
class Config:
    """Tiles of each kernel, and how many keys a part of a split problem has (a multiple of forward.block_n)."""

    forward: Tile
    backward_kv: Tile
    backward_q: Tile
    split_keys: int = 1024


# By largest padded head dimension. Level 2 (every option) holds more in registers: half the tile.
_HALF = {
    64: Config(Tile(128, 64, 4, 3), Tile(64, 128, 8, 2), Tile(128, 64, 8, 2)),
    128: Config(Tile(128, 64, 8, 2), Tile(64, 128, 8, 2), Tile(128, 64, 8, 2)),
    256: Config(Tile(64, 32, 8, 2), Tile(32, 64, 8, 1), Tile(64, 32, 8, 1)),
}
_HALF_EVERY_OPTION = {
    64: Config(Tile(64, 64, 4, 2), Tile(64, 64, 8, 1), Tile(64, 64, 8, 1)),
    128: Config(Tile(64, 64, 8, 2), Tile(32, 64, 8, 1), Tile(64, 32, 8, 1)),
    256: Config(Tile(64, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
}
# IEEE float32 uses no matrix instruction: small tiles, operands in registers.
_SINGLE = {
    64: Config(Tile(64, 32, 8, 2), Tile(32, 64, 8, 1), Tile(64, 32, 8, 1)),
    128: Config(Tile(32, 32, 8, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    256: Config(Tile(32, 16, 8, 1), Tile(16, 32, 8, 1), Tile(32, 16, 8, 1)),
}
# The interpreter runs tile by tile in Python: few tiles, but M ≠ N, and enough of them to be cut, skipped and split.
_INTERPRETER = Config(Tile(64, 32), Tile(32, 64), Tile(64, 32), split_keys=64)


def padded(dim: int) -> int:
    """The power of two, at least 16, that a head dimension is padded to inside a tile."""
    return max(16, 1 << (dim - 1).bit_length())


def tiles(dtype: str, head_dim: int, value_dim: int, level: int) -> Config:
    """The shipped tiles for a problem, before the device's shared memory is looked at."""
    by_dim = _SINGLE if dtype == "float32" else _HALF_EVERY_OPTION if level == 2 else _HALF
    widest = max(padded(head_dim), padded(value_dim))
    return by_dim[next(d for d in by_dim if widest <= d)]


@lru_cache(maxsize=1024)
def config_for(device: torch.device, dtype: str, head_dim: int, value_dim: int, level: int) -> Config:
    """The tiles that run on `device`: the shipped ones, fewer stages or keys where its shared memory is smaller."""
    if INTERPRETED:
        return _INTERPRETER
    shared = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    width = (padded(head_dim) + padded(value_dim)) * (4 if dtype == "float32" else 2)
    chosen = tiles(dtype, head_dim, value_dim, level)

    def fit(tile: Tile, fixed: int, streamed: int) -> Tile:
        """Halve what is streamed until the fixed block and the pipelined ones fit."""
        stages = tile.num_stages
        while (fixed + stages * streamed) * width > shared and stages > 1:
            stages -= 1
        return Tile(tile.block_m, tile.block_n, tile.num_warps, stages)

    return Config(
        fit(chosen.forward, chosen.forward.block_m // 2, chosen.forward.block_n),
        fit(chosen.backward_kv, chosen.backward_kv.block_n, chosen.backward_kv.block_m),
        fit(chosen.backward_q, chosen.backward_q.block_m, chosen.backward_q.block_n),
        chosen.split_keys,
    )
