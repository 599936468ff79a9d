"""Tile sizes, and the GPUs and releases of Triton that give right results. Imports neither torch nor Triton.

There is one table per architecture, by level (`Spec.level`) or float32, then by largest padded head dimension.

The sizes were chosen from the compiler's output (Triton 3.7.1, benchmarks/results/compile-*.json,
docs/measurements/compiled.md). Those for Hopper were timed on an H200 (docs/measurements/gpu.md), but not beside other
tiles: the sweep of `make gpu`, which does that and proposes faster ones, has not run yet.

The candidates at level 0 are FlashAttention-2's tiles (Dao 2023; its launch templates) and similar ones of at most 128
queries. The chosen tile does not spill, fits into shared memory, and has the fewest instructions per score in its inner
loop. Levels 1 and 2 use that tile, or half of it if the score's options need the registers. Most tiles use eight warps,
because then the accumulators of wide heads stay in registers. A tile has three stages where they fit: with two, Triton
starts a tile's copies after the last product of the tile before, and waits for them at once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from functools import cached_property


@dataclass(frozen=True)
class Tile:
    """BLOCK_M queries by BLOCK_N keys; the number of warps, and of pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int = 8
    num_stages: int = 2


@dataclass(frozen=True)
class Config:
    """The tiles of each kernel, and how keys are split over programs (schedule.cut).

    A part of a split sequence has `split_keys` keys: sixteen tiles hide the cost of starting a program and of merging
    its part. A sequence with fewer than `least_programs` programs, about the multiprocessors of a large GPU, has parts
    of half, a quarter… of `split_keys`, but at least `least_keys`; both are multiples of a tile's keys. A sequence of
    at most `few_queries` uses packed blocks (see tiles.block_at) of 16, 32 or at most `packed.block_m` rows.
    """

    forward: Tile
    backward_kv: Tile
    backward_q: Tile
    packed: Tile = Tile(64, 64, 4, 3)  # see packed_tile
    split_keys: int = 1024
    few_queries: int = 64
    least_keys: int = 256
    least_programs: int = 128
    # Whether sequences may have stored dS; tiles of the kernels that store dS or read it (`storing` and `stored`), see
    # HOPPER and STORED.
    storable: bool = False
    backward_kv_storing: Tile = Tile(64, 128, 4)
    backward_v_storing: Tile = Tile(32, 128, 4)
    backward_k_stored: Tile = Tile(64, 128, 4, 4)
    backward_q_stored: Tile = Tile(256, 128, 4)
    one_stage: tuple[str, ...] = ()  # kernels whose packed blocks of 64 rows use no asynchronous copies

    def without_copies(self) -> Config:
        """Return the same tiles, but with one stage where products use wgmma: in tiles of at least 64 rows.

        With one stage Triton loads a tile through registers, and puts a proxy fence before the product.
        """
        kv = self.backward_kv
        return replace(
            self,
            forward=_of_one_stage(self.forward, self.forward.block_m),
            backward_kv=_of_one_stage(kv, kv.block_n),
            backward_q=_of_one_stage(self.backward_q, self.backward_q.block_m),
            backward_q_stored=_of_one_stage(self.backward_q_stored, self.backward_q_stored.block_m),
            one_stage=("forward", "backward_q"),
        )

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, each.name) for each in fields(self)))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def packed_rows(self) -> tuple[int, ...]:
        """Return the possible numbers of rows of packed blocks."""
        return tuple(rows for rows in PACKED_ROWS if rows <= self.packed.block_m)

    @cached_property
    def part_sizes(self) -> tuple[int, ...]:
        """Return the numbers of keys that a part may have, largest first."""
        return tuple(self.split_keys >> n for n in range((self.split_keys // self.least_keys).bit_length()))

    def forward_of(self, rows: int) -> Tile:
        """Return the forward's tile for packed blocks of `rows` rows, or with 0, for a block of one head's queries.

        Blocks of 64 rows hold more scores, so their registers hold only half of the keys.
        """
        if not rows:
            return self.forward
        return self._packed_of("forward", rows, 1)

    def backward_q_of(self, rows: int) -> Tile:
        """Return the tile of dQ for packed blocks of `rows` rows, or with 0, for a block of one head's queries.

        dQ holds twice as many products of a tile as the forward, so its tile has half the keys.
        """
        if not rows:
            return self.backward_q
        return self._packed_of("backward_q", rows, 2)

    def _packed_of(self, kernel: str, rows: int, share: int) -> Tile:
        keys = self.packed.block_n // (share * (2 if rows == 64 else 1))
        tile = replace(self.packed, block_m=rows, block_n=max(keys, 16))
        return _of_one_stage(tile, rows) if kernel in self.one_stage else tile

    def merge_of(self, rows: int) -> Tile:
        """Return the tile of `merge_parts`.

        This kernel holds two accumulators (a part, and the sum of earlier parts), so it has twice the forward's warps.
        """
        tile = self.forward_of(rows)
        return replace(tile, num_warps=2 * tile.num_warps)

    @cached_property
    def delta(self) -> Tile:
        """Return the tile of `attention_delta`.

        Its rows are a multiple of the rows of every kernel that reads its output, because all are powers of two.
        """
        return replace(self.backward_q, block_m=max(self.backward_q.block_m, self.backward_kv.block_m))


def _of_one_stage(tile: Tile, rows: int) -> Tile:
    return replace(tile, num_stages=1) if rows >= 64 else tile


PACKED_ROWS = (16, 32, 64)  # mma.sync needs 16 rows, wgmma 64
Table = dict[str, dict[int, Config]]

# KiB of shared memory that a program can use, by architecture (CUDA C++ programming guide, compute capabilities).
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}

# Packed blocks of few queries read keys at the speed of memory. They have four warps, and prefetch as many bytes of
# keys and values as possible with two programs on an SM (three stages of 16 KiB each for K and V). With 99 KiB of
# shared memory they prefetch less.
_PACKED = {64: Tile(64, 64, 4, 4), 128: Tile(64, 64, 4, 3), 256: Tile(64, 32, 4, 3), 1024: Tile(16, 32, 8, 1)}
_PACKED_99 = {64: Tile(64, 64, 4, 3), 128: Tile(64, 32, 4, 3), 256: Tile(64, 32, 4, 2), 1024: Tile(16, 16, 8, 1)}
_PACKED_FLOAT32 = {64: Tile(64, 32, 4, 2), 128: Tile(32, 32, 4, 2), 256: Tile(16, 16, 4, 2), 1024: Tile(16, 16, 8, 1)}


def packed_tile(arch: int, dtype: str, widest: int) -> Tile:
    """Return the tile of packed blocks, which have at most its `block_m` rows.

    `widest` is the larger of the padded head dimensions of keys and of values.
    """
    by_dim = _PACKED_FLOAT32 if dtype == "float32" else _PACKED_99 if SHARED_KIB[arch] <= 99 else _PACKED
    return by_dim[next(dim for dim in by_dim if widest <= dim)]


# The forward's tiles: 192 is for head dimension 192 with values padded to 128, at level 0 only; 512 and 1024 are padded
# value dimensions, for head dimensions above 256, where a tile of 64 queries would spill in the loop.
WIDE = {
    "16 bits": {192: Tile(128, 64, 8, 3), 512: Tile(32, 32), 1024: Tile(16, 16, 8, 1)},
    "sm_100": {192: Tile(128, 64, 8, 1), 512: Tile(32, 32), 1024: Tile(16, 16, 8, 1)},
    "99 KiB": {192: Tile(64, 32, 8, 3), 512: Tile(32, 16), 1024: Tile(16, 16, 8, 1)},
    "float32": {512: Tile(16, 16, 8, 1), 1024: Tile(16, 16, 8, 1)},
}

# The backward's tiles for head dimensions above 256: the largest that fit into shared memory at level 2, and do not
# spill in a loop at level 0, for D 576 and Dv 576.
WIDE_GRADIENTS = {
    "16 bits": {"backward_kv": Tile(32, 16, 8, 1), "backward_q": Tile(32, 32, 8, 1)},
    "sm_100": {"backward_kv": Tile(32, 16, 8, 1), "backward_q": Tile(32, 32, 8, 1)},
    "99 KiB": {"backward_kv": Tile(16, 16, 8, 1), "backward_q": Tile(16, 16, 8, 1)},
    "float32": {"backward_kv": Tile(16, 16, 8, 1), "backward_q": Tile(16, 16, 8, 1)},
}

# IEEE float32 uses no matrix instruction, so the architecture hardly matters: operands are in registers, tiles are
# small.
_FLOAT32 = {
    64: Config(Tile(64, 32), Tile(32, 32, 8, 1), Tile(64, 32, 8, 1)),
    128: Config(Tile(32, 32, 8, 1), Tile(32, 32), Tile(32, 32)),
    256: Config(Tile(32, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}
# At level 2 (all options) a score needs more registers, so use half the tile on every GPU.
_LEVEL_2 = {
    64: Config(Tile(64, 64, 4), Tile(64, 64, 8, 1), Tile(64, 64, 8, 1)),
    128: Config(Tile(64, 64), Tile(32, 64, 8, 1), Tile(64, 32, 8, 1)),
    256: Config(Tile(64, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
}

# mma.sync takes its operands from registers, so registers limit the size of tiles.
_SM80: Table = {
    "level 0": {
        64: Config(Tile(128, 128, 8, 3), Tile(32, 128, 8, 3), Tile(128, 64, 8, 3)),
        128: Config(Tile(128, 64, 8, 3), Tile(64, 64, 8, 3), Tile(128, 32, 8, 3)),
        256: Config(Tile(64, 64), Tile(32, 64, 8, 3), Tile(64, 32, 8, 3)),
    },
    "level 1": {
        64: Config(Tile(128, 64, 8, 3), Tile(32, 128, 8, 3), Tile(128, 32, 8, 3)),
        128: Config(Tile(128, 64, 8, 3), Tile(32, 64, 8, 3), Tile(64, 64, 8, 3)),
        256: Config(Tile(64, 32, 8, 3), Tile(32, 32, 8, 1), Tile(64, 32, 8, 3)),
    },
    "level 2": _LEVEL_2,
    "float32": _FLOAT32,
}
# sm_86 and sm_89 have the instructions of sm_80, but only 99 KiB of shared memory: wide heads have other tiles, most of
# them smaller or with fewer stages.
_SM86: Table = {
    "level 0": {
        **_SM80["level 0"],
        128: Config(Tile(128, 64, 8, 3), Tile(32, 128, 8, 3), Tile(128, 32, 8, 3)),
        256: Config(Tile(64, 32), Tile(32, 32, 8, 1), Tile(64, 32, 8, 1)),
    },
    "level 1": {
        64: _SM80["level 1"][64],
        128: Config(Tile(128, 64), Tile(32, 64, 8, 3), Tile(64, 64)),
        256: Config(Tile(64, 32), Tile(32, 32, 8, 1), Tile(64, 32, 8, 1)),
    },
    "level 2": _LEVEL_2,
    "float32": _FLOAT32,
}
# At D 64 from sm_90 on: two programs of four warps on a multiprocessor, so that the softmax of one runs beside the
# products of the other. This tile has 8.1 instructions per score on sm_90 (one program of 128×128: 7.1), and 7.4 (7.2)
# on sm_100. Triton's tutorial, timed on such GPUs, uses the same tile.
_TWO_PROGRAMS = Tile(128, 64, 4, 3)
# wgmma reads operands from shared memory, so tiles are larger and have one more stage. At D 128 the forward, 128×128,
# is at the limit of registers: 8.2 instructions per score. dQ would have 8.3 with 128×128, but no memory for a third
# stage.
_SM90: Table = {
    "level 0": {
        64: Config(_TWO_PROGRAMS, Tile(64, 128, 8, 3), Tile(128, 128, 8, 3)),
        128: Config(Tile(128, 128, 8, 3), Tile(64, 128, 8, 3), Tile(128, 64, 8, 3)),
        256: Config(Tile(128, 64), Tile(32, 64, 8, 3), Tile(64, 64)),
    },
    "level 1": {
        64: Config(Tile(128, 64, 8, 3), Tile(64, 64, 8, 3), Tile(128, 64, 8, 3)),
        128: Config(Tile(128, 64, 8, 3), Tile(32, 64, 8, 3), Tile(128, 64, 8, 3)),
        256: Config(Tile(64, 64), Tile(32, 32, 8, 1), Tile(64, 32, 8, 3)),
    },
    "level 2": _LEVEL_2,
    "float32": _FLOAT32,
}
# tcgen05 keeps accumulators in tensor memory; P and dS pass through shared memory on their way there. Where Triton
# 3.7.1 leaves out a proxy fence (dQ, and the forward from level 1 on), a tile has one stage, and no copy runs ahead.
_SM100: Table = {
    "level 0": {
        64: Config(_TWO_PROGRAMS, Tile(64, 128, 8, 3), Tile(128, 128, 8, 1)),
        128: Config(Tile(128, 64, 8, 3), Tile(64, 128, 8, 3), Tile(128, 64, 8, 1)),
        256: Config(Tile(128, 32, 8, 3), Tile(64, 64, 8, 1), Tile(128, 32, 8, 1)),
    },
    "level 1": {
        64: Config(Tile(128, 64, 8, 1), Tile(64, 64, 8, 3), Tile(128, 64, 8, 1)),
        128: Config(Tile(128, 64, 8, 1), Tile(64, 64, 8, 1), Tile(128, 64, 8, 1)),
        256: Config(Tile(64, 64, 8, 1), Tile(32, 32, 8, 1), Tile(64, 32, 8, 1)),
    },
    "level 2": {
        64: Config(Tile(64, 64, 4, 1), Tile(64, 64, 8, 1), Tile(64, 64, 8, 1)),
        128: Config(Tile(64, 64, 8, 1), Tile(32, 64, 8, 1), Tile(64, 32, 8, 1)),
        256: _LEVEL_2[256],
    },
    "float32": _FLOAT32,
}

# sm_120 has the instructions and the memory of sm_86, not of sm_100, but ptxas spills more registers there.
_SM120: Table = {
    **_SM86,
    "level 0": {**_SM86["level 0"], 128: Config(Tile(128, 64, 8, 3), Tile(64, 32, 8, 3), Tile(128, 32, 8, 3))},
    "level 1": {**_SM86["level 1"], 128: Config(Tile(128, 32, 8, 3), Tile(32, 64, 8, 3), Tile(64, 64))},
}

TABLES: dict[int, Table] = {80: _SM80, 86: _SM86, 89: _SM86, 90: _SM90, 100: _SM100, 120: _SM120}

# The tiles of the general kernels that read stored dS, by architecture and largest padded head dimension, at level 0
# with 16 bits; the kernel that stores it has the tile of `backward_kv`. Heads without a tile here compute scores and dP
# twice. Stored dS saves two of dQ's three products, and costs two bytes of memory for each score, which are written and
# read. A product has as many operations for each score as the head has columns, so narrow heads save nothing, nor does
# D 64 on sm_89, whose products are fast beside its memory. On sm_86 and sm_89 at D 128, dK and dV's 32×128 tile leaves
# no memory for dS, and 64×32, which does, needs more instructions in both kernels together than two passes: 57.9 a
# score, not 51.5. This is estimated from data sheets and from compiled code: none of these tiles has run on a GPU.
_STORED_99 = {
    64: {"backward_q_stored": Tile(128, 64, 4, 3)},
    128: {"backward_q_stored": Tile(128, 64, 8, 3)},
    256: {"backward_q_stored": Tile(64, 32, 8, 3)},
}
_STORED = {**_STORED_99, 256: {"backward_q_stored": Tile(128, 64, 8, 3)}}
STORED: dict[int, dict[int, dict[str, Tile]]] = {
    80: {**_STORED_99, 256: {"backward_q_stored": Tile(64, 64, 8, 3)}},
    86: {dim: _STORED_99[dim] for dim in (64, 256)},
    89: {256: _STORED_99[256]},
    90: _STORED,
    100: _STORED,
    120: _STORED_99,
}

# The kernels of hopper/, for level 0 on sm_90: four warps per group, and as many tiles in shared memory as stages. The
# forward's tile at D 128 is FlashAttention-3's for causal problems (its hopper/tile_size.h). At D 64 it has two of
# FlashAttention-3's three groups, and at D 256 the power of two below its 80 keys. The backward's tiles are the largest
# that do not spill (at D 128, twice the size spills 136 bytes in dQ and 112 in dK with dV). dQ uses two tiles of keys
# at a time, so only a third stage can be loaded meanwhile. At D 256 two accumulators need more registers than a group
# has, so its gradients have no such kernels unless dS is stored.
#
# `storing` kernels also store dS, and `stored` kernels read it, in tiles of 128 keys and 64 queries (hopper/stored.py).
# At D 256 a kernel has one accumulator, so dV and dK have a kernel each. These tiles have not run on a GPU.
HOPPER = {
    64: {
        "forward": Tile(128, 128, 4), "backward_kv": Tile(64, 128, 4), "backward_q": Tile(128, 128, 4, 3),
        "backward_kv_storing": Tile(64, 128, 4), "backward_q_stored": Tile(256, 128, 4),
    },
    128: {
        "forward": Tile(128, 128, 4), "backward_kv": Tile(32, 128, 4, 3), "backward_q": Tile(128, 64, 4, 3),
        "backward_kv_storing": Tile(32, 128, 4, 3), "backward_q_stored": Tile(256, 128, 4),
    },
    256: {
        "forward": Tile(128, 64, 4), "backward_v_storing": Tile(32, 128, 4), "backward_k_stored": Tile(64, 128, 4, 4),
        "backward_q_stored": Tile(128, 128, 4),
    },
}  # fmt: skip


FENCES = (3, 7, 1)  # the first release that orders asynchronous copies before products (see ptx.py)


def has_fences(version: str) -> bool:
    """Return whether this version of Triton orders asynchronous copies before products by a proxy fence."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3]) >= FENCES


def refusal(arch: int, version: str | None) -> str:
    """Return why the kernels do not run on sm_`arch` with this version of Triton; "" if they do.

    `version` is None if Triton is not installed.
    """
    if arch // 10 not in {known // 10 for known in SHARED_KIB}:
        return f"the kernels are for {', '.join(f'sm_{known}' for known in SHARED_KIB)}, and this GPU is an sm_{arch}"
    if version is None:
        return "triton is not installed"
    if arch // 10 == 10 and not has_fences(version):
        return (
            f"triton {version} leaves out proxy fences on sm_{arch}, which gives wrong answers; install triton "
            f"{'.'.join(map(str, FENCES))} or later"
        )
    if arch == 103:
        return "triton multiplies two parts of a head dimension wrongly on sm_103 (triton-lang/triton#10821)"
    return ""
