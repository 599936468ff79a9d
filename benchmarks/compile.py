"""Compile every variant of the kernels for GPUs that this machine lacks, and record properties of the compiled code.

Writes benchmarks/results/compile-sm<arch>.json with versions, commit and date (`make compile-all`): registers, spilled
bytes, shared memory, instructions, matrix instructions, atomics. Takes minutes and needs no GPU. docs/compiled.md has
the tables. `--missing` compiles only variants that the file lacks or has with another tile; the file records a commit
for each variant. Exits with 1 if a variant has a fault (`aot.faults`).

`--beside FILE --beside-commit HASH` instead compiles the inner loops of our kernels at level 0, the variant without
options, and those of Triton's tutorial on fused attention: FILE is python/tutorials/06-fused-attention.py of
triton-lang/triton, which is not part of this project.
Writes one row for each loop to benchmarks/results/loops-sm<arch>.json.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import io
import json
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "contract"), str(ROOT / "kernels")]
os.environ.pop("TRITON_INTERPRET", None)  # if set when kernels are defined, they cannot be compiled

import torch  # noqa: E402
import triton  # noqa: E402
from record import commit, write_compiled  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from flashpoint_kernels.triton_backend.host.configurations import SHARED_KIB, TABLES, Tile  # noqa: E402
from flashpoint_kernels.triton_backend.tools.aot import build, compile_all, faults, tile_of  # noqa: E402
from flashpoint_kernels.triton_backend.tools.sass import Code, kinds, resources  # noqa: E402
from flashpoint_kernels.triton_backend.tools.shipped import DTYPES, Variant, all_of  # noqa: E402

ARCHITECTURES = (80, 90, 100)
HEAD_DIMS = (64, 128)
DTYPE = "float16"  # the dtype of the tutorial
OURS = ("forward", "backward_kv", "backward_q", "forward_packed16")
OF_HOPPER = ("forward_hopper", "backward_kv_hopper", "backward_q_hopper")
# Resources of a GPU multiprocessor: registers, threads, and columns of the tensor memory of tcgen05.
REGISTERS, THREADS, TENSOR_COLUMNS = 65536, 2048, 512
SERIALISED = "wgmma.mma_async instructions are serialized"  # a warning of ptxas
# The tutorial selects its forward tile by timing on a device. Without a device, this program compiles these tiles of
# the tutorial's list, and records the one with no spills in the loop and the fewest instructions per score. The
# tutorial's backward has one tile for dK and dV, and one for dQ.
FORWARD = tuple(Tile(128, n, w, s) for n, w, s in ((32, 4, 3), (64, 4, 3), (64, 8, 3), (128, 8, 2)))  # fmt: skip
BACKWARD_KV, BACKWARD_Q = Tile(32, 128, 4, 5), Tile(128, 32, 4, 5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=list(TABLES), choices=TABLES, help="90 for sm_90")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--missing", action="store_true", help="compile only variants and tiles that the file lacks")
    parser.add_argument("--beside", type=Path, help="a copy of triton's python/tutorials/06-fused-attention.py")
    parser.add_argument("--beside-commit", help="the commit of triton that the copy comes from")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.beside:
        if not args.beside_commit:
            parser.error("--beside needs --beside-commit")
        for arch in set(args.arch) & set(ARCHITECTURES):
            write_loops(arch, args.beside, args.beside_commit, args.out, args.processes)
        return 0
    fault_count = 0
    for arch in args.arch:
        path = args.out / f"compile-sm{arch}.json"
        variants = all_of(arch, args.dtypes)
        known = read_reports(path) if args.missing else {}
        due = [variant for variant in variants if (variant, tile_of(variant)) not in known]
        for variant, report in zip(due, compile_all(due, args.processes), strict=True):
            known[variant, tile_of(variant)] = {**asdict(report), "commit": commit()}
            for fault in faults(report):
                fault_count += 1
                print(f"sm_{arch} {report.kernel} {report.dtype} D {report.head_dim} level {report.level}: {fault}")
        write_compiled(path, kernels=[known[variant, tile_of(variant)] for variant in variants])
    return 1 if fault_count else 0


def read_reports(path: Path) -> dict[tuple[Variant, Tile], dict[str, Any]]:
    """Return the reports in compile-sm<arch>.json at `path`, by the variant and tile that each describes."""
    reports = {}
    for report in json.loads(path.read_text())["kernels"]:
        variant = Variant(**{name: report[name] for name in Variant._fields})
        tile = Tile(*(report[name] for name in ("block_m", "block_n", "num_warps", "num_stages")))
        reports[variant, tile] = report
    return reports


# The author of a kernel, "flashpoint" or "tutorial", the kernel, and its tile. The tutorial's kernels are "forward" and
# "backward".
Job = tuple[str, Variant, Tile]


def write_loops(arch: int, tutorial: Path, its_commit: str, out: Path, processes: int) -> None:
    """Compile our kernels and the tutorial's for `arch`, and write their loops' instruction counts to a JSON file."""
    jobs: list[Job] = []
    for dim in HEAD_DIMS:
        ours = [Variant(name, arch, DTYPE, dim) for name in (*OURS, *(OF_HOPPER if arch == 90 else ()))]
        jobs += [("flashpoint", variant, tile_of(variant)) for variant in ours]
        forward, backward = (Variant(name, arch, DTYPE, dim) for name in ("forward", "backward"))
        jobs += [("tutorial", forward, tile) for tile in FORWARD if tile.block_n <= dim]
        jobs.append(("tutorial", backward, BACKWARD_KV))
    with ProcessPoolExecutor(processes, get_context("spawn"), _begin, (tutorial, arch)) as pool:
        rows = [row for of_kernel in pool.map(_rows, jobs) for row in of_kernel]
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


def _rows(job: Job) -> list[dict[str, Any]]:
    """Return a row for each loop of a kernel. The tutorial's backward kernel has two loops: dK with dV, then dQ."""
    by, variant, tile = job
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        built = build(variant, tile) if by == "flashpoint" else _build(variant, tile)
    both = [("backward_kv", BACKWARD_KV), ("backward_q", BACKWARD_Q)]
    of_loops = both if variant.kernel == "backward" else [(variant.kernel, tile)]
    code = Code(built.asm["cubin"])
    # A kernel may have more loops, which also test causality. They are longer, or come later, and are not counted.
    loops = code.loops()[:2] if len(of_loops) == 2 else [code.shortest_loop()]
    registers, spill_bytes = resources(built.asm["cubin"])
    rows = []
    for (kernel, tile), loop in zip(of_loops, loops, strict=True):
        halves = 2 if kernel.endswith("hopper") else 1  # two groups of `num_warps` warps share a Hopper tile
        counts = kinds(loop)
        row = {
            "kernel": kernel, "by": by,
            "head_dim": variant.head_dim, "block_m": tile.block_m, "block_n": tile.block_n,
            "num_warps": tile.num_warps, "num_stages": tile.num_stages,
            "registers": registers, "spill_bytes": spill_bytes, "shared_bytes": built.metadata.shared,
            "programs": _programs(built, variant.arch, registers), "instructions": counts,
            "per_score": len(loop) * 32 * tile.num_warps * halves / (tile.block_m * tile.block_n),
            "beside": code.beside(), "serialised": SERIALISED in printed.getvalue(),
        }  # fmt: skip
        if "packed" in kernel:
            row["per_byte"] = len(loop) * tile.num_warps / (tile.block_n * 2 * variant.head_dim * 2)
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
        (SHARED_KIB[arch] + 1) * 1024 // (built.metadata.shared + 1024),  # CUDA reserves 1 KiB for each program
    ]
    if columns := getattr(built.metadata, "tmem_size", 0):
        limits.append(TENSOR_COLUMNS // columns)
    return min(limits)


def _build(variant: Variant, tile: Tile) -> Any:
    """Compile a kernel of the tutorial for attention without a causal mask."""
    dim = variant.head_dim
    if variant.kernel == "forward":
        function = _tutorial._attn_fwd.fn
        constants = {"HEAD_DIM": dim, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "FP8_OUTPUT": False,
                     "STAGE": 1, "warp_specialize": False, "IS_HOPPER": variant.arch == 90}  # fmt: skip
        types = {"sm_scale": "fp32", "M": "*fp32"}
        for name, rows in (("q", tile.block_m), ("k", tile.block_n), ("v", tile.block_n), ("o", tile.block_m)):
            described = f"tensordesc<fp16[{rows}, {dim}]>" if variant.arch >= 90 else "*fp16"
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
    return triton.compile(source, target=GPUTarget("cuda", variant.arch, 32), options=options)


if __name__ == "__main__":
    sys.exit(main())
