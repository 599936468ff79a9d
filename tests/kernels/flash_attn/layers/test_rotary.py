"""The rotary embedding rotates pairs of columns by an angle that depends on the position of the row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpoint_kernels.flash_attn.layers import rotary
from tests.conftest import DEVICE
from tests.support.kernels.rotation import check, rotated
from tests.support.kernels.solving import normal


@given(
    rows=st.integers(1, 9), half=st.sampled_from([1, 4, 8]), interleaved=st.booleans(),
    offsets=st.lists(st.integers(0, 5), min_size=3, max_size=3), packed=st.booleans(),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_rotary_turns_pairs_by_position(
    rows: int, half: int, interleaved: bool, offsets: list[int], packed: bool
) -> None:
    cos, sin = (f(normal(20, half, seed=1)) for f in (torch.cos, torch.sin))
    x = normal(3, rows, 2, 16)
    places = torch.tensor(offsets, device=DEVICE)
    starts = torch.arange(4, device=DEVICE, dtype=torch.int32) * rows
    given_x = x.flatten(0, 1) if packed else x
    more: dict[str, Any] = {"cu_seqlens": starts, "max_seqlen": rows} if packed else {}
    actual = rotary.apply_rotary_emb(given_x, cos, sin, interleaved, False, places, **more).view(x.shape)
    for b in range(3):
        check(actual[b], rotated(x[b], cos, sin, offsets[b], interleaved), torch.float32)
    assert rotary.apply_rotary_emb(given_x, cos, sin, interleaved, True, places, **more) is given_x
    assert torch.equal(given_x.view(x.shape), actual)


@pytest.mark.parametrize("scale_base", [None, 8.0])
def test_the_layer_turns_q_and_k_and_leaves_v(scale_base: float | None) -> None:
    """The layer leaves v unchanged. Without and with XPos, a product of q and k has the value of the paper's formula.

    XPos (Sun et al. 2022): a pair of columns turns by its angle for each position between q and k, and is scaled by its
    factor to the power of (position of q − position of k) / `scale_base`.
    """
    layer = rotary.RotaryEmbedding(16, scale_base=scale_base, device=DEVICE)
    qkv = normal(1, 6, 3, 1, 16)
    qkv[:] = qkv[:, :1]  # q and k are the same at each position
    before = qkv.clone()
    assert layer(qkv) is qkv
    q, k, _ = qkv[0, :, :, 0].double().unbind(1)
    assert torch.equal(qkv[:, :, 2], before[:, :, 2])
    (q0, q1), (k0, k1) = (before[0, 0, n, 0].double().view(2, 8) for n in (0, 1))
    distance = torch.arange(6, device=DEVICE).double()[:, None, None] - torch.arange(6, device=DEVICE)[None, :, None]
    column = torch.arange(0, 16, 2, device=DEVICE).double()
    decay = 1.0 if scale_base is None else ((column / 16 + 0.4) / 1.4) ** (distance / scale_base)
    angle = distance * 10000.0 ** -(column / 16)
    expected = (decay * ((q0 * k0 + q1 * k1) * angle.cos() + (q0 * k1 - q1 * k0) * angle.sin())).sum(-1)
    torch.testing.assert_close(q @ k.T, expected, atol=1e-4, rtol=1e-4)
    grouped = torch.cat([before[:, :, 0].repeat(1, 1, 2, 1), before[:, :, 1], before[:, :, 2]], 2)
    layer(grouped, num_heads_q=2)
    assert torch.equal(grouped[:, :, 1:2], qkv[:, :, 0])
    assert torch.equal(grouped[:, :, 2:3], qkv[:, :, 1])
    q_alone, kv_alone = layer(before[:, :, 0].clone(), before[:, :, 1:].clone())
    assert torch.equal(q_alone, qkv[:, :, 0])
    assert torch.equal(kv_alone, qkv[:, :, 1:])
