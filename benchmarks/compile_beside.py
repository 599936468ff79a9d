"""Compile our inner loops and those of Triton's tutorial on fused attention in one run. Needs no GPU.

`benchmarks/compile.py --beside FILE --beside-commit HASH` calls this module with python/tutorials/06-fused-attention.py
of triton-lang/triton, which is not part of this project. Writes one row for each loop to
benchmarks/results/loops-sm<arch>.json.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import re
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from record import write_compiled
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flashpoint_kernels.triton_backend.host.configurations import Tile
from flashpoint_kernels.triton_backend.tools.aot import build, tile_of
from flashpoint_kernels.triton_backend.tools.sass import Code, kinds, resources
from flashpoint_kernels.triton_backend.tools.shipped import Variant

ARCHITECTURES = (80, 90, 100)
HEAD_DIMS = (64, 128)
DTYPE = "float16"  # the dtype of the tutorial
OURS = ("forward", "backward_kv", "backward_q", "forward_packed16")
OF_HOPPER = ("forward_hopper", "backward_kv_hopper", "backward_q_hopper")
# Resources of a GPU multiprocessor: KiB of shared memory (a program uses 1 KiB more than it requests), registers,
# threads, and columns of the tensor memory of tcgen05.
SHARED_KIB = {80: 164, 90: 228, 100: 228}
REGISTERS, THREADS, TENSOR_COLUMNS = 65536, 2048, 512
SERIALISED = "wgmma.mma_async instructions are serialized"  # a warning of ptxas
# The tutorial selects the tile of its forward by timing on the device. Here we take tiles from its list, and count the
# one with the fewest instructions per score and no spills in the loop. The tutorial's backward has one tile for dK and
# dV, and one for dQ.
FORWARD = tuple(Tile(128, n, w, s) for n, w, s in ((32, 4, 3), (64, 4, 3), (64, 8, 3), (128, 8, 2)))  # fmt: skip
BACKWARD_KV, BACKWARD_Q = Tile(32, 128, 4, 5), Tile(128, 32, 4, 5)


class Tutorial(NamedTuple):
    """One of the tutorial's two kernels."""

    kernel: str
    arch: int
    head_dim: int
    tile: Tile


def write(arch: int, tutorial: Path, its_commit: str, out: Path, processes: int) -> None:
    """Compile the kernels of an architecture, and write the instructions of their loops."""
    ours = [Variant(name, arch, DTYPE, dim)
            for dim, name in product(HEAD_DIMS, (*OURS, *(OF_HOPPER if arch == 90 else ())))]  # fmt: skip
    theirs = [Tutorial("forward", arch, dim, tile) for dim, tile in product(HEAD_DIMS, FORWARD) if tile.block_n <= dim]
    theirs += [Tutorial("backward", arch, dim, BACKWARD_KV) for dim in HEAD_DIMS]
    with ProcessPoolExecutor(processes, get_context("spawn"), _begin, (tutorial, arch)) as pool:
        rows = [row for of_kernel in pool.map(_rows, [*ours, *theirs]) for row in of_kernel]
    for dim in HEAD_DIMS:
        forwards = [r for r in rows if (r["by"], r["kernel"], r["head_dim"]) == ("tutorial", "forward", dim)]
        best = min(forwards, key=lambda r: (r["instructions"]["spilled"] > 0, r["per_score"]))
        rows = [r for r in rows if r is best or r not in forwards]
    beside = {"commit": its_commit, "sha256": hashlib.sha256(tutorial.read_bytes()).hexdigest()}
    loops = sorted(rows, key=lambda r: (r["head_dim"], r["kernel"].split("_hopper")[0], r["by"]))
    write_compiled(out / f"loops-sm{arch}.json", beside=beside, loops=loops)


_tutorial: Any = None


def _begin(path: Path, arch: int) -> None:
    """Import the tutorial in this process. Its import queries a device, so a mock replaces the driver."""
    global _tutorial
    driver = mock.Mock()
    driver.get_current_target.return_value = GPUTarget("cuda", arch, 32)
    triton.runtime.driver.set_active(driver)
    triton.knobs.compilation.always_compile = True  # Triton's cache does not contain the log of ptxas
    triton.knobs.nvidia.dump_ptxas_log = True
    spec = importlib.util.spec_from_file_location("tutorial", path)
    assert spec is not None
    assert spec.loader is not None
    _tutorial = importlib.util.module_from_spec(spec)
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=divmod(arch, 10)):
        spec.loader.exec_module(_tutorial)


