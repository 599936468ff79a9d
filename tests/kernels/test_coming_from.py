"""The tables of docs/coming-from.md are right: translated calls equal the functions or formulas of other libraries."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from flashpoint_kernels import ProblemError, attention, flex_attention, merge
from tests.conftest import DEVICE
from tests.support.kernels.solving import normal

Q, K, V = normal(2, 4, 5, 16), normal(2, 2, 9, 16, seed=1), normal(2, 2, 9, 16, seed=2)
ROWS, KEYS = torch.arange(5, device=DEVICE)[:, None], torch.arange(9, device=DEVICE)
SLOPES = torch.tensor([0.1, 0.2, 0.3, 0.4], device=DEVICE)
TOP_LEFT = {"causal_alignment": "top_left"}

# For masks of other libraries: the options of `attention`, and the visible keys according to that library's source.
MASKS: dict[str, tuple[dict[str, Any], Tensor]] = {
    "torch and JAX is_causal, xformers LowerTriangularMask, flex q >= kv": ({"causal": True, **TOP_LEFT}, KEYS <= ROWS),
    "flash-attn and FlashInfer causal": ({"causal": True}, KEYS <= ROWS + 4),
    "flex q - kv <= w": ({"causal": True, "window": (2, 0), **TOP_LEFT}, (ROWS >= KEYS) & (ROWS - KEYS <= 2)),
    "xformers local causal, n = 3": (
        {"causal": True, "window": (2, 0)},
        torch.ones(5, 9, device=DEVICE).tril(4).triu(4 - 3 + 1).bool(),
    ),
    "xformers LocalAttentionFromBottomRightMask(1, 2)": (
        {"window": (1, 2)}, (ROWS - 1 <= KEYS + 5 - 9) & (KEYS + 5 - 9 <= ROWS + 2),
    ),
    "FlashInfer window_left=2": ({"window": (2, -1)}, KEYS + 5 + 2 >= 9 + ROWS),
    "JAX local_window_size=(2, 1)": ({"window": (2, 1), **TOP_LEFT}, (KEYS >= ROWS - 2) & (KEYS <= ROWS + 1)),
    "flash-attn 4 (None, -2)": ({"window": (-1, 0), "offset": 4 - 2}, KEYS <= ROWS + 4 - 2),
    "flash-attn 4 (-2, None)": ({"window": (0, -1), "offset": 4 + 2}, KEYS >= ROWS + 4 + 2),
    "attention_chunk=3": ({"attn_mask": ROWS // 3 == KEYS // 3}, ROWS // 3 == KEYS // 3),
}  # fmt: skip


def exact(mask: Tensor | None = None, bias: Tensor | float = 0.0) -> Tensor:
    """Return o of Q, K and V, computed in float64; o is 0 for a query that sees no key."""
    k, v = (t.repeat_interleave(2, 1).double() for t in (K, V))
    scores = Q.double() @ k.mT / 4 + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(-1).nan_to_num() @ v


def same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    options, mask = MASKS[name]
    same(attention(Q, K, V, **options), exact(mask))


def test_alibi_of_flash_attn_signed_alibi_and_the_score_mod() -> None:
    slopes = SLOPES[:, None, None]
    same(attention(Q, K, V, alibi_slopes=SLOPES), exact(bias=-slopes * (ROWS + 4 - KEYS).abs()))
    same(attention(Q, K, V, alibi_slopes=SLOPES, causal=True), exact(KEYS <= ROWS + 4, slopes * (KEYS - ROWS)))
    assert (attention(Q, K, V, alibi_slopes=SLOPES) - exact(bias=slopes * (KEYS - ROWS))).abs().max() > 0.1
    by_score = flex_attention(Q, K, V, lambda s, b, h, i, j: s - SLOPES[h] * (i - j).abs(), enable_gqa=True)
    assert isinstance(by_score, Tensor)
    same(attention(Q, K, V, alibi_slopes=SLOPES, causal_alignment="top_left"), by_score)


def test_grouped_heads_of_xformers() -> None:
    q, k = normal(2, 5, 2, 3, 16), normal(2, 7, 2, 1, 16, seed=1).expand(-1, -1, -1, 3, -1)
    expected = sdpa(*(t.flatten(2, 3).transpose(1, 2) for t in (q, k, k))).transpose(1, 2)
    same(attention(q.flatten(2, 3), k[:, :, :, 0], k[:, :, :, 0], layout="bshd"), expected)


def test_flashinfers_single_calls_and_merge_state() -> None:
    q, k, v = Q[0].transpose(0, 1), K[0], V[0]  # q in FlashInfer's layout NHD, k and v in HND
    parts = [
        attention(q[None], *(t[:, rows].transpose(0, 1)[None] for t in (k, v)), layout="bshd", return_lse=True)
        for rows in (slice(4), slice(4, 9))
    ]
    outputs, lses = zip(*((o[0], lse[0]) for o, lse in parts), strict=True)
    same(merge(outputs, lses, layout="thd")[0].transpose(0, 1), exact()[0])
    same(attention(q[0][None, None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], layout="bshd")[0, 0],
         exact()[0, :, 0])  # fmt: skip


@pytest.mark.slow
def test_jax() -> None:
    jax = pytest.importorskip("jax")
    q, k, v = (jax.numpy.asarray(t.transpose(1, 2).cpu().numpy()) for t in (Q, K, V))
    options = {"layout": "bshd", "return_lse": True}
    for theirs, ours in (
        ({}, {}),
        ({"is_causal": True}, {"causal": True, **TOP_LEFT}),
        ({"local_window_size": (2, 1)}, {"window": (2, 1), **TOP_LEFT}),
        ({"local_window_size": 2}, {"window": (2, 2), **TOP_LEFT}),
        ({"query_seq_lengths": jax.numpy.array([3, 5]), "key_value_seq_lengths": jax.numpy.array([4, 9])},
         {"q_lengths": [3, 5], "kv_lengths": [4, 9]}),
    ):  # fmt: skip
        expected, residual = jax.nn.dot_product_attention(q, k, v, return_residual=True, **theirs)
        o, lse = attention(*(t.transpose(1, 2) for t in (Q, K, V)), **options, **ours)
        same(o.cpu(), torch.tensor(expected.tolist()))
        valid = lse.cpu().isfinite()
        same(lse.cpu()[valid], torch.tensor(residual.tolist()).transpose(1, 2)[valid])
    unseen = jax.nn.dot_product_attention(q, k, v, mask=jax.numpy.zeros((1, 1, 5, 9), bool))
    same(torch.tensor(unseen.tolist())[:, 0, ::2], V.cpu().mean(2))


@pytest.mark.parametrize(("given", "message"), [
    ({"attn_mask": torch.ones(5, 9, dtype=torch.bool)}, "attn_mask: is only for"),
    ({"kv_lengths": [3]}, "kv_lengths: is only for"),
], ids=["mask", "seqused"])  # fmt: skip
def test_what_thd_refuses(given: dict[str, Any], message: str) -> None:
    q, k = (t[0].transpose(0, 1).cpu() for t in (Q, K))
    with pytest.raises(ProblemError, match=message):
        attention(q, k, k, layout="thd", cu_seqlens_q=[0, 5], cu_seqlens_k=[0, 9], **given)


def test_8_bit_queries_and_mixed_keys_and_values_are_refused() -> None:
    low = torch.float8_e4m3fn
    with pytest.raises(ProblemError, match="q: dtype float8_e4m3fn must be"):
        attention(Q.to(low), K, V)
    with pytest.raises(ProblemError, match="v: dtype float32 must be k's"):
        attention(Q, K.to(low), V, k_scale=1.0)


def test_qv_is_more_columns() -> None:
    qv = normal(2, 4, 5, 16, seed=3)
    k, v = (t.repeat_interleave(2, 1).double() for t in (K, V))
    scores = (Q.double() @ k.mT + qv.double() @ v.mT) / math.sqrt(32)
    same(attention(torch.cat([Q, qv], -1), torch.cat([K, V], -1), V), scores.softmax(-1) @ v)
