"""Block masks in tiles are right: drawn ones, and every pair of options."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpoint_kernels import Options, verify
from tests.support.kernels.serving import dense_mask, drawn_blocks
from tests.support.kernels.solving import backward, forward, normal, qkv
from tests.support.kernels.triton_cases import name_of, options_of, pairs, tensors_of


@st.composite
def problems(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], tuple[int, int], dict[str, Any]]:
    size = draw(st.sampled_from([(16, 16), (32, 16), (48, 80), (128, 128), (144, 272), (1024, 64)]))
    q_len, kv_len = draw(st.integers(1, 300)), draw(st.integers(0, 300))
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (2, 2)]))
    tensors = qkv(2, kv_heads * group, q_len, kv_len, 8, kv_heads=kv_heads, seed=draw(st.integers(0, 99)))
    lead = draw(st.sampled_from([(), (1,), (kv_heads * group,), (2, 1), (2, kv_heads * group)]))
    blocks = (-(-n // m) for n, m in zip((q_len, kv_len), size, strict=True))
    tensors["block_mask"] = drawn_blocks(
        *lead, *blocks, seed=draw(st.integers(0, 99)), share=draw(st.sampled_from([0.1, 0.6]))
    )
    if draw(st.booleans()):
        tensors["kv_lengths"] = torch.tensor([kv_len, draw(st.integers(0, kv_len))])
    if draw(st.booleans()):
        tensors["q_lengths"] = torch.tensor([draw(st.integers(0, q_len)), q_len])
    options = draw(st.sampled_from([{}, {"causal": True}, {"window": (60, 5)}, {"softcap": 2.0}]))
    return tensors, size, options


@pytest.mark.slow
@given(problem=problems())
@settings(max_examples=60, deadline=None)
def test_any_blocks_in_tiles(problem: Any) -> None:
    """Forward and backward equal float64 with the dense mask."""
    tensors, size, options = problem
    report = verify(tensors, Options(block_size=size, backend="tiled", **options))
    assert report.ok, "\n".join(str(t) for t in report.tensors if not t.ok)
    whole = dict(tensors)
    blocks = whole.pop("block_mask")
    whole["attn_mask"] = dense_mask(blocks, size, tensors["q"].shape[2], tensors["k"].shape[2])
    for of in (forward, backward):
        expected = of("reference", whole, **options)
        for name, t in of("reference", tensors, block_size=size, **options).items():
            assert torch.equal(t, expected[name]), name


CASES = [case for case in pairs() if case["blocks"]]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_pair_of_options_in_tiles(case: dict[str, Any]) -> None:
    report = verify(tensors_of(case, 150, 170), replace(options_of(case), backend="tiled"))
    assert report.ok, "\n".join(str(t) for t in report.tensors if not t.ok)


def test_a_float_masks_gradient_is_zero_in_blocks_that_are_skipped() -> None:
    tensors = qkv(2, 2, 130, 140, 8)
    tensors["block_mask"] = drawn_blocks(2, 2, 2, 2, share=0.5)
    for shape in ((2, 2, 130, 140), (1, 1, 130, 140)):
        tensors["attn_mask"] = normal(*shape)
        options = Options(backend="tiled", grads=("dattn_mask", "dq"))
        assert verify(tensors, options).ok
