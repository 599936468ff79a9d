"""The recorded compile reports match the shipped tiles. Where a Triton omits proxy fences, tiles have one stage."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from flashpoint_kernels.triton_backend.host.configurations import SHARED_KIB, STORED, TABLES
from flashpoint_kernels.triton_backend.tools.aot import Report, faults, tile_of
from flashpoint_kernels.triton_backend.tools.shipped import HEAD_DIMS, Variant, all_of

RESULTS = Path(__file__).parents[4] / "benchmarks" / "results"


@pytest.mark.parametrize("arch", TABLES)
def test_the_findings_are_of_the_tiles_that_ship_and_all_fit(arch: int) -> None:
    actual = json.loads((RESULTS / f"compile-sm{arch}.json").read_text())["kernels"]
    names = [field.name for field in fields(Report)]
    reports = [Report(**{name: kernel[name] for name in names}) for kernel in actual]
    variants = [Variant(*(getattr(report, name) for name in Variant._fields)) for report in reports]
    # `backward_sinks` is always compiled for float32, so its dtype says nothing about the other kernels.
    dtypes = list(dict.fromkeys(variant.dtype for variant in variants if variant.kernel != "backward_sinks"))
    assert "bfloat16" in dtypes  # float16 has the same tiles; float32's tiles are equal on every chip
    assert variants == all_of(arch, dtypes), "run make compile-all"
    for report, variant in zip(reports, variants, strict=True):
        tile = tile_of(variant)
        shipped = (tile.block_m, tile.block_n, tile.num_warps, tile.num_stages)
        found_with = (report.block_m, report.block_n, report.num_warps, report.num_stages)
        assert shipped == found_with, f"{variant}: run make compile-all"
        assert report.shared_bytes <= SHARED_KIB[arch] * 1024
        assert faults(replace(report, matrix_instructions=tuple(report.matrix_instructions))) == []


@pytest.mark.parametrize("arch", TABLES)
def test_stored_ds_needs_fewer_instructions_than_two_passes(arch: int) -> None:
    """In the recorded loops of dK and dV together with dQ, for each score, at every D whose dS is stored."""
    found = json.loads((RESULTS / f"compile-sm{arch}.json").read_text())["kernels"]
    each = {
        (k["kernel"], k["head_dim"]): k["loop"] * k["num_warps"] / (k["block_m"] * k["block_n"])
        for k in found
        if (k["dtype"], k["level"], k["value_dim"]) == ("bfloat16", 0, None)
    }
    stored = [dim for dim in HEAD_DIMS if ("backward_q_stored", dim) in each]
    assert stored == [dim for dim in HEAD_DIMS if dim in STORED[arch]]
    for dim in stored:
        through_ds = each["backward_kv_storing", dim] + each["backward_q_stored", dim]
        assert through_ds < each["backward_kv", dim] + each["backward_q", dim], dim


@pytest.mark.parametrize("version", ["3.6.0", "3.7.0", "3.7.1", "3.10.0+git1234"])
def test_before_triton_3_7_1_no_product_of_sm_90_reads_an_asynchronous_copy(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Triton before 3.7.1, tiles of 64 rows or more, which use wgmma on sm_90, have one stage.

    A tile of one stage uses no asynchronous copies, which need a fence. Tiles with fewer rows, and those of the path
    for Hopper, may have several stages.
    """
    monkeypatch.setattr("triton.__version__", version)
    old = version in ("3.6.0", "3.7.0")
    several = 0
    for variant in all_of(90):
        tile = tile_of(variant)
        rows = tile.block_n if variant.kernel.startswith("backward_kv") else tile.block_m
        if variant.kernel.startswith(("merge", "delta", "backward_mask", "backward_sinks")):
            continue
        if rows >= 64 and not variant.kernel.endswith("_hopper"):
            assert tile.num_stages == 1 or not old, variant
        several += tile.num_stages > 1
    assert several > 0
    assert tile_of(Variant("forward_packed16", 90, "bfloat16", 128)).num_stages == 3
    assert tile_of(Variant("forward", 90, "bfloat16", 128)).num_stages == (1 if old else 3)
    assert tile_of(Variant("backward_q_hopper", 90, "bfloat16", 128)).num_stages == 3
