"""Cache the route of a launch: all data for it that does not depend on addresses, strides, lengths, batch and heads.

A call finds its route by its launch key, the alignment of its tensors and its device, and adds the table of sequences
and the lists of programs. So all calls of a loop take one route for all lengths, without further work. A route contains
no tensor and does not depend on a stream. At most `_KEPT` routes are kept in a process; a child process inherits the
routes of its parent.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any

import torch
import triton.language as tl

from flashpoint_contract.tensors import EIGHT_BIT
from flashpoint_kernels.problems.problem import Problem, launch_key
from flashpoint_kernels.triton_backend.host import config as configuration
from flashpoint_kernels.triton_backend.host.calls import Code
from flashpoint_kernels.triton_backend.host.config import (
    chip_of,
    config_for,
    gradient_parts_of,
    hopper_tiles,
    keys_of_device,
    padded,
    reloads,
)
from flashpoint_kernels.triton_backend.host.configurations import Config, Tile
from flashpoint_kernels.triton_backend.kernels.groups import Constants

_KEPT = 256

TYPES = {
    "bool": tl.int8,
    "float16": tl.float16,
    "bfloat16": tl.bfloat16,
    "float32": tl.float32,
    "float64": tl.float64,
}

# Names of the constants that a kernel gets from its route, for kernels for Hopper, of the forward, and those that do
# not read keys. A kernel adds the constants of its tile. `Route.of_gradients` has those of the backward.
OF_HOPPER = ("LEVEL", "DTYPE", "ALIGNED", "BLOCK_D", "BLOCK_DV", "EVEN")
FORWARD = ("LEVEL", "DTYPE", "MASK_DTYPE", "TF32", "ALIGNED", "BLOCK_DV", "PAGED", "KEYS", "BLOCKS")
VALUES = ("DTYPE", "ALIGNED", "BLOCK_DV", "EVEN")


class Route:
    """The tiles of a launch, the constants that its kernels have in common, and the Code of each kernel."""

    def __init__(self, key: tuple[Any, ...], aligned: bool, hopper: bool, device: torch.device, config: Config) -> None:
        _, _, (dtype, of_keys, mask), dims, precision, level, paged, blocks = key
        self.device, self.hopper, self.config, self.dims = device, hopper, config, dims
        self.block_dims = block_d, block_dv = padded(dims[0]), padded(dims[1])
        self.of_hopper: dict[str, Tile] = hopper_tiles(*dims) if hopper else {}
        self.multiprocessors = chip_of(device).multiprocessors if hopper else 0
        self.blocks: bool = blocks
        self._shared = {
            "LEVEL": level,
            "DTYPE": TYPES[dtype],
            "MASK_DTYPE": mask and TYPES["float32" if mask == "float64" else mask],
            "TF32": dtype == "float32" and precision == "tf32",
            "ALIGNED": aligned,
            "BLOCK_D": block_d,
            "BLOCK_DV": block_dv,
            "EVEN": (block_d, block_dv) == dims,
            "PAGED": paged,
            "KEYS": keys_of_device(of_keys, device),
            "BLOCKS": blocks,
        }
        columns = [gradient_parts_of(dim) for dim in dims]
        self._of_gradients = {
            "BLOCK_D": columns[0][0],
            "BLOCK_REST": columns[0][1],
            "BLOCK_DV": columns[1][0],
            "BLOCK_DV_REST": columns[1][1],
            "RELOAD": reloads(dtype, *dims),
            "EVEN": tuple(map(sum, columns)) == dims,
        }
        self._codes: dict[Hashable, Code] = {}

    def shared(self, *names: str) -> dict[str, Any]:
        """Return the constants with these names, which kernels share."""
        return {name: self._shared[name] for name in names}

    @property
    def of_gradients(self) -> dict[str, Any]:
        """Return the constants of the general kernels of the backward; a wide head has its columns in two parts."""
        return self.shared("LEVEL", "DTYPE", "MASK_DTYPE", "TF32", "ALIGNED", "BLOCKS") | self._of_gradients

    def code(self, kernel: Any, kind: Hashable, make: Callable[[], tuple[Tile, dict[str, Any]]]) -> Code:
        """Return the Code of `kernel` for `kind`, for example a number of rows of packed blocks.

        `make` returns its tile and its further constants. It is called only for a kernel and kind that are new.
        """
        code = self._codes.get((kernel, kind))
        if code is None:
            tile, constants = make()
            made = Code(kernel, tile, self.device, Constants(BLOCK_M=tile.block_m, **constants))
            code = self._codes.setdefault((kernel, kind), made)
        return code


def route_of(problem: Problem, aligned: bool, hopper: bool, tiles: Config | None) -> Route:
    """Return the route of a problem; `tiles` replaces the tiles of the device's table."""
    return _route(launch_key(problem.spec, "triton"), aligned, hopper, problem.device, tiles, configuration.stand_in)


@lru_cache(_KEPT)
def _route(
    key: tuple[Any, ...], aligned: bool, hopper: bool, device: torch.device, tiles: Config | None, stand_in: object
) -> Route:
    return Route(key, aligned, hopper, device, tiles or _config(key, hopper, device, stand_in))


def config_of(problem: Problem, hopper: bool) -> Config:
    """Return the tiles of a problem; `hopper` says whether it uses the kernels for Hopper or the general ones."""
    return _config(launch_key(problem.spec, "triton"), hopper, problem.device, configuration.stand_in)


@lru_cache(_KEPT)
def _config(key: tuple[Any, ...], hopper: bool, device: torch.device, _stand_in: object) -> Config:
    _, _, (dtype, of_keys, _), (head_dim, value_dim), _, level, paged, blocks = key
    return config_for(device, dtype, head_dim, value_dim, level, hopper, paged, of_keys in EIGHT_BIT, blocks)