def _rows(wanted: Variant | Tutorial) -> list[dict[str, Any]]:
    """Return a row for each loop of a kernel. The tutorial's backward kernel has two loops: dK with dV, then dQ."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if isinstance(wanted, Variant):
            tile = tile_of(wanted)
            built = build(wanted, tile)
            of_loops = [(wanted.kernel, tile)]
        else:
            built = _build(wanted)
            forward = wanted.kernel == "forward"
            of_loops = (
                [("forward", wanted.tile)] if forward else [("backward_kv", BACKWARD_KV), ("backward_q", BACKWARD_Q)]
            )
    code = Code(built.asm["cubin"])
    loops = code.loops()[:2] if len(of_loops) == 2 else [code.shortest_loop()]  # without loops that test causality
    registers, spill_bytes = resources(built.asm["cubin"])
    rows = []
    for (kernel, tile), loop in zip(of_loops, loops, strict=True):
        halves = 2 if kernel.endswith("hopper") else 1  # two groups of warps share a tile
        counts = kinds(loop)
        row = {
            "kernel": kernel, "by": "flashpoint" if isinstance(wanted, Variant) else "tutorial",
            "head_dim": wanted.head_dim, "block_m": tile.block_m, "block_n": tile.block_n,
            "num_warps": tile.num_warps, "num_stages": tile.num_stages,
            "registers": registers, "spill_bytes": spill_bytes, "shared_bytes": built.metadata.shared,
            "programs": _programs(built, wanted.arch, registers), "instructions": counts,
            "per_score": len(loop) * 32 * tile.num_warps * halves / (tile.block_m * tile.block_n),
            "beside": code.beside(), "serialised": SERIALISED in printed.getvalue(),
        }  # fmt: skip
        if "packed" in kernel:
            row["per_byte"] = len(loop) * tile.num_warps / (tile.block_n * 2 * wanted.head_dim * 2)
        rows.append(row)
    return rows


def _programs(built: Any, arch: int, registers: int) -> int:
    """Return the number of programs that a multiprocessor holds at once."""
    match = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", built.asm["ptx"])
    assert match is not None
    threads = int(match[1])
    warps_by_registers = REGISTERS // (-(-registers * 32 // 256) * 256)
    limits = [
        THREADS // threads,
        warps_by_registers // (threads // 32),
        SHARED_KIB[arch] * 1024 // (built.metadata.shared + 1024),
    ]
    if columns := getattr(built.metadata, "tmem_size", 0):
        limits.append(TENSOR_COLUMNS // columns)
    return min(limits)


def _build(wanted: Tutorial) -> Any:
    """Compile a kernel of the tutorial for attention without a causal mask."""
    tile, dim = wanted.tile, wanted.head_dim
    if wanted.kernel == "forward":
        function = _tutorial._attn_fwd.fn
        constants = {"HEAD_DIM": dim, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "FP8_OUTPUT": False,
                     "STAGE": 1, "warp_specialize": False, "IS_HOPPER": wanted.arch == 90}  # fmt: skip
        types = {"sm_scale": "fp32", "M": "*fp32"}
        for name, rows in (("q", tile.block_m), ("k", tile.block_n), ("v", tile.block_n), ("o", tile.block_m)):
            described = f"tensordesc<fp16[{rows}, {dim}]>" if wanted.arch >= 90 else "*fp16"
            types[f"desc_{name}"] = described
    else:
        function = _tutorial._attn_bwd
        constants = {"BLOCK_M1": BACKWARD_KV.block_m, "BLOCK_N1": BACKWARD_KV.block_n, "BLOCK_M2": BACKWARD_Q.block_m,
                     "BLOCK_N2": BACKWARD_Q.block_n, "BLK_SLICE_FACTOR": 2, "HEAD_DIM": dim, "CAUSAL": False,
                     "stride_d": 1}  # fmt: skip
        types = dict.fromkeys(("Q", "K", "V", "DO", "DQ", "DK", "DV"), "*fp16")
        types |= {"M": "*fp32", "D": "*fp32", "sm_scale": "fp32"}
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned: dict[Any, Any] = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(names)
        if signature[name].startswith("*") or name in ("N_CTX", "stride_z", "stride_h", "stride_tok")
    }
    source = ASTSource(function, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", wanted.arch, 32), options=options)
