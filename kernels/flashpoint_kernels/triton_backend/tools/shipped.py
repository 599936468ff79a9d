"""List every variant of a kernel that dispatch can choose on an architecture, and the few variants that CI compiles."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from flashpoint_kernels.triton_backend.host.config import hopper_tiles, tiles
from flashpoint_kernels.triton_backend.host.configurations import PACKED_ROWS, STORED, TABLES, packed_tile

DTYPES = ("bfloat16", "float16", "float32")
HEAD_DIMS = (64, 128, 256)  # the head dimensions for which every architecture's table (TABLES) has tiles
# Another head dimension is compiled as the next power of two. If it is not a power of two itself, `Constants.EVEN` is
# false, and level 0 uses the tiles of level 1. 32 uses the tiles of 64.
OTHER_HEAD_DIMS = (32, 96)
# (paged, dtype of 8-bit keys)
OTHER_KEYS = ((True, None), (False, "int8"), (False, "float8_e4m3fn"), (True, "float8_e4m3fn"))
_PRODUCTS = ("forward", "backward_kv", "backward_q")
_OF_STORED = ("backward_kv_storing", "backward_q_stored")


class Variant(NamedTuple):
    """A kernel as it is compiled for aligned tensors. `mask` is the dtype of `attn_mask`; only level 2 has one.

    `keys` is the dtype of 8-bit keys and values. `value_dim` is Dv, if it is not D. A kernel whose name ends in
    "_blocks" has a block mask.
    """

    kernel: str
    arch: int
    dtype: str
    head_dim: int
    level: int = 0
    mask: str | None = None
    precision: str = "ieee"
    paged: bool = False
    keys: str | None = None
    value_dim: int | None = None


def all_of(arch: int, dtypes: Sequence[str] = DTYPES) -> list[Variant]:
    """Return the variants that can run on sm_`arch`: every tile of its table, in every dtype that uses the tile.

    Some variants represent others. A float32 mask at level 2 represents four mask dtypes: a tile of the mask is loaded
    and added. Aligned tensors represent unaligned ones, which have the same tiles and narrower loads. The smallest and
    the largest packed block represent all packed blocks, and D 128 at level 0 represents pages and 8-bit keys.
    """
    variants = []
    for dtype in dtypes:
        for dim in HEAD_DIMS:
            variants += [Variant(kernel, arch, dtype, dim) for kernel in ("merge", "delta")]
            for level, kernel in product((0, 1, 2), _PRODUCTS):
                variants.append(Variant(kernel, arch, dtype, dim, level, "float32" if level == 2 else None))
            variants += _packed(arch, dtype, dim)
            variants.append(Variant("backward_mask", arch, dtype, dim, 2, "float32"))
        if dtype == "float32":
            variants += [Variant(kernel, arch, dtype, 128, precision="tf32") for kernel in _PRODUCTS]
            variants.append(Variant("forward", arch, dtype, 576, value_dim=512))
        else:
            variants += [Variant(kernel, arch, dtype, dim) for dim, kernel in product(OTHER_HEAD_DIMS, _PRODUCTS)]
            variants.append(Variant("forward", arch, dtype, 192, value_dim=128))
            wide = ("forward", "forward_packed16", "merge", "merge_packed16")
            variants += [Variant(kernel, arch, dtype, 576, value_dim=512) for kernel in wide]
            kinds = product(("forward", "forward_packed16"), OTHER_KEYS)
            variants += [Variant(kernel, arch, dtype, 128, paged=paged, keys=keys) for kernel, (paged, keys) in kinds]
            variants += [
                Variant("cascade_packed16", arch, dtype, 128, paged=True, keys=keys) for keys in (None, "int8")
            ]
        dims = (*HEAD_DIMS, *OTHER_HEAD_DIMS)
        storable = [dim for dim in dims if tiles(arch, dtype, dim, dim, 0).storable]
        variants += [Variant(kernel, arch, dtype, dim) for dim, kernel in product(storable, _OF_STORED)]
        if arch == 90 and dtype != "float32":
            variants += [Variant(f"{k}_hopper", arch, dtype, dim) for dim in dims for k in hopper_tiles(dim, dim)]
            variants += [Variant("forward_two_sets_hopper", arch, dtype, dim) for dim in dims]
    return [*variants, Variant("backward_sinks", arch, "float32", 64, 1)]


def _packed(arch: int, dtype: str, dim: int) -> list[Variant]:
    """Return the variants for packed blocks: the smallest at levels 0 and 2, and the largest at level 0.

    For float32 return only the smallest at level 0.
    """
    smallest, largest = PACKED_ROWS[0], packed_tile(arch, dtype, dim).block_m
    kernels = ("forward", "backward_q")
    variants = [Variant(f"{kernel}_packed{smallest}", arch, dtype, dim) for kernel in (*kernels, "merge")]
    if dtype != "float32":
        variants += [Variant(f"{kernel}_packed{largest}", arch, dtype, dim) for kernel in kernels]
        variants += [Variant(f"{kernel}_packed{smallest}", arch, dtype, dim, 2, "float32") for kernel in kernels]
    return variants


def representative() -> list[Variant]:
    """Return the variants that CI compiles.

    For all architectures these are the kernels of the most frequent requests (bfloat16, D 128, no option that changes
    the scores), also with pages and with block masks. For some architectures there are also other dtypes, head
    dimensions and options, among them those that need the most registers and shared memory.
    """
    wide = product((80, 90, 100), ((192, 128), (576, 512)))
    variants = [Variant("forward", arch, "bfloat16", dim, value_dim=dv) for arch, (dim, dv) in wide]
    of_wide = product((86, 90), ("backward_kv", "backward_q"))
    variants += [Variant(kernel, arch, "bfloat16", 576, value_dim=512) for arch, kernel in of_wide]
    for arch in TABLES:
        dims = (64, 128) if arch in (80, 90) else (128,)
        variants += [
            Variant(f"{kernel}_packed16", arch, "bfloat16", 128) for kernel in ("forward", "backward_q", "merge")
        ]
        variants.append(Variant("forward_packed16", arch, "bfloat16", 128, paged=True, keys="float8_e4m3fn"))
        variants.append(Variant("cascade_packed16", arch, "bfloat16", 128, paged=True))
        variants += [Variant(kernel, arch, "bfloat16", dim) for dim, kernel in product(dims, _PRODUCTS)]
        variants += [Variant(kernel, arch, "bfloat16", 128) for kernel in _OF_STORED if 128 in STORED[arch]]
        of_blocks = ("forward_blocks", "forward_packed16_blocks", "backward_kv_blocks", "backward_q_blocks")
        variants += [
            Variant(kernel, arch, "bfloat16", 128) for kernel in (*of_blocks, "list_key_tiles", "list_query_tiles")
        ]
    variants += [Variant(f"{k}_hopper", 90, "bfloat16", dim) for dim in (64, 128) for k in hopper_tiles(dim, dim)]
    variants += [Variant(kernel, 90, "float16", 96, 2, "float32") for kernel in (*_PRODUCTS, "backward_mask")]
    variants += [Variant(kernel, 86, "bfloat16", 256) for kernel in _PRODUCTS]
    variants += [Variant(kernel, 80, "float32", 64) for kernel in ("forward", "backward_kv", "merge", "delta")]
    variants += [Variant(kernel, 80, "float32", 64) for kernel in ("forward_blocks", "backward_kv_blocks")]
    return [*variants, Variant("forward", 80, "float16", 128, 1), Variant("backward_sinks", 80, "float32", 64, 1)]
