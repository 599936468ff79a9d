"""Every variant of a kernel that dispatch can choose on an architecture, and the few that stand for all in CI."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from flashpoint_kernels.triton_backend.configurations import TABLES

HALVES = ("bfloat16", "float16")
# The true head dimension is a run-time value: what is compiled is its power of two, and whether it is one. 32 takes the
# tiles of 64.
HEAD_DIMS = (32, 64, 96, 128, 256)


class Variant(NamedTuple):
    """A kernel as it is compiled: Dv = D, aligned tensors. `mask`: the dtype of `attn_mask`; level 2 alone has one."""

    kernel: str
    arch: int
    dtype: str
    head_dim: int
    level: int = 0
    mask: str | None = None
    precision: str = "ieee"


def all_of(arch: int) -> list[Variant]:
    """What can run on sm_`arch`: 16-bit at every level, float32 in both precisions; with a float mask where one may be.

    One kind of mask stands for four: a tile of it is loaded and added, whatever its dtype. Likewise aligned tensors for
    all: others are the same tiles, loaded in narrower pieces.
    """
    found = []
    for dtype, dim in product((*HALVES, "float32"), HEAD_DIMS):
        found += [Variant(kernel, arch, dtype, dim) for kernel in ("merge", "delta")]
        for level, kernel in product((0, 1, 2), ("forward", "backward_kv", "backward_q")):
            if dtype != "float32" or dim in (64, 128, 256):
                found.append(Variant(kernel, arch, dtype, dim, level, "float32" if level == 2 else None))
        if dtype == "float32":
            found += [
                Variant(kernel, arch, dtype, dim, precision="tf32")
                for kernel in ("forward", "backward_kv", "backward_q")
            ]
        found.append(Variant("backward_mask", arch, dtype, dim, 2, "float32"))
        if arch == 90 and dtype in HALVES:
            found += [Variant(kernel, arch, dtype, dim) for kernel in ("forward_hopper", "backward_q_hopper")]
    return [*found, Variant("backward_sinks", arch, "float32", 64, 1)]


def representative() -> list[Variant]:
    """What CI compiles: the fast variants of most requests everywhere, and the heaviest of the others somewhere."""
    found = []
    for arch in TABLES:
        dims = (64, 128) if arch in (80, 90) else (128,)
        for dim, kernel in product(dims, ("forward", "backward_kv", "backward_q")):
            found.append(Variant(kernel, arch, "bfloat16", dim))
    for dim, kernel in product((64, 128), ("forward_hopper", "backward_q_hopper")):
        found.append(Variant(kernel, 90, "bfloat16", dim))
    for kernel in ("forward", "backward_kv", "backward_q", "backward_mask"):
        found.append(Variant(kernel, 90, "float16", 96, 2, "float32"))
    found += [Variant(kernel, 86, "bfloat16", 256) for kernel in ("forward", "backward_kv", "backward_q")]
    found += [Variant(kernel, 80, "float32", 64) for kernel in ("forward", "backward_kv", "merge", "delta")]
    return [*found, Variant("forward", 80, "float16", 128, 1), Variant("backward_sinks", 80, "float32", 64, 1)]
