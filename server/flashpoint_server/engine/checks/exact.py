"""Attention and its gradients in float64, written from the formula: the answers with which backends are compared.

The code is shared with no backend, so that a fault of one cannot hide here. Only the random words of dropout come from
the kernel library. A case is a padded batch: sequences of different lengths differ in `seen` alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flashpoint_kernels.problems.dropout import kept_bits


@dataclass(eq=False)
class Case:
    """One problem. Tensors are float64, of values that every data type holds, in layout bhsd: (B, H, S, D).

    `options` are those of `Options`, but for the layout; `extra` are further tensors by name. `offsets`, `q_lengths`
    and `kv_lengths` have a number for each sequence. `pages` is the number of keys of a page, 0 without pages; `forks`
    is the number of keys with which all sequences begin. `threads` are those that the kernels in C may use.
    """

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor | None
    options: dict[str, Any]
    extra: dict[str, Tensor]
    offsets: list[int]
    q_lengths: list[int]
    kv_lengths: list[int]
    layout: str = "bhsd"
    pages: int = 0
    forks: int = 0
    threads: int = 1
    eight_bit: bool = False  # k and v are int8 with a scale of 1/32 for each row
    given_offsets: bool = False
    answers: dict[str, Tensor] = field(default_factory=dict)
    sink_terms: float = 0.0  # the largest sum of the magnitudes of the terms of dsinks, which nearly cancel

    def solve(self) -> None:
        """Compute `answers`: o, lse, and the gradients if there is `do`."""
        q, k, v, do = self.q, self.k, self.v, self.do
        group, scale = q.shape[1] // k.shape[1], q.shape[3] ** -0.5
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        s = (q * scale) @ k.mT
        softcap = float(self.options.get("softcap", 0.0))
        steep: Tensor | None = None
        if softcap:
            steep = torch.tanh(s.div_(softcap))
            s = softcap * steep
        ahead = self._ahead()
        if (slopes := self.extra.get("alibi_slopes")) is not None:
            s = s - slopes.view(-1, q.shape[1], 1, 1) * ahead.abs()
        seen = self._seen(ahead)
        if (mask := self.extra.get("attn_mask")) is not None and mask.dtype != torch.bool:
            s = s + mask
        s = s.masked_fill(~seen, -math.inf)
        top = s.amax(-1, keepdim=True)
        sinks = self.extra.get("sinks")
        if sinks is not None:
            top = torch.maximum(top, sinks.view(1, -1, 1, 1))
        base = top.masked_fill(top == -math.inf, 0.0)
        p = s.sub_(base).exp_()
        total = p.sum(-1, keepdim=True)
        sunk = None
        if sinks is not None:
            sunk = (sinks.view(1, -1, 1, 1) - base).exp()
            total = total + sunk
        whole = total.masked_fill(total == 0, 1.0)
        p = p.div_(whole)
        self.answers["lse"] = (base + total.log())[..., 0].masked_fill(self._valid()[..., 0] == 0, -math.inf)
        z = p
        if drop := float(self.options.get("dropout_p", 0.0)):
            factor = self._kept(drop) / (1.0 - drop)
            z = p * factor
        o = self.answers["o"] = z @ v
        if do is None:
            return
        do = do * self._valid()
        dp = do @ v.mT
        if drop:
            dp = dp.mul_(factor)
        delta = (o * do).sum(-1, keepdim=True)
        ds = dp.sub_(delta).mul_(p)
        self.answers["dv"] = _of_groups(z.mT @ do, group)
        if mask is not None and mask.dtype != torch.bool:
            self.answers["dattn_mask"] = (
                ds.sum_to_size((1,) * (4 - mask.ndim) + tuple(mask.shape))
                .view(mask.shape)
                .clone()  # `ds` changes below
            )
        if sunk is not None:
            self.answers["dsinks"] = -(sunk / whole * delta).sum((0, 2, 3))
            self.sink_terms = (sunk / whole * (o * do).abs().sum(-1, keepdim=True)).sum((0, 2, 3)).max().item()
        if steep is not None:
            ds = ds.mul_(1.0 - steep * steep)
        self.answers["dq"] = (ds @ k).mul_(scale)
        self.answers["dk"] = _of_groups(ds.mT @ q, group).mul_(scale)

    def _ahead(self) -> Tensor:
        """Return how far key j is ahead of query i: (B, 1, Sq, Sk)."""
        i, j = _each(self.q.shape[2]), _each(self.k.shape[2])
        return (j - i[:, None]) - _of_sequences(self.offsets)

    def _seen(self, ahead: Tensor) -> Tensor:
        i, j = _each(self.q.shape[2])[:, None], _each(self.k.shape[2])
        left, right = self.options.get("window", (-1, -1))
        seen = j < _of_sequences(self.kv_lengths)
        seen = seen & (i < _of_sequences(self.q_lengths))
        if self.options.get("causal"):
            seen = seen & (ahead <= 0)
        if left >= 0:
            seen = seen & (ahead >= -left)
        if right >= 0:
            seen = seen & (ahead <= right)
        if (mask := self.extra.get("attn_mask")) is not None and mask.dtype == torch.bool:
            seen = seen & mask
        if (blocks := self.extra.get("block_mask")) is not None:
            rows, keys = self.options["block_size"]
            seen = seen & blocks[:, :, i // rows, j // keys]
        return seen

    def _kept(self, drop: float) -> Tensor:
        (batch, heads, queries, _), keys = self.q.shape, self.k.shape[2]
        seed = int(self.options["dropout_seed"])
        kept = kept_bits(seed, drop, range(batch), range(heads), range(queries), range(keys), torch.device("cpu"))
        return (kept != 0).view(batch, heads, queries, keys).double()

    def _valid(self) -> Tensor:
        """Return 1.0 for each query that is a row of its sequence, else 0: (B, 1, Sq, 1)."""
        lengths = _of_sequences(self.q_lengths)
        return (_each(self.q.shape[2])[:, None] < lengths).double()


def _each(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int64, device="cpu")


def _of_sequences(numbers: list[int]) -> Tensor:
    """Return one number for each sequence: (B, 1, 1, 1)."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu").view(-1, 1, 1, 1)


def _of_groups(t: Tensor, group: int) -> Tensor:
    """Return the sum over the query heads that share a key/value head."""
    return t if group == 1 else t.unflatten(1, (-1, group)).sum(2)  # type: ignore[no-untyped-call]
