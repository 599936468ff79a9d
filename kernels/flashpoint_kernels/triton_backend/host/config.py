"""Choose the tiles of a problem.

Tiles depend only on the device, and on the problem's dtype, head dimensions, level and path (general, or for Hopper).
The sizes are in configurations.py, one table per architecture. Tiles are never changed at run time: a device uses a
table as it is, if it has the instructions and the shared memory that the tiles were compiled for.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import triton

from flashpoint_contract.tensors import EIGHT_BIT, MAX_FUSED_HEAD_DIM
from flashpoint_kernels.triton_backend.host.configurations import (
    HOPPER,
    SHARED_KIB,
    STORED,
    TABLES,
    WIDE,
    WIDE_GRADIENTS,
    Config,
    Tile,
    has_fences,
    packed_tile,
)
from flashpoint_kernels.triton_backend.kernels.groups import FLOAT8, FLOAT8_BITS, INT8
from flashpoint_kernels.triton_backend.kernels.interpret import INTERPRETED

INTERPRETED_AS = 90  # Triton's interpreter widens 8-bit keys as this architecture does
# Triton's interpreter runs each tile in Python, so there must be few tiles, but enough for tests in which tiles are cut
# by a mask, skipped and split. M and N differ. `few_queries` is smaller than on a device, so that small problems use
# both kinds of blocks: packed blocks, and blocks of one head.
_INTERPRETER = Config(
    Tile(64, 32), Tile(32, 64), Tile(64, 32, num_stages=3), Tile(32, 32),
    split_keys=64, few_queries=8, least_keys=32, least_programs=4,
)  # fmt: skip
_INTERPRETED_STORED: dict[str, Any] = {"backward_kv_storing": Tile(32, 64), "backward_q_stored": Tile(128, 32)}


@dataclass(frozen=True)
class Chip:
    """The properties of a device that decide its tiles and grids.

    `arch` is the compute capability (90 for sm_90), `shared_kib` the KiB of shared memory per program. A launch of a
    persistent kernel has one program per multiprocessor.
    """

    arch: int
    shared_kib: int
    multiprocessors: int = 1


def padded(dim: int) -> int:
    """Return the power of two, at least 16, to which a tile pads a head dimension."""
    return max(16, 1 << (dim - 1).bit_length())


def parts_of(dim: int) -> tuple[int, int]:
    """Return (BLOCK_D, BLOCK_REST) of the forward: one padded part, or two parts if together they are smaller.

    192 becomes 128 and 64; 576 becomes 512 and 64. Each part is a power of two, and BLOCK_REST is 0 if there is one
    part.
    """
    whole, first = padded(dim), padded(dim) // 2
    rest = padded(dim - first)
    return (first, rest) if dim > 128 and first + rest < whole else (whole, 0)


def gradient_parts_of(dim: int) -> tuple[int, int]:
    """Return (BLOCK_D, BLOCK_REST) of the backward: above 256 those of the forward, else one padded part."""
    return parts_of(dim) if dim > MAX_FUSED_HEAD_DIM else (padded(dim), 0)


def reloads(dtype: str, head_dim: int, value_dim: int) -> bool:
    """Return `Constants.RELOAD` of the backward."""
    return dtype == "float32" and max(head_dim, value_dim) > MAX_FUSED_HEAD_DIM


def exact(head_dim: int, value_dim: int) -> bool:
    """Return `Constants.EVEN` of the forward: whether the head dimensions need no padding."""
    return sum(parts_of(head_dim)) == head_dim and padded(value_dim) == value_dim


def table_of(chip: Chip) -> int:
    """Return the architecture whose table `chip` uses.

    This is its own architecture, if it has a table that fits into the chip's shared memory. Otherwise it is, among the
    architectures of its generation whose tables fit, the one with the most shared memory. Raises ValueError if none
    fits.
    """
    if SHARED_KIB.get(chip.arch, chip.shared_kib + 1) <= chip.shared_kib:
        return chip.arch
    fitting = [
        arch for arch, kib in SHARED_KIB.items() if arch // 10 == chip.arch // 10 and kib <= chip.shared_kib
    ]  # fmt: skip
    if not fitting:
        raise ValueError(
            f"backend: triton has no tiles for sm_{chip.arch} with {chip.shared_kib} KiB of shared memory; it has them "
            f"for {', '.join(f'sm_{arch} with {kib}' for arch, kib in SHARED_KIB.items())}"
        )
    return max(fitting, key=lambda arch: (SHARED_KIB[arch], arch))


def tiles(
    arch: int, dtype: str, head_dim: int, value_dim: int, level: int,
    hopper: bool = False, paged: bool = False, quantized: bool = False, blocks: bool = False,
) -> Config:  # fmt: skip
    """Return the tiles of a problem in the table of sm_`arch`; `hopper` adds the tiles of the path for Hopper.

    Some options need more registers and use the tiles of a higher level. A head dimension that is not a power of two
    needs a mask for the columns of loads, and pages need an address for each key: both use level 1. A block mask is
    read in the tiles that it cuts, and 8-bit keys are widened: both use level 2. 8-bit keys in pages have tiles with
    half the keys, and so do 8-bit keys in packed blocks. On sm_90 a Triton without proxy fences uses no asynchronous
    copies.
    """
    widest = max(padded(head_dim), padded(value_dim))
    of_arch = STORED[arch] if may_store(dtype, head_dim, value_dim, level, blocks) else {}
    stored: dict[str, Any] = dict(of_arch.get(widest, {}))
    even = padded(head_dim) == head_dim and padded(value_dim) == value_dim
    wide = wide_tile(arch, dtype, head_dim, value_dim, 2 if blocks else 1 if paged or quantized else level)
    level = max(level, 2 if quantized or blocks else 1 if paged or not even else 0)
    by_dim = TABLES[arch]["float32" if dtype == "float32" else f"level {level}"]
    config = by_dim[next(dim for dim in by_dim if min(widest, max(by_dim)) <= dim)]
    forward, packed = wide or config.forward, packed_tile(arch, dtype, widest)
    if quantized:
        packed = replace(packed, block_n=max(packed.block_n // 2, 16))
    if quantized and paged:
        forward = replace(forward, block_n=max(forward.block_n // 2, 16))
        packed = replace(packed, num_stages=2 if arch >= 100 else packed.num_stages)  # on sm_100, 3 spill registers
    if paged:
        forward, packed = _of_pages(forward), _of_pages(packed)
    if blocks and arch == 100 and widest == 128:  # with 64 keys, the loop of uncut tiles spills registers
        forward = replace(forward, block_n=32)
    of_wide: dict[str, Any] = dict(wide_gradient_tiles(arch, dtype, head_dim, value_dim))
    config = replace(config, forward=forward, packed=packed, storable=bool(stored), **of_wide | stored)
    if arch == 90 and not has_fences(triton.__version__):
        config = config.without_copies()
        if widest == 128 and config.backward_kv.block_m == 64:  # the tile spills if it is loaded through registers
            config = replace(config, backward_kv=replace(config.backward_kv, block_m=32))
    if arch == 100:  # in dQ, Triton 3.7.1 omits a proxy fence there
        config = replace(config, one_stage=("backward_q",))
    of_hopper: dict[str, Any] = {"storable": True, **hopper_tiles(head_dim, value_dim)} if hopper else {}
    return replace(config, **{"backward_kv_storing": config.backward_kv, **of_hopper})


def may_store(dtype: str, head_dim: int, value_dim: int, level: int, blocks: bool) -> bool:
    """Return whether general kernels exist that store dS of such a problem."""
    fused = max(head_dim, value_dim) <= MAX_FUSED_HEAD_DIM
    return dtype != "float32" and level == 0 and fused and not blocks


def _of_pages(tile: Tile) -> Tile:
    """Return the tile with more stages, so that it prefetches as many tiles of paged keys as it would of unpaged ones.

    The address of a key in a page needs another load, for which Triton uses every second stage.
    """
    return replace(tile, num_stages=2 * tile.num_stages - 1)


def wide_tile(arch: int, dtype: str, head_dim: int, value_dim: int, level: int) -> Tile | None:
    """Return the forward's tile for dimensions above 256, or at level 0 for D 192 with Dv 128; None for others."""
    by_dim = WIDE[_kind_of_wide(arch, dtype)]
    if max(head_dim, value_dim) > MAX_FUSED_HEAD_DIM:
        return by_dim[512 if padded(value_dim) <= 512 else 1024]
    return by_dim.get(192) if level == 0 and (head_dim, padded(value_dim)) == (192, 128) else None


