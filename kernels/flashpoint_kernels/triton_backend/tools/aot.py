"""Compile the kernels for a GPU that this machine does not have, and measure what the compiler produced.

`python -m flashpoint_kernels.triton_backend.tools.aot` compiles the variants of CI and prints a JSON line for each
variant; `--arch 90` compiles all variants of sm_90. It needs no GPU: ptxas, cuobjdump and nvdisasm are part of Triton.
TRITON_INTERPRET must not be set. The exit code is 1 if `faults` finds a fault.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from flashpoint_kernels.triton_backend.hopper.backward import attention_backward_kv_hopper, attention_backward_q_hopper
from flashpoint_kernels.triton_backend.hopper.forward import attention_forward_hopper
from flashpoint_kernels.triton_backend.hopper.stored import attention_backward_q_stored_hopper
from flashpoint_kernels.triton_backend.hopper.wide import (
    attention_backward_k_stored_hopper,
    attention_backward_v_hopper,
)
from flashpoint_kernels.triton_backend.host.calls import compile_options
from flashpoint_kernels.triton_backend.host.config import (
    carries_float32,
    gradient_parts_of,
    keys_kind,
    padded,
    parts_of,
    reloads,
    stores,
    tiles,
)
from flashpoint_kernels.triton_backend.host.configurations import SHARED_KIB, Tile
from flashpoint_kernels.triton_backend.host.route import TYPES
from flashpoint_kernels.triton_backend.kernels.backward import (
    attention_backward_kv,
    attention_backward_q,
    attention_delta,
)
from flashpoint_kernels.triton_backend.kernels.backward_inputs import attention_backward_mask, attention_backward_sinks
from flashpoint_kernels.triton_backend.kernels.blocks import list_key_tiles, list_query_tiles
from flashpoint_kernels.triton_backend.kernels.cascade import attention_cascade
from flashpoint_kernels.triton_backend.kernels.forward import attention_forward, merge_parts
from flashpoint_kernels.triton_backend.kernels.groups import Constants
from flashpoint_kernels.triton_backend.kernels.stored import attention_backward_q_stored
from flashpoint_kernels.triton_backend.tools.ptx import Ptx
from flashpoint_kernels.triton_backend.tools.sass import Code, kinds, resources
from flashpoint_kernels.triton_backend.tools.shipped import Variant, all_of, representative

KERNELS = {
    "forward": attention_forward,
    "cascade": attention_cascade,
    "forward_hopper": attention_forward_hopper,
    "forward_two_sets_hopper": attention_forward_hopper,
    "merge": merge_parts,
    "delta": attention_delta,
    "backward_kv": attention_backward_kv,
    "backward_q": attention_backward_q,
    "backward_kv_storing": attention_backward_kv,
    "backward_q_stored": attention_backward_q_stored,
    "backward_kv_hopper": attention_backward_kv_hopper,
    "backward_q_hopper": attention_backward_q_hopper,
    "backward_kv_storing_hopper": attention_backward_kv_hopper,
    "backward_v_storing_hopper": attention_backward_v_hopper,
    "backward_k_stored_hopper": attention_backward_k_stored_hopper,
    "backward_q_stored_hopper": attention_backward_q_stored_hopper,
    "backward_mask": attention_backward_mask,
    "backward_sinks": attention_backward_sinks,
    "list_key_tiles": list_key_tiles,
    "list_query_tiles": list_query_tiles,
}
_POINTERS = {
    "table": "*i64",
    "floats": "*fp32",
    "items": "*i32",
    "lists": "*i32",
    "members": "*i32",
    "part_o": "*fp32",
    "part_lse": "*fp32",
}
MATRIX = {80: "mma.sync", 86: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}
_FORWARDS = ("forward", "cascade")
_STORED = ("backward_kv_storing", "backward_v_storing", "backward_k_stored", "backward_q_stored")
_PRODUCTS = (*_FORWARDS, "forward_two_sets", "backward_kv", "backward_q", *_STORED)
# How many tiles of a tensor one iteration of a kernel for Hopper reads, each from one stage of shared memory. Meanwhile
# the other stages of its two tensors are loaded. An iteration of the kernel for dQ reads two tiles of keys.
HELD = {"forward_hopper": 1, "forward_two_sets_hopper": 1, "backward_q_hopper": 2}
HELD |= {f"{name}_hopper": 1 for name in ("backward_kv", *_STORED)}


@dataclass(frozen=True)
class Report:
    """The compiler's result for one variant.

    - `spill_bytes`: local memory of a thread; 0 without spills.
    - `copies`: instructions that start a copy by the copy engine (TMA).
    - `loop`: instructions in the shortest inner loop with a matrix product; 0 without such a loop.
    - `loop_spills`: the most loads and stores of spilled registers in an inner loop with a matrix product.
    - `beside`: the fewest exponentials between a wait that leaves a wgmma product running and the wait for all
      products; 0 without such waits.
    - `ahead`: the fewest asynchronous copies that are under way at a matrix product of a loop. A copy is of one tile,
      or of the tile's row statistics. For kernels for Hopper it is derived from `num_stages` (see HELD).
    - `unfenced`: matrix instructions that read a copied tile without a proxy fence (see ptx.py).
    - `hazards`: instructions that write registers of a product that may still be running (see sass.py).
    """

    kernel: str
    arch: int
    dtype: str
    head_dim: int
    level: int
    mask: str | None
    precision: str
    paged: bool
    keys: str | None
    value_dim: int | None
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    atomics: int
    matrix_instructions: tuple[str, ...]
    copies: int
    specialised: bool
    loop: int
    loop_spills: int
    beside: int
    ahead: int
    unfenced: int
    hazards: int


def tile_of(variant: Variant) -> Tile:
    """Return the default tile of `variant`: the tile that dispatch uses."""
    kernel, rows = kernel_of(variant)
    arch, dim = variant.arch, variant.head_dim
    paged, quantized = variant.paged, variant.keys is not None
    blocks = variant.kernel.endswith("_blocks") or kernel.startswith("list")
    config = tiles(
        arch, variant.dtype, dim, variant.value_dim or dim, variant.level, "hopper" in kernel, paged, quantized, blocks
    )
    of_blocks = {
        "forward": config.forward_of, "cascade": config.forward_of, "backward_q": config.backward_q_of,
        "merge": config.merge_of,
    }  # fmt: skip
    if kernel in of_blocks:
        return of_blocks[kernel](rows)
    if kernel.startswith("list"):
        return replace(config.forward if kernel == "list_key_tiles" else config.backward_kv, num_warps=1, num_stages=1)
    tiles_of = dict.fromkeys(("delta", "backward_mask", "backward_sinks"), "backward_q")
    tile: Tile = getattr(config, tiles_of.get(kernel, _name_of_tile(kernel)))
    return tile


def kernel_of(variant: Variant) -> tuple[str, int]:
    """Return (key in KERNELS, rows of packed blocks or 0): ("forward", 16) for "forward_packed16_blocks"."""
    kernel, _, rows = variant.kernel.removesuffix("_blocks").partition("_packed")
    return kernel, int(rows or 0)


def _name_of_tile(kernel: str) -> str:
    """Return the name in `Config` of the tile of a kernel for Hopper."""
    return kernel.removesuffix("_hopper").removesuffix("_two_sets")


def compile_variant(variant: Variant, tile: Tile | None = None) -> Report:
    """Compile `variant` with `tile`, or with its default tile."""
    tile = tile or tile_of(variant)
    compiled = build(variant, tile)
    registers, spill_bytes = resources(compiled.asm["cubin"])
    text, code = compiled.asm["ptx"], Code(compiled.asm["cubin"])
    ptx = Ptx(text)
    held = HELD.get(variant.kernel)
    ahead = ptx.loads_ahead() if held is None else 2 * (tile.num_stages - held)
    return Report(
        *variant, tile.block_m, tile.block_n, tile.num_warps, tile.num_stages, registers, spill_bytes,
        compiled.metadata.shared, len(re.findall(r"\b(?:atom|red)\.", text)),
        tuple(sorted(set(re.findall(r"\b(wgmma\.mma_async|mma\.sync|tcgen05\.mma)", text)))),
        len(re.findall(r"\bcp\.async\.bulk\.tensor", text)), "ttg.warp_specialize" in compiled.asm["ttgir"],
        len(code.shortest_loop()), max((kinds(loop)["spilled"] for loop in code.loops()), default=0), code.beside(),
        ahead, ptx.missing_fences(), len(code.hazards()),
    )  # fmt: skip


def build(variant: Variant, tile: Tile) -> Any:
    """Return Triton's compiled kernel of a variant with a tile."""
    _, arch, dtype, dim, level, mask, precision, paged, keys, value_dim = variant
    value_dim = value_dim or dim
    kernel, rows = kernel_of(variant)
    function, hopper = KERNELS[kernel], kernel.endswith("_hopper")
    of_gradients = kernel in ("backward_kv", "backward_q", "backward_mask", "backward_kv_storing", "backward_q_stored")
    (block_d, block_rest), (block_dv, block_dv_rest) = (padded(dim), 0), (padded(value_dim), 0)
    if kernel in _FORWARDS:
        block_d, block_rest = parts_of(dim)
    elif of_gradients:
        (block_d, block_rest), (block_dv, block_dv_rest) = gradient_parts_of(dim), gradient_parts_of(value_dim)
    of_general = {"STORE_DS": True} if kernel.endswith("_storing") else {}
    even = (block_d + block_rest, block_dv + block_dv_rest) == (dim, value_dim)
    constants = Constants(
        LEVEL=level, DTYPE=TYPES[dtype], MASK_DTYPE=mask and TYPES[mask], DMASK_DTYPE=tl.float32,
        TF32=precision == "tf32",
        ALIGNED=True, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_D=block_d, BLOCK_REST=block_rest,
        BLOCK_DV=block_dv, BLOCK_DV_REST=block_dv_rest, EVEN=even, STAGES=tile.num_stages,
        RELOAD=of_gradients and reloads(dtype, dim, value_dim), PACKED=rows > 0,
        CARRY_FLOAT32=carries_float32(_name_of_tile(kernel), block_d, padded(value_dim)) if hopper else None,
        TWO_SETS="two_sets" in kernel if hopper and kernel.startswith("forward") else None,
        PAGED=paged, KEYS=None if keys is None else keys_kind(arch, keys), BLOCKS=variant.kernel.endswith("_blocks"),
        **(stores(kernel.removesuffix("_hopper"), block_d, block_dv) if hopper else of_general),
    )  # fmt: skip
    names = function.arg_names
    signature = {name: "constexpr" if name == "C" else _POINTERS.get(name, "i32") for name in names}
    aligned: dict[Any, Any] = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if name in _POINTERS}
    made = GluonASTSource if function.is_gluon() else ASTSource
    source = made(function, signature, {(names.index("C"),): constants}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=compile_options(tile))


