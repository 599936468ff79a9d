"""Compile the kernels for a GPU that is not there, and read what the compiler made of them.

`python -m flashpoint_kernels.triton_backend.aot` compiles what CI does and prints a JSON line a variant; `--arch 90`
all that sm_90 can run. It needs a process without TRITON_INTERPRET, and no GPU: ptxas, cuobjdump and nvdisasm come
inside triton. It exits with 1 where `faults` finds something.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from flashpoint_kernels.triton_backend.backward import attention_backward_kv, attention_backward_q, attention_delta
from flashpoint_kernels.triton_backend.backward_inputs import attention_backward_mask, attention_backward_sinks
from flashpoint_kernels.triton_backend.blocks import list_key_tiles, list_query_tiles
from flashpoint_kernels.triton_backend.calls import compile_options
from flashpoint_kernels.triton_backend.config import keys_kind, padded, tiles
from flashpoint_kernels.triton_backend.configurations import SHARED_KIB, Tile
from flashpoint_kernels.triton_backend.forward import attention_forward, merge_parts
from flashpoint_kernels.triton_backend.groups import Constants
from flashpoint_kernels.triton_backend.hopper.backward import attention_backward_kv_hopper, attention_backward_q_hopper
from flashpoint_kernels.triton_backend.hopper.forward import attention_forward_hopper
from flashpoint_kernels.triton_backend.launch import _TYPES
from flashpoint_kernels.triton_backend.shipped import Variant, all_of, representative

KERNELS = {
    "forward": attention_forward,
    "forward_hopper": attention_forward_hopper,
    "merge": merge_parts,
    "delta": attention_delta,
    "backward_kv": attention_backward_kv,
    "backward_q": attention_backward_q,
    "backward_kv_hopper": attention_backward_kv_hopper,
    "backward_q_hopper": attention_backward_q_hopper,
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
    "part_o": "*fp32",
    "part_lse": "*fp32",
}
MATRIX = {80: "mma.sync", 86: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}
MMA = re.compile(r"\b(HMMA|HGMMA|UTCHMMA)\b")  # as SASS has them
_PRODUCTS = ("forward", "backward_kv", "backward_q")


@dataclass(frozen=True)
class Report:
    """What the compiler made of one variant.

    `spill_bytes` is local memory a thread, 0 where nothing spills; `loop` the instructions of the shortest inner loop
    with a matrix product in it, 0 where there is none; `copies` the copy engine's; `beside` how many exponentials of a
    thread come between a wait that leaves a product under way and the wait for that product, the least of all loops.
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
    beside: int


def tile_of(variant: Variant) -> Tile:
    """The tile that `variant` ships with."""
    kernel, rows = kernel_of(variant)
    arch, dim = variant.arch, variant.head_dim
    paged, quantized = variant.paged, variant.keys is not None
    blocks = variant.kernel.endswith("_blocks") or kernel.startswith("list")
    config = tiles(arch, variant.dtype, dim, dim, variant.level, "hopper" in kernel, paged, quantized, blocks)
    of_blocks = {"forward": config.forward_of, "backward_q": config.backward_q_of, "merge": config.merge_of}
    if kernel in of_blocks:
        return of_blocks[kernel](rows)
    if kernel.startswith("list"):
        return replace(config.forward if kernel == "list_key_tiles" else config.backward_kv, num_warps=1, num_stages=1)
    tiles_of = dict.fromkeys(("delta", "backward_mask", "backward_sinks"), "backward_q")
    tile: Tile = getattr(config, tiles_of.get(kernel, kernel.removesuffix("_hopper")))
    return tile


def kernel_of(variant: Variant) -> tuple[str, int]:
    """The key of KERNELS, and the rows of packed blocks: ("forward", 16) of "forward_packed16_blocks"."""
    kernel, _, rows = variant.kernel.removesuffix("_blocks").partition("_packed")
    return kernel, int(rows or 0)


