"""`FlashAttention` and `Block`: `torch.nn` modules with attention, for building a transformer.

The attention function is an argument, so a model can use the kernels of this library, torch's, or a Flashpoint server
(`functools.partial(flashpoint.torch.attention, client=client)`). B batch, S length, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from flashpoint_kernels.functional import attention as _attention


class FlashAttention(nn.Module):
    """Multi-head self-attention with its projections (Vaswani et al. 2017, §3.2.2): (B, S, dim) to (B, S, dim).

    One projection gives q, k and v; the heads are views of it. With fewer key/value heads than query heads, it is
    grouped-query attention (Ainslie et al. 2023).

    Args:
        dim: Width of the model, a multiple of `heads`. The head dimension is dim / heads, at most 576.
        heads: Query heads.
        kv_heads: Key/value heads, a divisor of `heads`. None: as many as `heads`.
        causal: A position sees itself and those before it.
        window: [left, right] positions that are visible on either side; −1 is no bound.
        dropout_p: Dropout of the attention weights while training.
        bias: Whether the projections have a bias.
        attention: Function that computes attention: called with q (B, S, heads, D), k and v (B, S, kv_heads, D) and the
            keywords of `flashpoint_kernels.attention`, it returns o (B, S, heads, D).

    Parameters have torch's default dtype and device, as in modules of torch. Raises ValueError for sizes that are not
    divisible.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        causal: bool = False,
        window: Sequence[int] | None = (-1, -1),
        dropout_p: float = 0.0,
        bias: bool = False,
        attention: Callable[..., Any] = _attention,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if heads < 1 or dim < 1 or dim % heads:
            raise ValueError(f"dim: {dim} must be a positive multiple of heads, {heads}")
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"kv_heads: {kv_heads} must divide heads, {heads}")
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.causal, self.window, self.dropout_p, self.attention = causal, window, dropout_p, attention
        self.qkv = nn.Linear(dim, (heads + 2 * kv_heads) * self.head_dim, bias=bias)
        self.out = nn.Linear(dim, dim, bias=bias)

    def forward(self, x: Tensor, lengths: Tensor | Sequence[int] | None = None) -> Tensor:
        """Return the attention of x with its projections, (B, S, dim).

        Args:
            x: Inputs, (B, S, dim), in the dtype of the parameters.
            lengths: Number of valid positions of each sequence, int32 or int64, (B,). None: all are valid.
        """
        if x.ndim != 3:
            raise ValueError(f"x: must be (B, S, dim), not {list(x.shape)}")
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=-2)
        padded = {} if lengths is None else {"q_lengths": lengths, "kv_lengths": lengths}
        dropout_p = self.dropout_p if self.training else 0.0
        o: Tensor = self.attention(
            q, k, v, layout="bshd", causal=self.causal, window=self.window, dropout_p=dropout_p, **padded
        )
        projected: Tensor = self.out(o.flatten(-2))
        return projected


class Block(nn.Module):
    """A block of a GPT: x + attention(norm(x)), then x + mlp(norm(x)) (pre-norm, Xiong et al. 2020).

    (B, S, dim) to (B, S, dim).

    Args:
        dim: Width of the model, a multiple of `heads`.
        heads: Query heads.
        kv_heads: Key/value heads, a divisor of `heads`. None: as many as `heads`.
        hidden: Width inside the multilayer perceptron (GELU). None: 4·dim.
        causal: A position sees itself and those before it.
        window: [left, right] positions that are visible on either side; −1 is no bound.
        dropout_p: Dropout of the attention weights while training.
        bias: Whether projections and norms have a bias.
        attention: Function that computes attention, as in `FlashAttention`.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        hidden: int | None = None,
        causal: bool = True,
        window: Sequence[int] | None = (-1, -1),
        dropout_p: float = 0.0,
        bias: bool = False,
        attention: Callable[..., Any] = _attention,
    ) -> None:
        super().__init__()
        hidden = 4 * dim if hidden is None else hidden
        self.attention_norm = nn.LayerNorm(dim, bias=bias)
        self.attention = FlashAttention(
            dim, heads, kv_heads, causal=causal, window=window, dropout_p=dropout_p, bias=bias, attention=attention
        )
        self.mlp_norm = nn.LayerNorm(dim, bias=bias)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden, bias=bias), nn.GELU(), nn.Linear(hidden, dim, bias=bias))

    def forward(self, x: Tensor, lengths: Tensor | Sequence[int] | None = None) -> Tensor:
        """Return the block's output for x, (B, S, dim).

        Args:
            x: Inputs, (B, S, dim), in the dtype of the parameters.
            lengths: Number of valid positions of each sequence, int32 or int64, (B,). None: all are valid.
        """
        x = x + self.attention(self.attention_norm(x), lengths)
        fed: Tensor = x + self.mlp(self.mlp_norm(x))
        return fed