def faults(report: Report) -> list[str]:
    """Return the faults that a shipped variant must not have: see docs/compiled.md."""
    half, hopper = report.dtype != "float32", report.kernel.endswith("hopper")
    kernel = report.kernel.removesuffix("_hopper").removesuffix("_blocks")
    rows, columns = report.block_m, report.block_n
    if kernel.startswith(("backward_kv", "backward_v")):  # these kernels multiply the transposed tile
        rows, columns = columns, rows
    scores = not kernel.endswith("_stored")  # these kernels read dS, and have no exponentials
    unspilled = half and report.level == 0 and report.head_dim <= 128
    product, found = MATRIX[report.arch], report.matrix_instructions
    loads_ahead = report.num_stages > (3 if report.paged else 1)  # see config._of_pages
    pipelined = _is_plain(report) and kernel.partition("_packed")[0] in _PRODUCTS and loads_ahead
    checks = (
        (report.registers > 255, f"{report.registers} registers"),
        (report.shared_bytes > SHARED_KIB[report.arch] * 1024, f"{report.shared_bytes} bytes of shared memory"),
        (report.atomics, f"{report.atomics} atomics"),
        (unspilled and report.loop_spills, f"{report.loop_spills} spills in a loop"),
        (
            unspilled and report.spill_bytes and not (report.loop or report.loop_spills),
            f"{report.spill_bytes} bytes spilled",
        ),
        (report.unfenced, f"{report.unfenced} tiles read without a proxy fence"),
        (report.hazards, f"{report.hazards} writes to registers of a running product"),
        (
            half and kernel in _PRODUCTS and rows >= 64 and product not in found,
            f"no {product}, but {', '.join(found) or 'nothing'}",
        ),
        (pipelined and not report.ahead, "no tile is loaded while another is used"),
        (hopper and not report.copies, "no copies by descriptor"),
        (hopper and not report.specialised, "its warps have no roles"),
        # A thread has columns // 2 scores: the 128 threads of four warps compute 64 rows.
        (hopper and scores and report.beside < columns // 2, f"{report.beside} exponentials beside a product"),
    )
    return [fault for wrong, fault in checks if wrong]


def _is_plain(report: Report) -> bool:
    """Return whether Triton can prefetch tiles: 16 bits, level 0, D 32, 64 or 128, no 8-bit keys and no block mask."""
    plain = report.keys is None and not report.kernel.endswith("_blocks")
    return plain and report.dtype != "float32" and report.level == 0 and report.head_dim in (32, 64, 128)


def compile_all(variants: Sequence[Variant], processes: int) -> Iterator[Report]:
    """Yield reports in the order of `variants`, compiled in a pool of child processes."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(compile_variant, variants)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", choices=SHARED_KIB, help="compile all their variants")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    variants = [v for arch in arguments.arch for v in all_of(arch)] if arguments.arch else representative()
    wrong = 0
    for report in compile_all(variants, arguments.processes):
        print(json.dumps({**asdict(report), "faults": faults(report)}), flush=True)
        wrong += bool(faults(report))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
