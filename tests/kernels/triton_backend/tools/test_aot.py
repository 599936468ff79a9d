"""The kernels compile for absent GPUs: no spills in the fast variants, no atomics, the right instructions.

They compile in separate processes, without the interpreter. `make test` compiles one kernel, `make test-all` one
of each kernel and each architecture, `make test-full` all representative variants, and `make compile-all` all
variants. `make compile-all` writes its reports to benchmarks/results/; a test checks that they match the tiles in use.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from flashpoint_kernels.triton_backend.host.configurations import TABLES
from flashpoint_kernels.triton_backend.tools.aot import Report, faults
from flashpoint_kernels.triton_backend.tools.shipped import Variant, representative

FINE = Report(
    "forward", 90, "bfloat16", 128, 0, None, "ieee", False, None, None, 128, 64, 8, 3, 255, 0, 227 * 1024, 0,
    ("wgmma.mma_async",), 0,
    False, 400, 0, 0, 2, 0, 0,
)  # fmt: skip


# A kernel of the path for Hopper, which Gluon compiles; test_ahead.py compiles a kernel of the general path.
ONE = [Variant("forward_hopper", 90, "bfloat16", 64)]
COMPILE = """
import json, sys
from dataclasses import asdict
from flashpoint_kernels.triton_backend.tools.aot import compile_variant, faults
from flashpoint_kernels.triton_backend.tools.shipped import Variant

for variant in json.loads(sys.argv[1]):
    report = compile_variant(Variant(*variant))
    print(json.dumps({**asdict(report), "faults": faults(report)}))
"""

FLOATS = """
import json, sys
from collections import Counter
from flashpoint_kernels.triton_backend.tools.aot import build, tile_of
from flashpoint_kernels.triton_backend.tools.sass import Code
from flashpoint_kernels.triton_backend.tools.shipped import Variant

names = ("FFMA", "FMUL", "FADD", "FMNMX", "MUFU", "HMMA", "F2FP", "I2F", "HADD2")
for variant in (Variant(*variant) for variant in json.loads(sys.argv[1])):
    loop = Code(build(variant, tile_of(variant)).asm["cubin"]).shortest_loop()
    words = Counter(word.partition(".")[0] for instruction in loop for word in instruction.split()[:2])
    print(json.dumps({name: words[name] for name in names}))
"""


def one_of_each() -> list[Variant]:
    """Return the first representative variant of each architecture and each kernel that `ONE` does not have."""
    representatives: dict[object, Variant] = {known: one for one in ONE for known in (one.arch, one.kernel)}
    for variant in representative():
        representatives.setdefault(variant.arch, variant)
        representatives.setdefault(variant.kernel, variant)
    return [variant for variant in dict.fromkeys(representatives.values()) if variant not in ONE]


def compiled(*command: str) -> list[dict[str, Any]]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=3600, check=False)
    assert run.stdout, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def assert_without_faults(reports: list[dict[str, Any]], variants: list[Variant]) -> None:
    """Check that the reports are those of `variants`, in order, and that none has a fault (`aot.faults`)."""
    assert [tuple(report[name] for name in Variant._fields) for report in reports] == variants
    assert [report for report in reports if report["faults"]] == []


@pytest.mark.parametrize(
    "variants", [pytest.param(ONE, id="one"), pytest.param(one_of_each(), marks=pytest.mark.slow, id="one of each")]
)
def test_what_is_compiled_is_without_faults(variants: list[Variant]) -> None:
    assert_without_faults(compiled("-c", COMPILE, json.dumps(variants)), variants)


@pytest.mark.full
def test_what_stands_for_all_variants_is_without_faults() -> None:
    assert {variant.arch for variant in representative()} == set(TABLES)
    assert_without_faults(compiled("-m", "flashpoint_kernels.triton_backend.tools.aot"), representative())


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"registers": 256}, "256 registers"),
        ({"shared_bytes": 227 * 1024 + 1}, "232449 bytes of shared memory"),
        ({"atomics": 1}, "1 atomics"),
        ({"spill_bytes": 8, "loop_spills": 2}, "2 spills in a loop"),
        ({"spill_bytes": 8, "loop": 0}, "8 bytes spilled"),
        ({"matrix_instructions": ("mma.sync",)}, "no wgmma.mma_async, but mma.sync"),
        ({"unfenced": 2}, "2 tiles read without a proxy fence"),
        ({"hazards": 1}, "1 writes to registers of a running product"),
        ({"num_stages": 2, "ahead": 0}, "no tile is loaded while another is used"),
        ({"paged": True, "num_stages": 5, "ahead": 0}, "no tile is loaded while another is used"),
        ({"arch": 100}, "no tcgen05.mma, but wgmma.mma_async"),
        ({"kernel": "backward_q_hopper", "specialised": True, "beside": 32}, "no copies by descriptor"),
        ({"kernel": "forward_hopper", "copies": 4, "beside": 32}, "its warps have no roles"),
        (
            {"kernel": "forward_hopper", "copies": 4, "specialised": True, "beside": 31},
            "31 exponentials beside a product",
        ),
    ],
)
def test_each_fault_is_found(change: dict[str, Any], fault: str) -> None:
    assert faults(FINE) == []
    assert faults(replace(FINE, **change)) == [fault]
    assert faults(replace(FINE, head_dim=256, spill_bytes=8, loop_spills=2)) == []  # such a wide head may spill
    assert faults(replace(FINE, spill_bytes=8)) == []  # a spill outside a loop is allowed
    assert faults(replace(FINE, num_stages=1, ahead=0)) == []  # a tile of one stage loads nothing ahead
    assert faults(replace(FINE, paged=True, num_stages=3, ahead=0)) == []  # the other two load page numbers
    assert faults(replace(FINE, block_m=32, matrix_instructions=("mma.sync",))) == []


@pytest.mark.slow
def test_a_part_for_several_sequences_has_the_arithmetic_of_one_alone() -> None:
    """`forward_packed16` and `cascade_packed16` round equally on a GPU: their loops have equal float instructions."""
    kinds = [("bfloat16", 0, None), ("float16", 1, None), ("bfloat16", 0, "int8")]
    alone, shared = (
        compiled("-c", FLOATS, json.dumps([Variant(kernel, 90, dtype, 128, level, paged=True, keys=keys)
                                           for dtype, level, keys in kinds]))
        for kernel in ("forward_packed16", "cascade_packed16")
    )  # fmt: skip
    assert shared == alone
    assert all(loop["HMMA"] and loop["FFMA"] for loop in alone)