def compile_variant(variant: Variant, tile: Tile | None = None) -> Report:
    """Compile `variant` with the tile it ships with, or another."""
    _, arch, dtype, dim, level, mask, precision, paged, keys = variant
    kernel, rows = kernel_of(variant)
    tile = tile or tile_of(variant)
    function = KERNELS[kernel]
    constants = Constants(
        LEVEL=level, DTYPE=_TYPES[dtype], MASK_DTYPE=mask and _TYPES[mask], DMASK_DTYPE=tl.float32,
        TF32=precision == "tf32",
        ALIGNED=True, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_D=padded(dim), BLOCK_DV=padded(dim),
        EVEN=padded(dim) == dim, STAGES=tile.num_stages, PACKED=rows > 0,
        PAGED=paged, KEYS=None if keys is None else keys_kind(arch, keys), BLOCKS=variant.kernel.endswith("_blocks"),
    )  # fmt: skip
    names = function.arg_names
    signature = {name: "constexpr" if name == "C" else _POINTERS.get(name, "i32") for name in names}
    aligned: dict[Any, Any] = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if name in _POINTERS}
    made = GluonASTSource if function.is_gluon() else ASTSource
    source = made(function, signature, {(names.index("C"),): constants}, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=compile_options(tile))
    registers, spill_bytes = _resources(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    code, labels = _disassembled(compiled.asm["cubin"])
    return Report(
        *variant, tile.block_m, tile.block_n, tile.num_warps, tile.num_stages, registers, spill_bytes,
        compiled.metadata.shared, len(re.findall(r"\b(?:atom|red)\.", ptx)),
        tuple(sorted(set(re.findall(r"\b(wgmma\.mma_async|mma\.sync|tcgen05\.mma)", ptx)))),
        len(re.findall(r"\bcp\.async\.bulk\.tensor", ptx)), "ttg.warp_specialize" in compiled.asm["ttgir"],
        _loop(code, labels), _beside(code),
    )  # fmt: skip


def faults(report: Report) -> list[str]:
    """What a shipped variant must not be: see docs/kernels.md, "What the compiler makes of the kernels"."""
    half = report.dtype != "float32"
    found = []
    if report.registers > 255:
        found.append(f"{report.registers} registers")
    if report.shared_bytes > SHARED_KIB[report.arch] * 1024:
        found.append(f"{report.shared_bytes} bytes of shared memory")
    if report.atomics:
        found.append(f"{report.atomics} atomics")
    if half and report.level == 0 and report.head_dim <= 128 and report.spill_bytes:
        found.append(f"{report.spill_bytes} bytes spilled")
    kernel = report.kernel.removesuffix("_hopper").removesuffix("_blocks")
    rows, columns = report.block_m, report.block_n
    if kernel == "backward_kv":  # it multiplies the transposed tile
        rows, columns = columns, rows
    if half and kernel in _PRODUCTS and rows >= 64 and MATRIX[report.arch] not in report.matrix_instructions:
        found.append(f"no {MATRIX[report.arch]}, but {', '.join(report.matrix_instructions) or 'nothing'}")
    if report.kernel.endswith("hopper") and not report.copies:
        found.append("no copies by descriptor")
    if report.kernel.endswith("hopper") and not report.specialised:
        found.append("its warps have no roles")
    if report.kernel.endswith("hopper") and report.beside < columns // 2:  # a thread's share of 64 rows of scores
        found.append(f"{report.beside} exponentials beside a product")
    return found


def compile_all(variants: Sequence[Variant], processes: int) -> Iterator[Report]:
    """Reports in the order of `variants`, from a pool of processes of their own."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(compile_variant, variants)


def _tool(name: str, flag: str, cubin: bytes) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, flag, file.name], capture_output=True, text=True, check=True).stdout


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, local bytes) a thread, as cuobjdump reads them off the binary."""
    text = _tool("cuobjdump", "-res-usage", cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump said nothing of resources: {text}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def _disassembled(cubin: bytes) -> tuple[list[str], dict[str, int]]:
    """The instructions, and where among them each label is."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in _tool("nvdisasm", "-c", cubin).splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*)", line):
            code.append(found[1])
    return code, labels


def _loop(code: list[str], labels: dict[str, int]) -> int:
    """Instructions from the target of a backward branch to it, the least that hold a matrix product."""
    lengths = []
    for at, instruction in enumerate(code):
        jump = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", instruction)
        if jump and (start := labels.get(jump[1], at)) < at and any(MMA.search(i) for i in code[start:at]):
            lengths.append(at + 1 - start)
    return min(lengths, default=0)


def _beside(code: list[str]) -> int:
    """Exponentials between a wait that leaves a product under way and the wait for all, the least; 0 without such."""
    counts = []
    stretch: list[str] | None = None
    for instruction in code:
        if wait := re.search(r"\bWARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)", instruction):
            if wait[1] != "0":
                stretch = stretch or []
            elif stretch is not None:
                counts.append(sum("MUFU.EX2" in i for i in stretch))
                stretch = None
        elif stretch is not None:
            stretch.append(instruction)
    return min(counts, default=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", choices=SHARED_KIB, help="all that these can run")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    variants = [v for arch in asked.arch for v in all_of(arch)] if asked.arch else representative()
    wrong = 0
    for report in compile_all(variants, asked.processes):
        print(json.dumps({**asdict(report), "faults": faults(report)}), flush=True)
        wrong += bool(faults(report))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
