"""One call of torch's fused operators, on the CPU and on CUDA, with corrections.

The operators are private to torch: a test checks their signatures. They support only top-left diagonals, have no answer
(or crash) without keys, and return an `lse` of 0 for a row whose largest score is −∞ or NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashpoint_kernels.reproducible import aligned

INF = float("inf")
_LOOKED_AT = 1 << 20  # maximum scores in one check
_aten = torch.ops.aten
_forward_cpu = _aten._scaled_dot_product_flash_attention_for_cpu.default  # the overload packet takes 7 µs more


@dataclass(eq=False, slots=True)
class Call:
    """Sequences of equal lengths for the operators: q (n,Hq,sq,D), k and v (n,Hk,sk,D), and a mask to add, or None.

    `causal` is the operators' own mask, aligned top left. The sequences may be blocks of one sequence (blocks.py).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None  # (n|1, Hq|1, sq|1, sk|1) float32
    causal: bool
    scale: float  # above 0, which the operators require

    def reads(self, x: Mapping[str, Tensor]) -> bool:
        """Return whether the operators read the tensors in `x` without copies, and no mask."""
        given = ((self.q, x["q"]), (self.k, x["k"]), (self.v, x["v"]))
        return self.bias is None and all(t.data_ptr() == own.data_ptr() for t, own in given)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return o (n,Hq,sq,D) and lse (n,Hq,sq); 0 and −∞ for a query that sees no key."""
        o, lse = self._forward_cuda() if self.q.is_cuda else self._forward_cpu()
        if self.bias is not None:
            dead = self.bias.amax(-1) == -INF
            o, lse = o.masked_fill(dead[..., None], 0.0), lse.masked_fill(dead, -INF)
        return o, lse

    def backward(self, do: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv.

        `lse` must be +∞ for a query that sees no key: its probabilities exp(s − lse) are then 0.
        """
        return (self._backward_cuda if self.q.is_cuda else self._backward_cpu)(do, o, lse)

    def _forward_cpu(self) -> tuple[Tensor, Tensor]:
        o, lse = self.unchecked_cpu()
        if not lse.all():  # a single operation, for which NaN is true
            self.put_right(o, lse)
        return o, lse

    def unchecked_cpu(self) -> tuple[Tensor, Tensor]:
        """Return o and lse from the CPU's operator. Rows with an lse of 0 need `put_right`."""
        found: tuple[Tensor, Tensor] = _forward_cpu(
            self.q, self.k, self.v, 0.0, self.causal, attn_mask=self.bias, scale=self.scale
        )
        return found

    def put_right(self, o: Tensor, lse: Tensor) -> None:
        """Correct rows whose largest score is NaN or −∞, for which the operator returns o = 0 and lse = 0.

        The operator loses a NaN if there are fewer keys than a vector has floats. All rows of a head, and several
        heads, are checked together, because one key with score 0 makes lse = 0 in every row.
        """
        rows = lse == 0
        (n, heads, sq, _), sk = self.q.shape, self.k.shape[2]
        group = heads // self.k.shape[1]
        bias = None if self.bias is None else self.bias.expand(n, heads, sq, sk)
        keys, height = torch.arange(sk), max(1, _LOOKED_AT // sk)
        for some in torch.split(rows.any(-1).nonzero(), max(1, _LOOKED_AT // (sq * sk))):
            batch, head = some.unbind(1)
            k = self.k[batch, head // group].mT.float()
            for start in range(0, sq, height):
                queries = slice(start, min(start + height, sq))
                s = self.scale * (self.q[batch, head, queries].float() @ k)
                if bias is not None:
                    s += bias[batch, head, queries]
                if self.causal:
                    s.masked_fill_(keys > torch.arange(queries.start, queries.stop)[:, None], -INF)
                most, asked = s.amax(-1), rows[batch, head, queries]
                for found, answer, sum_of_exp in ((most.isnan(), torch.nan, torch.nan), (most == -INF, 0.0, -INF)):
                    which, row = (found & asked).nonzero().unbind(1)
                    o[batch[which], head[which], row + start] = answer
                    lse[batch[which], head[which], row + start] = sum_of_exp

    def _backward_cpu(self, do: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            do, self.q, self.k, self.v, o, lse, 0.0, self.causal, attn_mask=self.bias, scale=self.scale
        )
        return dq, dk, dv

    @property
    def _flash(self) -> bool:
        """Whether torch's FlashAttention-2 supports the call.

        Its diagonal is aligned bottom right, so causal needs squares.
        """
        square = self.q.shape[2] == self.k.shape[2]
        return self.q.dtype != torch.float32 and self.bias is None and (not self.causal or square)

    def _cuda_inputs(self) -> tuple[list[Tensor], Tensor | None]:
        """Return q, k, v with a key/value head for each query head, and D padded for the kernels; the mask likewise."""
        heads, sk = self.q.shape[1], self.k.shape[2]
        qkv = [_pad8(t) for t in (self.q, _repeat(self.k, heads), _repeat(self.v, heads))]
        if self.bias is None:
            return qkv, None
        # The kernel needs mask rows at multiples of 16 bytes. The added columns are cut off again; their memory stays.
        full = _pad8(self.bias.to(self.q.dtype).expand(self.q.shape[0], heads, self.q.shape[2], sk))
        return qkv, aligned(full, full.dtype)[..., :sk]

    def _forward_cuda(self) -> tuple[Tensor, Tensor]:
        (q, k, v), bias = self._cuda_inputs()
        if self._flash:
            o, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, self.causal, False, scale=self.scale)
        else:
            o, lse, *_ = _aten._scaled_dot_product_efficient_attention(
                q, k, v, bias, True, 0.0, self.causal, scale=self.scale
            )
        return o[..., : self.v.shape[-1]], lse[..., : q.shape[2]]

    def _backward_cuda(self, do: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (q, k, v), bias = self._cuda_inputs()
        do, o = _pad8(do), _pad8(o)
        unused = torch.empty(0, dtype=torch.int64, device=q.device)  # the state of dropout, which is off
        if self._flash:
            dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
                do, q, k, v, o, lse, None, None, q.shape[2], k.shape[2], 0.0, self.causal, unused, unused,
                scale=self.scale,
            )  # fmt: skip
        else:
            # The kernel's own lse is padded to 32 queries; the padding is never read.
            lse = pad(lse, (0, -lse.shape[-1] % 32), value=INF)
            dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
                do, q, k, v, bias, o, lse, unused, unused, 0.0, [True, True, True, False], self.causal,
                scale=self.scale,
            )  # fmt: skip
        dim, heads = self.q.shape[-1], self.k.shape[1]
        return dq[..., :dim], _sum_group(dk, heads)[..., :dim], _sum_group(dv, heads)[..., :dim]


def _pad8(t: Tensor) -> Tensor:
    """Pad the last dimension with zeros to a multiple of 8, so that every row is aligned to 16 bytes."""
    missing = -t.shape[-1] % 8
    return pad(t, (0, missing)) if missing else t


def _repeat(t: Tensor, heads: int) -> Tensor:
    """Return a key/value head for each of `heads` query heads."""
    return t if t.shape[1] == heads else t.repeat_interleave(heads // t.shape[1], 1)


def _sum_group(grad: Tensor, heads: int) -> Tensor:
    """Return the gradient of `heads` heads from that of their repetitions (n, Hq, sk, D), summed in float32."""
    return grad.view(grad.shape[0], heads, -1, *grad.shape[2:]).sum(2, dtype=torch.float32)
