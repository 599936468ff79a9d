"""The rotary position embedding (RoFormer, Su et al. 2021) with the functions of `flash_attn.layers.rotary`.

Each pair of columns (x, y) of a row at position t becomes (x·c − y·s, x·s + y·c), with c and s from cos[t] and sin[t].
With `interleaved`, columns 2i and 2i + 1 are a pair (GPT-J), else columns i and i + rotary_dim/2 (GPT-NeoX). Columns
from rotary_dim on stay as they are. Products are in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flashpoint_kernels.operators.torch_rules import overridable
from flashpoint_kernels.problems.memory import check_memory
from flashpoint_kernels.problems.modes import readable


@overridable
def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Return x with the rotary embedding of its positions. Differentiable.

    Args:
        x: (B, S, H, D); with `cu_seqlens` (T, H, D).
        cos: (positions, rotary_dim/2), rotary_dim <= D.
        sin: As `cos`.
        interleaved: Which columns are pairs, see the module.
        inplace: Write into x, and return it.
        seqlen_offsets: Position of each sequence's first row: a number, or integers (B,).
        cu_seqlens: Rows where sequences start, and where the last ends: int32, (B + 1,).
        max_seqlen: Changes nothing.

    Raises:
        ValueError: a position has no cosine, or rotary_dim is larger than D.
    """
    check_memory(x=x, cos=cos, sin=sin, seqlen_offsets=seqlen_offsets, cu_seqlens=cu_seqlens)
    half, rows = cos.shape[-1], x.shape[0 if cu_seqlens is not None else 1]
    if 2 * half > x.shape[-1]:
        raise ValueError(f"cos: rotary_dim is {2 * half}, and x has {x.shape[-1]} columns")
    places = torch.arange(rows, dtype=torch.int64, device=x.device)
    if cu_seqlens is not None:
        starts = cu_seqlens.long()
        sequence = torch.searchsorted(starts[1:].contiguous(), places, right=True).clamp(max=max(len(starts) - 2, 0))
        offsets = seqlen_offsets[sequence] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
        places = (places - starts[sequence] + offsets)[:, None]
    elif isinstance(seqlen_offsets, Tensor):
        places = (places + seqlen_offsets[:, None])[..., None]
    else:
        places = (places + seqlen_offsets)[:, None]
    if readable(places) and places.numel() and not 0 <= int(places.min()) <= int(places.max()) < len(cos):
        raise ValueError(f"cos: has {len(cos)} positions, and x needs position {int(places.max())}")
    # (…, rows, 1, half); a compiled program reads no values, and `index_select` refuses negative positions there
    c, s = (t.index_select(0, places.flatten()).view(*places.shape, half).float() for t in (cos, sin))
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    a, b = a * c - b * s, a * s + b * c
    rotated = torch.stack([a, b], -1).flatten(-2) if interleaved else torch.cat([a, b], -1)
    rotated = torch.cat([rotated.to(x.dtype), rest], -1)
    return x.copy_(rotated) if inplace else rotated


apply_rotary_emb_func = apply_rotary_emb


@overridable
def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Return x (B, S, H, D) with the rotary embedding of its positions, which begin at 0."""
    return apply_rotary_emb(x, cos, sin, interleaved)


@overridable
def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Apply the rotary embedding to q and k of `qkv` in place, and return `qkv`.

    `qkv` is (B, S, 3, H, D), or (B, S, H + 2·Hk, D) with H as `num_heads_q`. `cos_k` and `sin_k` are cosines and sines
    for k, if these differ from those for q (XPos).
    """
    if qkv.ndim == 5:
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    elif num_heads_q is None:
        raise ValueError("num_heads_q: must be given for qkv of shape (B, S, H + 2·Hk, D)")
    else:
        kv_heads = (qkv.shape[2] - num_heads_q) // 2
        q, k = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + kv_heads]
    apply_rotary_emb(q, cos, sin, interleaved, True, seqlen_offsets)
    turn = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    apply_rotary_emb(k, *turn, interleaved, True, seqlen_offsets)
    return qkv


@overridable
def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Apply the rotary embedding to k of `kv` (B, S, 2, Hk, D) in place, and return `kv`."""
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


class RotaryEmbedding(nn.Module):
    """Apply the rotary embedding to q and k of packed tensors, with frequencies base^(−2i/dim).

    With `scale_base` q and k are also scaled by position (XPos, Sun et al. 2022).

    Args:
        dim: Number of columns that the embedding changes.
        base: Base of the frequencies.
        interleaved: Which columns are pairs, see the module.
        scale_base: Number of positions over which the exponent of XPos's scale grows by 1. None: no scale.
        device: Device of the frequencies.
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self, dim: int, base: float = 10000.0, interleaved: bool = False, scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, base, interleaved, scale_base
        columns = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        self.register_buffer("inv_freq", base ** -(columns / dim), persistent=False)
        scale = None if scale_base is None else (columns + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)

    def _tables(self, length: int, t: Tensor) -> tuple[Tensor, ...]:
        """Return cos and sin of `length` positions for q, and those for k, which differ with XPos."""
        places = torch.arange(length, device=t.device, dtype=torch.float32)
        angles = torch.outer(places, self.inv_freq.to(t.device))
        cos, sin = angles.cos(), angles.sin()
        tables = cos, sin, cos, sin
        if self.scale is not None and self.scale_base is not None:
            scale = self.scale.to(t.device) ** ((places - length // 2) / self.scale_base)[:, None]
            tables = cos * scale, sin * scale, cos / scale, sin / scale
        return tuple(table.to(t.dtype) for table in tables)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Apply the embedding in place: to q and k of `qkv`, as `apply_rotary_emb_qkv_`.

        If `kv` (B, S, 2, Hk, D) is given, `qkv` is q alone, (B, S, H, D): apply it to q and to the k of `kv`.
        """
        farthest = int(seqlen_offset.max()) if isinstance(seqlen_offset, Tensor) else seqlen_offset
        length = max_seqlen or qkv.shape[1] + farthest
        cos, sin, cos_k, sin_k = self._tables(length, qkv)
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q
            )  # fmt: skip
        apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return qkv, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)
