"""The kernels compile for GPUs that are not here: no spills in the fast variants, no atomics, the right instructions.

In processes of their own, without the interpreter. One process an architecture and dtype; all are started before the
first is waited for.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

MODULE = "flashpoint_kernels.triton_backend.aot"
BACKWARD = ["delta", "backward_kv", "backward_q"]


def _start(*arguments: str) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", MODULE, *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _reports(process: subprocess.Popen[str]) -> list[dict[str, object]]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return [json.loads(line) for line in out.splitlines()]


@pytest.fixture(scope="module")
def fast_variants() -> Iterator[list[dict[str, object]]]:
    """Level 0, bfloat16, D 64 and 128, sm_80 and sm_90: what serves most requests."""
    found = []
    for arch in ("80", "90"):
        pair = [
            _start("--arch", arch, "--head-dim", d, "--kernels", "forward", *BACKWARD, "merge") for d in ("64", "128")
        ]
        found += [report for process in pair for report in _reports(process)]
    return found


def test_fast_variants_spill_nothing_and_fit(fast_variants: list[dict[str, object]]) -> None:
    assert len(fast_variants) == 20
    shared_limit = {80: 163 * 1024, 90: 227 * 1024}
    for report in fast_variants:
        assert report["spill_bytes"] == 0, report
        assert report["registers"] <= 255, report
        assert report["shared_bytes"] <= shared_limit[report["arch"]], report


def test_matrix_instructions(fast_variants: list[dict[str, object]]) -> None:
    for report in fast_variants:
        if report["kernel"] in ("forward", "backward_kv", "backward_q"):
            expected = "wgmma.mma_async" if report["arch"] == 90 else "mma.sync"
            assert report["matrix_instructions"] == [expected], report


def test_no_atomics_in_any_kernel_with_every_option(fast_variants: list[dict[str, object]]) -> None:
    kernels = ["forward", *BACKWARD, "backward_mask", "backward_sinks"]
    every = _start("--arch", "90", "--head-dim", "64", "--level", "2", "--mask", "float32", "--kernels", *kernels)
    reports = _reports(every)
    assert [report["kernel"] for report in reports] == kernels
    for report in [*fast_variants, *reports]:
        assert report["atomics"] == 0, report


def test_the_widest_heads_fit_the_chips_with_the_least_shared_memory() -> None:
    reports = _reports(_start("--arch", "89", "--head-dim", "256", "--kernels", "forward", *BACKWARD))
    assert len(reports) == 4
    for report in reports:
        assert report["shared_bytes"] <= 99 * 1024, report


def test_float32_and_a_padded_head_dimension_compile() -> None:
    pair = [
        _start("--arch", "90", "--dtype", "float32", "--head-dim", "64", "--kernels", "forward", *BACKWARD),
        _start(
            "--arch", "80", "--dtype", "float16", "--head-dim", "80", "--level", "1", "--kernels", "forward", *BACKWARD
        ),
    ]
    assert [len(_reports(process)) for process in pair] == [4, 4]
