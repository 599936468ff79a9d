"""Compile the kernels for a GPU that is not there, and read what the compiler made of them.

`python -m flashpoint_kernels.triton_backend.aot --arch 90 --dtype bfloat16 --head-dim 128` prints a JSON line a kernel.
It needs a process without TRITON_INTERPRET, and no GPU: ptxas and cuobjdump come inside triton.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flashpoint_kernels.triton_backend.backward import attention_backward_kv, attention_backward_q, attention_delta
from flashpoint_kernels.triton_backend.backward_inputs import attention_backward_mask, attention_backward_sinks
from flashpoint_kernels.triton_backend.config import padded, tiles
from flashpoint_kernels.triton_backend.forward import attention_forward, merge_parts
from flashpoint_kernels.triton_backend.launch import _TYPES

KERNELS = {
    "forward": attention_forward,
    "merge": merge_parts,
    "delta": attention_delta,
    "backward_kv": attention_backward_kv,
    "backward_q": attention_backward_q,
    "backward_mask": attention_backward_mask,
    "backward_sinks": attention_backward_sinks,
}
_POINTERS = {"table": "*i64", "floats": "*fp32", "items": "*i32", "part_o": "*fp32", "part_lse": "*fp32"}


@dataclass(frozen=True)
class Report:
    """What the compiler made of one variant. `spill_bytes` is local memory a thread, 0 where nothing spills."""

    kernel: str
    arch: int
    dtype: str
    head_dim: int
    level: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    atomics: int
    matrix_instructions: tuple[str, ...]


def compile_kernel(
    kernel: str, arch: int, dtype: str, head_dim: int, level: int = 0, mask: str | None = None
) -> Report:
    """Compile one kernel's shipped configuration for sm_`arch` with aligned tensors and Dv = D."""
    config = tiles(arch, dtype, head_dim, head_dim, level)
    tile = {"forward": config.forward, "merge": config.forward, "backward_kv": config.backward_kv}.get(
        kernel, config.backward_q
    )
    function = KERNELS[kernel]
    values: dict[str, Any] = {
        "LEVEL": level, "DTYPE": _TYPES[dtype], "MASK_DTYPE": mask and _TYPES[mask], "DMASK_DTYPE": tl.float32,
        "PRECISION": "ieee", "ALIGNED": True, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
        "BLOCK_D": padded(head_dim), "BLOCK_DV": padded(head_dim), "EVEN": padded(head_dim) == head_dim,
    }  # fmt: skip
    names = function.arg_names
    constants = {(at,): values[name] for at, name in enumerate(names) if name in values}
    signature = {name: "constexpr" if name in values else _POINTERS.get(name, "i32") for name in names}
    aligned: dict[Any, Any] = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if name in _POINTERS}
    source = ASTSource(function, signature, constants, aligned)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    )
    registers, spill_bytes = _resources(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    return Report(
        kernel, arch, dtype, head_dim, level, tile.block_m, tile.block_n, tile.num_warps, tile.num_stages, registers,
        spill_bytes, compiled.metadata.shared, len(re.findall(r"\b(?:atom|red)\.", ptx)),
        tuple(sorted(set(re.findall(r"\b(wgmma\.mma_async|mma\.sync|tcgen05\.mma)", ptx)))),
    )  # fmt: skip


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, local bytes) a thread, as cuobjdump reads them off the binary."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump said nothing of resources: {text}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--level", type=int, default=0, choices=[0, 1, 2])
    parser.add_argument("--mask", choices=["bool", "float16", "bfloat16", "float32"])
    parser.add_argument(
        "--kernels", nargs="+", default=["forward", "delta", "backward_kv", "backward_q"], choices=KERNELS
    )
    asked = parser.parse_args()
    for kernel in asked.kernels:
        report = compile_kernel(kernel, asked.arch, asked.dtype, asked.head_dim, asked.level, asked.mask)
        print(json.dumps(asdict(report)), flush=True)


if __name__ == "__main__":
    main()