def wide_gradient_tiles(arch: int, dtype: str, head_dim: int, value_dim: int) -> dict[str, Tile]:
    """Return the tiles of the backward for dimensions above 256, by their names in `Config`; {} for others."""
    if max(head_dim, value_dim) <= MAX_FUSED_HEAD_DIM:
        return {}
    return WIDE_GRADIENTS[_kind_of_wide(arch, dtype)]


def _kind_of_wide(arch: int, dtype: str) -> str:
    """Return the key of a device and dtype in WIDE and WIDE_GRADIENTS."""
    if dtype == "float32":
        return dtype
    return "99 KiB" if SHARED_KIB[arch] <= 99 else "sm_100" if arch == 100 else "16 bits"


def keys_kind(arch: int, dtype: str) -> int:
    """Return `Constants.KEYS` for 8-bit keys of this dtype on sm_`arch`; GPUs before sm_89 cannot convert float8."""
    kind = INT8 if dtype == "int8" else FLOAT8 if arch >= 89 else FLOAT8_BITS
    return int(kind.value)


def hopper_tiles(head_dim: int, value_dim: int) -> dict[str, Tile]:
    """Return the tiles of the kernels that exist for Hopper, by their names in `Config`."""
    widest = max(padded(head_dim), padded(value_dim))
    return HOPPER[next(dim for dim in HOPPER if widest <= dim)]


