"""Rounding units of the data types, and the error that rounding causes through softmax maxima."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flashpoint_kernels.problems.problem import DTYPES

ROUND = 2.0  # number of roundings to the data type that each 16-bit result may have
_UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
_TINY = {"float16": 2.0**-24, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}
LARGEST = {name: torch.finfo(DTYPES[name]).max for name in _UNIT}


class Unit(NamedTuple):
    """The rounding units for one data type."""

    w: float  # unit of float32, in which kernels must add; of float64 if the data type is float64
    u: float  # unit of the data type itself
    half: float  # 2u for 16-bit types, 0 for the others
    eta: float
    tiny: float
    tf32: float  # relative error of a product of two numbers in TF32; 0 without TF32
    to: torch.dtype


def unit_of(dtype: str, precision: str = "ieee") -> Unit:
    u = _UNIT[dtype]
    w = min(u, 2.0**-24)
    tf32 = 2.0**-10 if precision == "tf32" and dtype == "float32" else 0.0
    # `_TINY` is the smallest number that no processor flushes to 0: a normal number, but a subnormal one in float16.
    return Unit(w, u, ROUND * u if u > w else 0.0, _TINY[dtype] / 2, _TINY[dtype], tf32, DTYPES[dtype])


def rounded(t: Tensor, to: torch.dtype) -> Tensor:
    """Return `t` rounded to a type, as float64; a number that overflows the type becomes infinite."""
    return t.to(to).double()


class Maxima:
    """Mark the keys that have the largest score of their tile, for several tile sizes. Scores are (…, keys).

    If autograd differentiates an online softmax, the gradient of each tile's maximum flows to the key that has it. In
    exact arithmetic this gradient is 0; with rounding it is the sum of the errors of the tile's dS. The kernel's tile
    size is unknown. So assume for each key the largest tile in which it has the maximum, or the whole row if it is a
    running maximum.
    """

    def __init__(self, s: Tensor) -> None:
        self.keys = s.shape[-1]
        self.running = s >= s.cummax(-1)[0] if self.keys else s
        self.tiles: list[tuple[int, Tensor]] = []
        tile = 16
        while tile < self.keys:
            tops = self.by_tiles(s, tile, -math.inf).amax(-1, keepdim=True)
            self.tiles.append((tile, (s >= self.to_keys(tops, tile)) & (s > -math.inf)))
            tile *= 2

    def by_tiles(self, t: Tensor, tile: int, fill: float) -> Tensor:
        """Return the scores as (…, tiles, tile), with the keys padded to whole tiles."""
        padded = torch.nn.functional.pad(t, (0, -self.keys % tile), value=fill)
        tiles: Tensor = padded.unflatten(-1, (-1, tile))  # type: ignore[no-untyped-call]
        return tiles

    def to_keys(self, t: Tensor, tile: int) -> Tensor:
        """Return a tile's number repeated for each key of the tile."""
        return t.expand(*t.shape[:-1], tile).flatten(-2)[..., : self.keys]

    def through(self, moved: Tensor) -> Tensor:
        """Return the error of dS that the gradients of the maxima cause. `moved` are the other errors of all dS."""
        if not self.keys:
            return torch.zeros_like(moved)
        more = self.running * moved.sum(-1, keepdim=True)
        for tile, largest in self.tiles:
            sums = self.to_keys(self.by_tiles(moved, tile, 0.0).sum(-1, keepdim=True), tile)
            more = torch.maximum(more, largest * sums)
        return more
