"""The tile loop is right for random block masks, and for block masks with every pair of options."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpoint_kernels import Options, verify
from tests.support.kernels.problems import Sizes, problems
from tests.support.kernels.serving import dense_mask, drawn_blocks
from tests.support.kernels.solving import backward, check, forward, normal, qkv
from tests.support.kernels.triton_cases import name_of, options_of, pairs, tensors_of

SIZES = Sizes(
    q_len=st.integers(1, 300), kv_len=st.integers(0, 300), dim=st.just(8), value_dim=st.just(8),
    batch=st.integers(1, 2), kv_heads=st.integers(1, 2), group=st.integers(1, 2),
)  # fmt: skip
with_blocks = problems(
    SIZES, backward=True, layouts=("bhsd", "bshd"), masks=("",), dropout=(0.0,), windows=((-1, -1), (60, 5)),
    block_sizes=((16, 16), (32, 16), (48, 80), (128, 128), (144, 272), (1024, 64)),
)  # fmt: skip


@pytest.mark.slow
@given(problem=with_blocks)
@settings(max_examples=50, deadline=None)
def test_any_blocks_in_tiles(problem: Any) -> None:
    """`tiled` is right for random block masks, and the reference gives the same bits with the equal dense mask."""
    tensors, options = problem
    check("tiled", tensors, **options)
    whole = dict(tensors)
    lengths = (tensors[name].shape[2 if options["layout"] == "bhsd" else 1] for name in "qk")
    whole["attn_mask"] = dense_mask(whole.pop("block_mask"), options["block_size"], *lengths)
    for of in (forward, backward):
        expected = of("reference", whole, **options)
        for name, t in of("reference", tensors, **options).items():
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
