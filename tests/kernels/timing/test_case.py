"""FLOPs and bytes of cases equal counts by hand; cases and presets are checked without torch."""

import itertools
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from flashpoint_kernels import ProblemError
from flashpoint_kernels.timing import PRESETS, Case, Timing, grid, preset
from flashpoint_kernels.timing.case import ALGORITHMS, flops, moved_bytes, pairs, standard_flops

CASE = Case(backend="naive", batch=2, q_heads=6, kv_heads=2, q_len=10, kv_len=16, head_dim=8, value_dim=4)


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (5, 5), (3, 7), (7, 3), (1, 9), (9, 1)])
def test_seen_pairs_are_those_of_the_mask(q_len: int, kv_len: int) -> None:
    case = replace(CASE, q_len=q_len, kv_len=kv_len, causal=True)
    seen = torch.ones(q_len, kv_len).tril(kv_len - q_len).sum()
    assert pairs(case, seen=True) == 2 * 6 * int(seen)
    assert pairs(case) == pairs(replace(case, causal=False), seen=True) == 2 * 6 * q_len * kv_len


def test_products_are_those_of_the_papers() -> None:
    square = replace(CASE, head_dim=4)
    per_pair = {name: flops(name, square) / (pairs(square) * 4) for name in ALGORITHMS}
    assert per_pair == {
        "flash_forward": 4, "naive_forward": 4, "naive_backward": 8, "explicit_backward": 8, "fused_backward": 10,
        "two_pass_backward": 14,
    }  # fmt: skip
    assert flops("fused_backward", CASE) == 2 * pairs(CASE) * (3 * 8 + 2 * 4)


def test_only_what_skips_hidden_pairs_does_less_when_causal() -> None:
    causal = replace(CASE, kv_len=10, causal=True)
    assert flops("flash_forward", causal) == 2 * (2 * 6 * 55) * (8 + 4)
    assert flops("naive_forward", causal) == 2 * (2 * 6 * 100) * (8 + 4)


def test_bytes_are_each_tensor_once_and_the_matrix_at_every_pass() -> None:
    q, k, v, o = 2 * 6 * 10 * 8, 2 * 2 * 16 * 8, 2 * 2 * 16 * 4, 2 * 6 * 10 * 4
    lse, matrix = 2 * 6 * 10 * 4, 2 * 6 * 10 * 16
    half = replace(CASE, dtype="float16")
    assert moved_bytes("flash_forward", half) == 2 * (q + k + v + o) + lse
    assert moved_bytes("naive_forward", half) == 2 * (q + k + v + o + 6 * matrix)
    assert moved_bytes("naive_forward", replace(half, causal=True)) == 2 * (q + k + v + o + 8 * matrix)
    assert moved_bytes("fused_backward", half) == 2 * (2 * (q + k + v) + 2 * o) + lse
    assert moved_bytes("two_pass_backward", half) == 2 * (3 * (q + k + v) + 3 * o) + 2 * lse
    assert moved_bytes("flash_forward", replace(CASE, dtype="float32")) == 4 * (q + k + v + o) + lse


def test_the_standard_count() -> None:
    case = Case(backend="naive", batch=4, q_heads=8, q_len=4096, head_dim=64)
    forward = 4 * 4 * 8 * 4096**2 * 64
    assert standard_flops(case) == forward
    assert standard_flops(replace(case, causal=True)) == forward // 2
    assert standard_flops(replace(case, direction="backward")) == 5 * forward // 2
    assert standard_flops(replace(case, direction="both", causal=True)) == 7 * forward // 4


def test_a_case_names_every_field_that_is_wrong() -> None:
    with pytest.raises(ProblemError) as refused:
        Case(backend="fast", batch=0, q_heads=3, q_len=1, head_dim=577, dtype="float64", direction="up")  # type: ignore[arg-type]
    assert {name for name, _ in refused.value.errors} == {
        "backend", "batch", "head_dim", "value_dim", "dtype", "direction",
    }  # fmt: skip
    with pytest.raises(ProblemError, match="kv_heads"):
        replace(CASE, kv_heads=4)
    with pytest.raises(ProblemError) as refused:
        Timing(precision=0, max_seconds=float("nan"), warmup_ms=-1, min_repeats=3, max_repeats=2)
    assert {name for name, _ in refused.value.errors} == {"precision", "max_seconds", "warmup_ms", "min_repeats"}


def test_a_grid_is_every_combination_with_backends_varying_fastest() -> None:
    shapes = [{"batch": 1, "q_heads": 2, "q_len": n, "head_dim": 16} for n in (8, 16)]
    cases = grid(shapes, backends=["torch", "naive"], causal=[False, True], directions=["forward", "both"])
    assert len(cases) == len(set(cases)) == 16
    assert [case.backend for case in cases] == ["torch", "naive"] * 8
    assert [case.q_len for case in cases] == [8] * 8 + [16] * 8


def test_presets_are_the_published_ones() -> None:
    assert set(PRESETS) == {"papers", "h100", "seeds"}
    assert preset("seeds", "cpu") == preset("papers", "cpu")

    def shapes(device: str) -> set[tuple[object, ...]]:
        cases = preset("papers", device)
        return {(c.batch, c.q_heads, c.q_len, c.head_dim, c.dtype, c.causal, c.direction) for c in cases}

    small = {(1, 1, 512, 32, "float32", False, way) for way in ("forward", "backward")}
    memory = {(1, 8, 2048, 64, "float16", True, way) for way in ("forward", "backward")}
    lengths = {(4, 8, 128 << n, 64, "bfloat16", False, way) for n in range(6) for way in ("forward", "backward")}
    assert shapes("cuda") == small | memory | lengths
    assert shapes("cpu") == {(*case[:4], "float32", *case[5:]) for case in small | memory | lengths}
    for case in preset("h100", "cuda:0"):
        assert case.batch * case.q_len == 16384
        assert case.q_heads * case.head_dim == 2048
    assert "triton" in {case.backend for case in preset("h100", "cuda")}
    assert "triton" not in {case.backend for case in preset("papers", "cpu")}
    for name, device in itertools.product(PRESETS, ("cpu", "cuda")):  # what is always skipped
        assert ("naive_explicit", "forward") not in {(case.backend, case.direction) for case in preset(name, device)}
        assert ("naive_explicit", "backward") in {(case.backend, case.direction) for case in preset(name, device)}
    with pytest.raises(ProblemError, match="preset"):
        preset("a100")


def test_a_grid_is_made_and_priced_without_torch() -> None:
    program = (
        "import sys; from flashpoint_kernels.timing import preset; from flashpoint_kernels.timing.case import flops;"
        "print(sum(flops('fused_backward', case) for case in preset('papers')) > 0, 'torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["True", "False"]
