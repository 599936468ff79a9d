"""Tile sizes: one table a kind of chip, by dtype and padded head dimension; a function of the problem's own shape.

Starting points are the tiles of FlashAttention-2 and of Triton's tutorial, made smaller until the compiler spills none
in the fast variants (tests/kernels/test_compile.py holds that). None has been measured on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton

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


# By kind of chip (`family`), then by largest padded head dimension.
_HALF = {
    80: {
        64: Config(Tile(128, 64, 4, 3), Tile(64, 128, 8, 2), Tile(128, 64, 8, 2)),
        128: Config(Tile(128, 64, 8, 2), Tile(32, 128, 8, 2), Tile(64, 64, 8, 2)),
        256: Config(Tile(64, 32, 8, 2), Tile(32, 32, 8, 1), Tile(64, 32, 8, 1)),
    },
    90: {
        64: Config(Tile(128, 64, 4, 3), Tile(64, 128, 8, 2), Tile(128, 64, 8, 2)),
        128: Config(Tile(128, 64, 8, 3), Tile(64, 128, 8, 2), Tile(128, 64, 8, 2)),
        256: Config(Tile(64, 64, 8, 2), Tile(32, 64, 8, 2), Tile(64, 32, 8, 2)),
    },
}
# Level 1 (window, softcap, sinks) tests both ends of the band, and a softcap's slope is one tile more: less for dK, dV.
_HALF_BACKWARD_KV_LEVEL_1 = {64: Tile(64, 64, 8, 2), 128: Tile(32, 64, 8, 2), 256: Tile(32, 32, 8, 1)}
# Level 2 (every option) holds more of each score: half the tile, on every chip.
_HALF_EVERY_OPTION = {
    64: Config(Tile(64, 64, 4, 2), Tile(64, 64, 8, 1), Tile(64, 64, 8, 1)),
    128: Config(Tile(64, 64, 8, 2), Tile(32, 64, 8, 1), Tile(64, 32, 8, 1)),
    256: Config(Tile(64, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
}
# IEEE float32 uses no matrix instruction: small tiles, operands in registers, on every chip.
_SINGLE = {
    64: Config(Tile(64, 32, 8, 2), Tile(32, 32, 8, 1), Tile(64, 32, 8, 1)),
    128: Config(Tile(32, 32, 8, 1), Tile(32, 32, 8, 2), Tile(32, 32, 8, 2)),
    256: Config(Tile(32, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}
# The interpreter runs tile by tile in Python: few tiles, but M ≠ N, and enough of them to be cut, skipped and split.
_INTERPRETER = Config(Tile(64, 32), Tile(32, 64), Tile(64, 32), split_keys=64)


def padded(dim: int) -> int:
    """The power of two, at least 16, that a head dimension is padded to inside a tile."""
    return max(16, 1 << (dim - 1).bit_length())


def family(arch: int) -> int:
    """The chips that share a table: 90 where a warp group multiplies from shared memory (sm_90, sm_100), else 80."""
    return 90 if 90 <= arch < 120 else 80


def tiles(arch: int, dtype: str, head_dim: int, value_dim: int, level: int) -> Config:
    """The shipped tiles for a problem on sm_`arch`, before the device's shared memory is looked at."""
    by_dim = _SINGLE if dtype == "float32" else _HALF_EVERY_OPTION if level == 2 else _HALF[family(arch)]
    widest = max(padded(head_dim), padded(value_dim))
    dim = next(d for d in by_dim if widest <= d)
    if level == 1 and dtype != "float32":
        return replace(by_dim[dim], backward_kv=_HALF_BACKWARD_KV_LEVEL_1[dim])
    return by_dim[dim]


@lru_cache(maxsize=1024)
def config_for(device: torch.device, dtype: str, head_dim: int, value_dim: int, level: int) -> Config:
    """The tiles that run on `device`: the shipped ones, with fewer stages where its shared memory is smaller."""
    if INTERPRETED:
        return _INTERPRETER
    index = torch.cuda.current_device() if device.index is None else device.index
    shared = int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])
    major, minor = torch.cuda.get_device_capability(index)
    width = (padded(head_dim) + padded(value_dim)) * (4 if dtype == "float32" else 2)
    chosen = tiles(major * 10 + minor, dtype, head_dim, value_dim, level)

    def fit(tile: Tile, fixed: int, streamed: int) -> Tile:
        """Pipeline fewer blocks until they and the fixed block fit."""
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
