"""A step of training frees its tensors when it ends, without Python's collector, for every differentiable function."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from flashpoint_kernels import attention, attention_backward, flash_attn, flex_attention, merge
from flashpoint_kernels import scaled_dot_product_attention as sdpa
from tests.conftest import DEVICE

HEADS, LENGTH, COLUMNS = 4, 96, 64
ENDS = torch.tensor([0, 40, LENGTH], dtype=torch.int32, device=DEVICE)


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.float32, requires_grad=True)


def leaves(*shape: int, n: int = 3) -> list[Tensor]:
    return [leaf(*(shape or (1, HEADS, LENGTH, COLUMNS))) for _ in range(n)]


def squares(*answers: Tensor) -> Tensor:
    """Return a loss whose gradients have all strides as the answers, for o and lse alike."""
    return torch.stack([t.square().sum() for t in answers]).sum()


def through_lse(**options: Any) -> Tensor:
    return squares(*attention(*leaves(), **options, return_lse=True))


def packed(**options: Any) -> Any:
    return attention(*leaves(LENGTH, HEADS, COLUMNS), layout="thd", cu_seqlens_q=ENDS, cu_seqlens_k=ENDS, **options)


def merged() -> Tensor:
    q, k, v = leaves()
    parts = [attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(40), slice(40, None))]
    return squares(*merge([o for o, _ in parts], [lse for _, lse in parts]))


def biased() -> Tensor:
    bias = leaf(LENGTH)
    return flex_attention(*leaves(), score_mod=lambda s, b, h, i, j: s + bias[j]).sum()


def gradients_alone(**more: Any) -> Tensor:
    do, q, k, v = (t.detach() for t in leaves(n=4))
    return squares(*attention_backward(do[:, :, :, :1].expand_as(q), q, k, v, **more)).requires_grad_()


STEPS: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: attention(*leaves()).square().sum(),
    "plain, from a sum": lambda: attention(*leaves()).sum(),
    "bshd": lambda: squares(attention(*leaves(1, LENGTH, HEADS, COLUMNS), layout="bshd", causal=True)),
    "through lse": through_lse,
    "through lse, z-loss": lambda: attention(*leaves(), return_lse=True)[1].square().mean(),
    "offset": lambda: attention(*leaves(), causal=True, offset=0).sum(),
    "offset, squares": lambda: through_lse(causal=True, offset=torch.tensor([3], device=DEVICE)),
    "thd": lambda: packed().square().sum(),
    "thd, from a sum": lambda: packed(causal=True).sum(),
    "lengths": lambda: through_lse(kv_lengths=[50], q_lengths=[90]),
    "mask, sinks": lambda: squares(attention(*leaves(), attn_mask=leaf(LENGTH, LENGTH), sinks=leaf(HEADS))),
    "mask, from a sum": lambda: attention(*leaves(), attn_mask=leaf(LENGTH)).sum(),
    "slopes, softcap, window": lambda: through_lse(
        alibi_slopes=torch.ones(HEADS, device=DEVICE), softcap=9.0, window=(9, 0)
    ),
    "dropout": lambda: through_lse(dropout_p=0.1),
    "blocks": lambda: through_lse(
        block_mask=torch.ones(1, 1, 6, 6, dtype=torch.bool, device=DEVICE), block_size=(16, 16)
    ),
    "tiled": lambda: through_lse(backend="tiled"),
    "reference": lambda: through_lse(backend="reference"),
    "merge": merged,
    "attention_backward": gradients_alone,
    "attention_backward, offset": lambda: gradients_alone(causal=True, offset=0),
    "sdpa": lambda: sdpa(*leaves(), is_causal=True).sum(),
    "sdpa, mask": lambda: sdpa(*leaves(), leaf(LENGTH, LENGTH)).square().sum(),
    "flex_attention": lambda: squares(*flex_attention(*leaves(), return_lse=True)),
    "flex_attention, captured": biased,
    "flash_attn": lambda: flash_attn.flash_attn_qkvpacked_func(leaf(1, LENGTH, 3, HEADS, COLUMNS), causal=True).sum(),
    "flash_attn, lse": lambda: squares(
        *flash_attn.flash_attn_func(*leaves(1, LENGTH, HEADS, COLUMNS), return_attn_probs=True)[:2]
    ),
    "flash_attn, varlen": lambda: flash_attn.flash_attn_varlen_func(
        *leaves(LENGTH, HEADS, COLUMNS), ENDS, ENDS, 56, 56
    ).sum(),
}


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    """Turn Python's collector off, so that only reference counts free a graph."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def tensors() -> int:
    return sum(issubclass(type(one), Tensor) for one in gc.get_objects())


@pytest.mark.parametrize("name", STEPS)
def test_no_tensor_outlives_its_step(name: str) -> None:
    for _ in range(2):  # what is kept for the next call, as tables and prepared calls, is made here
        STEPS[name]().backward()
    before = tensors()
    for _ in range(3):
        STEPS[name]().backward()
    assert tensors() == before


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_memory_stays_over_200_steps(name: str) -> None:
    """Each step has more than 0.5 MB of tensors, of which none may stay."""
    process = psutil.Process()
    for _ in range(10):
        STEPS[name]().backward()
    before = process.memory_info().rss
    for _ in range(200):
        STEPS[name]().backward()
    assert process.memory_info().rss - before < 48 << 20
