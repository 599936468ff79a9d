"""The forward in C and its conversions are exact for each instruction set and dtype; Python finds the library."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashpoint_kernels import attention, native, quantize
from flashpoint_kernels.native import build, switches
from tests.support.kernels.problems import Sizes, problems
from tests.support.kernels.serving import in_pages
from tests.support.kernels.solving import check, normal, qkv

F8 = torch.float8_e4m3fn


def test_this_machine_has_a_compiler_and_the_kernels() -> None:
    """This machine has a compiler and the kernels; otherwise the other tests here prove nothing."""
    assert build.compiler() is not None
    assert native.library() is not None


SIZES = Sizes(
    q_len=st.sampled_from([1, 2, 3, 5, 9, 40]), kv_len=st.sampled_from([1, 31, 100, 257, 700, 1024, 1025, 2100]),
    dim=st.sampled_from([1, 16, 40, 64, 111, 256]), value_dim=st.sampled_from([5, 16, 64, 144]),
    group=st.sampled_from([1, 2, 3, 4, 7]),
)  # fmt: skip


@given(problem=problems(SIZES, backward=False, windows=((-1, -1), (0, 0), (63, -1), (1023, 5), (5, 600))))
@settings(max_examples=60, deadline=None)
def test_any_problem_agrees_with_float64(problem: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    tensors, options = problem
    check("cpu", tensors, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [1, 2, 4, 6])
def test_each_instruction_set_is_exact(level: str, dtype: torch.dtype, group: int) -> None:
    for q_len, dim in ((1, 64), (3, 80), (7, 160)):
        t = {n: x for n, x in qkv(2, 2 * group, q_len, 1700, dim, kv_heads=2, dtype=dtype).items() if n != "do"}
        check(
            "cpu", t | {"alibi_slopes": normal(2 * group).abs() / 64}, causal=True, window=(1200, -1), return_lse=True
        )
        check("cpu", t, scale=3.0, softcap=4.0, return_lse=True)


@pytest.mark.parametrize("kind", [torch.int8, F8])
@pytest.mark.parametrize("scaled", ["rows", "heads", "number"])
@pytest.mark.parametrize("page", [0, 16, 100])
def test_8_bit_keys_are_read_as_they_are(level: str, kind: torch.dtype, scaled: str, page: int) -> None:
    t = {n: x for n, x in qkv(2, 6, 2, 700, 48, kv_heads=2).items() if n != "do"}
    for name in "kv":
        t[name], t[f"{name}_scale"] = quantize(t[name], kind)
        if scaled != "rows":
            t[f"{name}_scale"] = t[f"{name}_scale"].amax(-1) if scaled == "heads" else torch.tensor(0.02)
    if page:
        t["kv_lengths"] = torch.tensor([700, 650])
        t = in_pages(t, "bhsd", page)
    check("cpu", t, return_lse=True)


def one_key(v: Tensor, q_dtype: torch.dtype, scale: float | None = None) -> Tensor:
    """Return o of n queries that each see only the last of 512 keys, whose value is a row of v (n, Dv)."""
    n, dim = v.shape
    values = torch.zeros(n, 1, 512, dim).to(v.dtype)
    values[:, 0, -1] = v
    t = {"q": torch.zeros(n, 1, 1, dim, dtype=q_dtype), "k": torch.zeros_like(values), "v": values}
    if scale is not None:
        t |= {name: torch.tensor(scale) for name in ("k_scale", "v_scale")}
    return attention(**t, window=(0, 0))[:, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_number_comes_back(level: str, dtype: torch.dtype) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).view(-1, 256)
    actual = one_key(every, dtype)
    if level in switches.BFLOAT16 and dtype == torch.bfloat16:  # these treat subnormal numbers as 0
        every = every.where(~(every.abs() < torch.finfo(dtype).smallest_normal), 0)
    assert torch.equal(actual.isnan(), every.isnan())
    assert torch.equal(actual.nan_to_num(0.0, torch.inf, -torch.inf), every.nan_to_num(0.0, torch.inf, -torch.inf))


@pytest.mark.parametrize("kind", [torch.int8, F8])
def test_every_8_bit_number_is_read(level: str, kind: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.int32).to(torch.int8).view(kind).view(-1, 16)
    actual = one_key(every, torch.float32, 0.25)
    expected = every.float() * 0.25
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_answers_are_rounded_to_nearest_even(level: str, dtype: torch.dtype) -> None:
    """Products of int8 values and a scale, from subnormal to infinite, are rounded to nearest, and ties to even."""
    numbers = torch.arange(-128, 128, dtype=torch.int8).view(-1, 16)
    for power in range(-34, 18):
        scale = 2.0**power * (1 + 2.0**-9 + 2.0**-12)
        actual, exact = one_key(numbers, dtype, scale), numbers.float() * scale
        if level in switches.BFLOAT16 and dtype == torch.bfloat16:  # these round a probability times a scale
            exact = numbers.float() * torch.tensor(scale).to(dtype).float()
        assert torch.equal(actual, exact.to(dtype)), power


def test_keys_that_no_query_sees_are_not_read() -> None:
    t = {n: x for n, x in qkv(1, 4, 2, 1500, 32, kv_heads=2).items() if n != "do"}
    expected = attention(**t, causal=True, window=(700, 0))
    for name in "kv":
        t[name][:, :, : 1500 - 702] = torch.nan
    assert torch.equal(attention(**t, causal=True, window=(700, 0)), expected)


@pytest.mark.slow
def test_lanes_of_four_are_exact(lanes_of_four: native.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generic kernels, with vectors of four floats for processors other than x86-64, are exact."""
    monkeypatch.setattr(native, "library", lambda: lanes_of_four)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for group in (1, 2, 5):
            t = {n: x for n, x in qkv(1, 2 * group, 3, 1100, 48, kv_heads=2, dtype=dtype).items() if n != "do"}
            check("cpu", t, causal=True, return_lse=True)
            check(
                "cpu",
                qkv(1, 2 * group, 66, 70, 40, kv_heads=2, dtype=dtype),
                causal=True,
                dropout_p=0.3,
                dropout_seed=1,
            )
    test_every_16_bit_number_comes_back("narrow", torch.float16)
    test_every_8_bit_number_is_read("narrow", F8)
    test_every_8_bit_number_is_read("narrow", torch.int8)
