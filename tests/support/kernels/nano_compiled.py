"""Compile nano.py for absent GPUs and print a JSON line for each. Run it as a program, without TRITON_INTERPRET."""

import json
import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flashpoint_kernels.nano import nano_forward, tile_rows
from flashpoint_kernels.triton_backend.host.config import padded
from flashpoint_kernels.triton_backend.host.configurations import SHARED_KIB
from flashpoint_kernels.triton_backend.tools.sass import resources

POINTERS = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32"}
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}


def compiled(arch: int, dtype: str, head_dim: int, causal: bool) -> dict[str, object]:
    rows = tile_rows(SHARED_KIB[arch], head_dim, ITEMSIZE[dtype])
    names = nano_forward.arg_names
    constants = {"CAUSAL": causal, "BLOCK": rows, "D": padded(head_dim)}
    types = dict.fromkeys(("q", "k", "v", "o"), POINTERS[dtype]) | {"lse": "*fp32", "scale": "fp32"}
    source = ASTSource(
        nano_forward,
        {name: "constexpr" if name in constants else types.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        # As at a launch, the addresses of torch's memory and `dim` are multiples of 16.
        {(names.index(name),): [["tt.divisibility", 16]] for name in ("q", "k", "v", "o", "lse", "dim")},
    )
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 8, "num_stages": 2})
    registers, spilled = resources(binary.asm["cubin"])
    return {
        "arch": arch, "dtype": dtype, "head_dim": head_dim, "rows": rows, "shared_bytes": binary.metadata.shared,
        "registers": registers, "spilled": spilled,
        "matrix": sorted(set(re.findall(r"\b(wgmma\.mma_async|mma\.sync)", binary.asm["ptx"]))),
    }  # fmt: skip


if __name__ == "__main__":
    for arch in (80, 90):
        for dtype, head_dim, causal in (("bfloat16", 128, True), ("float32", 64, False)):
            print(json.dumps(compiled(arch, dtype, head_dim, causal)), flush=True)
