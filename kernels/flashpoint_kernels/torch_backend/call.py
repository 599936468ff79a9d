"""torch's fused operators: one call of them, on the CPU and on CUDA, and what they leave out put right.

They are private to torch: a test guards their signatures. They know the diagonal from the top left alone, have no
answer (or crash) without keys, and give `lse` 0 for a row whose largest score is −∞ or NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashpoint_kernels.reproducible import aligned

INF = float("inf")
_LOOKED_AT = 1 << 20  # scores at a time
_aten = torch.ops.aten
_forward_cpu = _aten._scaled_dot_product_flash_attention_for_cpu.default  # the packet takes 7 µs more


@dataclass(eq=False, slots=True)
class Call:
    """Sequences of equal lengths as the operators take them: q (n,Hq,sq,D), k and v (n,Hk,sk,D), a mask to add or none.

    `causal` is the operators' own, from the top left. Blocks of one sequence may stand for sequences (blocks.py).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None  # (n|1, Hq|1, sq|1, sk|1) float32
    causal: bool
    scale: float  # above 0, which the operators take for granted

    def reads(self, x: Mapping[str, Tensor]) -> bool:
        """Return whether the operators read the tensors `x` themselves, not copies, and no mask."""
        given = ((self.q, x["q"]), (self.k, x["k"]), (self.v, x["v"]))
        return self.bias is None and all(t.data_ptr() == own.data_ptr() for t, own in given)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return o (n,Hq,sq,D) and lse (n,Hq,sq), 0 and −∞ for a query that may see no key."""
        o, lse = self._forward_cuda() if self.q.is_cuda else self._forward_cpu()
        if self.bias is not None:
            dead = self.bias.amax(-1) == -INF
            o, lse = o.masked_fill(dead[..., None], 0.0), lse.masked_fill(dead, -INF)
        return o, lse

    def backward(self, do: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv. `lse` is +∞ for a query that sees no key: its probabilities exp(s − lse) are then 0."""
        return (self._backward_cuda if self.q.is_cuda else self._backward_cpu)(do, o, lse)

    def _forward_cpu(self) -> tuple[Tensor, Tensor]:
        o, lse = self.unchecked_cpu()
        if not lse.all():  # one operation, which takes NaN for true
            self.put_right(o, lse)
        return o, lse

    def unchecked_cpu(self) -> tuple[Tensor, Tensor]:
        """Return o and lse of the CPU's operator. `put_right` has to look at rows whose lse is 0."""
        found: tuple[Tensor, Tensor] = _forward_cpu(
            self.q, self.k, self.v, 0.0, self.causal, attn_mask=self.bias, scale=self.scale
        )
        return found

    def put_right(self, o: Tensor, lse: Tensor) -> None:
        """Put right the rows whose largest score is NaN or −∞: the operator says o = 0 and lse = 0.

        It drops a NaN where the keys are fewer than a vector of floats has. All rows of a head are looked at together,
        and several heads, because one key of score 0 makes lse = 0 in every row.
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
        """Whether torch's FlashAttention-2 covers the call: its diagonal is the bottom right one, so only squares."""
        square = self.q.shape[2] == self.k.shape[2]
        return self.q.dtype != torch.float32 and self.bias is None and (not self.causal or square)

    def _cuda_inputs(self) -> tuple[list[Tensor], Tensor | None]:
        """q, k, v with one key/value head a query head and D padded to what the kernels take; the mask likewise."""
        heads, sk = self.q.shape[1], self.k.shape[2]
        qkv = [_pad8(t) for t in (self.q, _repeat(self.k, heads), _repeat(self.v, heads))]
        if self.bias is None:
            return qkv, None
        # Rows of the mask must lie together, 16 bytes apart; the columns added are cut off again, their memory stays.
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
            # Its own lse is padded to 32 queries; the padding is never read back.
            lse = pad(lse, (0, -lse.shape[-1] % 32), value=INF)
            dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
                do, q, k, v, bias, o, lse, unused, unused, 0.0, [True, True, True, False], self.causal,
                scale=self.scale,
            )  # fmt: skip
        dim, heads = self.q.shape[-1], self.k.shape[1]
        return dq[..., :dim], _sum_group(dk, heads)[..., :dim], _sum_group(dv, heads)[..., :dim]


def _pad8(t: Tensor) -> Tensor:
    """The last dimension padded with zeros to a multiple of 8, which keeps every row 16 bytes aligned."""
    missing = -t.shape[-1] % 8
    return pad(t, (0, missing)) if missing else t


def _repeat(t: Tensor, heads: int) -> Tensor:
    """One key/value head for each of `heads` query heads."""
    return t if t.shape[1] == heads else t.repeat_interleave(heads // t.shape[1], 1)


def _sum_group(grad: Tensor, heads: int) -> Tensor:
    """The gradient (n, Hq, sk, D) of repeated heads as that of the `heads` they repeat, summed in float32."""
    return grad.view(grad.shape[0], heads, -1, *grad.shape[2:]).sum(2, dtype=torch.float32)