def carries_float32(name: str, block_d: int, block_dv: int) -> bool:
    """Return Constants.CARRY_FLOAT32 of a kernel for Hopper, by the name of its tile in `Config`.

    P or dS of a tile is an operand of the loop's next iteration. If the loop keeps pairs of 16 bits, ptxas unpacks and
    packs them again. float32 takes twice the registers, too many for wider heads. The kernel for dK and dV keeps
    neither.
    """
    return (name == "forward" and block_dv <= 128) or (name == "backward_q" and block_d == 128)


def stores(name: str, block_d: int, block_dv: int) -> dict[str, bool]:
    """Return Constants.STORE_DS and HOLD of a kernel for Hopper, by the name of its tile in `Config`.

    A product reads its first operand from registers or from shared memory. With 64 columns, products that read both
    operands from shared memory wait for it. At D 128, registers that hold V spill others in the loop.
    """
    return {"STORE_DS": True, "HOLD": max(block_d, block_dv) <= 64} if name.endswith("_storing") else {}


# If it is set, its properties replace those of every device: ahead.py compiles for a GPU that is not in the machine.
stand_in: Chip | None = None


def chip_of(device: torch.device) -> Chip:
    """Return the properties of a CUDA device, as its driver reports them; `stand_in` instead if it is set."""
    return stand_in or _chip_of(device)


@lru_cache(maxsize=64)
def _chip_of(device: torch.device) -> Chip:
    index = torch.cuda.current_device() if device.index is None else device.index
    shared = int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])
    properties = torch.cuda.get_device_properties(index)
    return Chip(properties.major * 10 + properties.minor, shared // 1024, properties.multi_processor_count)


def config_for(
    device: torch.device, dtype: str, head_dim: int, value_dim: int, level: int,
    hopper: bool = False, paged: bool = False, quantized: bool = False, blocks: bool = False,
) -> Config:  # fmt: skip
    """Return the tiles of a problem on `device`; see `tiles`. Raises ValueError if no table fits the device."""
    if not INTERPRETED:
        arch = table_of(chip_of(device))
        return tiles(arch, dtype, head_dim, value_dim, level, hopper, paged, quantized, blocks)
    if hopper:
        return replace(_INTERPRETER, storable=True)
    if may_store(dtype, head_dim, value_dim, level, blocks):
        return replace(_INTERPRETER, storable=True, **_INTERPRETED_STORED)
    return _INTERPRETER


def keys_of_device(dtype: str, device: torch.device) -> int | None:
    """Return Constants.KEYS for keys of `dtype` on `device`; None if they are not 8-bit numbers."""
    if dtype not in EIGHT_BIT:
        return None
    return keys_kind(INTERPRETED_AS if INTERPRETED else chip_of(device).arch, dtype)


def takes_hopper(device: torch.device) -> bool:
    """Return whether problems may use the path for Hopper: the device is an sm_90, and FLASHPOINT_HOPPER is not 0.

    It is off when Triton interprets, because the interpreter does not run Gluon, unless `stand_in` replaces the device.
    Raises ValueError if FLASHPOINT_HOPPER is neither 0 nor 1.
    """
    if not _switch("FLASHPOINT_HOPPER", "1") or (INTERPRETED and stand_in is None):
        return False
    return chip_of(device).arch == 90


def two_sets() -> bool:
    """Return `Constants.TWO_SETS` of the forward for Hopper: whether FLASHPOINT_TWO_SETS is 1.

    Raises ValueError if it is neither 0 nor 1.
    """
    return _switch("FLASHPOINT_TWO_SETS", "0")


def _switch(name: str, default: str) -> bool:
    value = os.environ.get(name) or default
    if value not in ("0", "1"):
        raise ValueError(f"{name} must be 0 or 1, not {value!r}")
    return value == "1"
