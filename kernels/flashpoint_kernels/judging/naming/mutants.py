"""Compute a case with a known mistake, to compare the result with the wrong numbers of a function.

A mistake of the forward is computed with its gradients by autograd. A mistake of the backward has its own formula, with
a right forward. All arithmetic is float64, limited to the range of float32 where a mistake depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flashpoint_kernels.judging.cases import Case

_UNDER, _OVER = -103.97, 88.72  # exp in float32 is 0 below, and infinite above


@dataclass(frozen=True)
class Mistake:
    """A changed formula: its code, a description, advice, and the change for `Forward` or for `_backward`."""

    code: str
    text: str
    advice: str
    forward: Mapping[str, Any] = field(default_factory=dict)
    backward: Mapping[str, Any] = field(default_factory=dict)


def exp32(x: Tensor) -> Tensor:
    """Return exp(x) with the range of float32."""
    return torch.where(x < _UNDER, 0.0, torch.where(x > _OVER, math.inf, x.clamp(_UNDER, _OVER).exp()))


def _each(count: int) -> Tensor:
    """Return the indices of `count` rows, keys, heads or sequences."""
    return torch.arange(count, dtype=torch.int64, device="cpu")


class Forward:
    """The forward's formula with a change. `x` has q, k, v (B, H, S, ·) and masks, in float64."""

    def __init__(self, x: Mapping[str, Tensor], case: Case, top_left: bool, change: Mapping[str, Any]) -> None:
        self.x, self.case, self.change = x, case, change
        self.lengths: Tensor | int = case.kv_len  # the number of keys of each sequence
        if "kv_lengths" in x and change.get("lengths") != "none":
            tile = change.get("lengths", 1)
            self.lengths = (-(-x["kv_lengths"].long() // tile) * tile).clamp_max(case.kv_len)[:, None, None, None]
        self.offset = 0 if top_left != change.get("realign", False) else self.lengths - case.q_len

    def get(self, name: str, usual: Any = None) -> Any:
        return self.change.get(name, usual)

    def heads(self, t: Tensor) -> Tensor:
        """Return the keys or values for each query head."""
        case = self.case
        h = _each(case.q_heads)
        index = {
            "": h // case.group, "mod": h % case.kv_heads, "first": 0 * h, "clamped": h.clamp_max(case.kv_heads - 1),
            "reversed": case.kv_heads - 1 - h // case.group,
            "twos": (h // 2).clamp_max(case.kv_heads - 1), "fours": (h // 4).clamp_max(case.kv_heads - 1),
        }[self.get("heads", "")]  # fmt: skip
        t = t[:, index]
        if self.get("batch"):
            b = _each(t.shape[0])
            t = t[{"first": 0 * b, "last": 0 * b - 1, "mod 2": b % 2, "halves": b // 2}[self.get("batch")]]
        return t

    def seen(self) -> Tensor:
        case = self.case
        i, j = _each(case.q_len)[:, None], _each(case.kv_len)
        ahead = j - i - self.offset
        seen = (j < self.lengths) | torch.zeros_like(ahead, dtype=torch.bool)
        if tile := self.get("block_causal"):  # a tile is wholly visible if its first key is, else wholly hidden
            seen = seen & ((j // tile) * tile - i - self.offset <= 0)
        elif self.get("causal", case.causal):
            seen = seen & (ahead <= self.get("diagonal", 0))
        left, right = self.get("window", case.window)
        if self.get("window_offset", True) is False:
            ahead = j - i
        if left >= 0 and (tile := self.get("window_tile")):  # a window begins with a whole tile
            seen = seen & (j >= torch.div(j - ahead - left, tile, rounding_mode="floor") * tile)
        elif left >= 0:
            seen = seen & (ahead >= -left)
        if right >= 0:
            seen = seen & (ahead <= right)
        if self.get("keys"):
            seen = seen & (j < self.get("keys"))
        if self.get("first_keys"):
            seen = seen & (j >= self.get("first_keys"))
        if self.get("without") is not None:
            seen = seen & (j != self.get("without") % case.kv_len)
        return seen

    def scores(self) -> tuple[Tensor, Tensor]:
        case = self.case
        q, k = self.x["q"], self.heads(self.x["k"])
        rounded = self.get("products")
        if rounded:
            q, k = rounded_to(q, rounded), rounded_to(k, rounded)
        dims = self.get("dims")
        if dims:
            q, k = q[..., :dims], k[..., :dims]
        scale = self.get("scale", case.head_dim**-0.5 if case.scale is None else case.scale)
        s = rounded_to(q @ k.mT, self.get("raw", "none")) * scale
        cap = self.get("softcap", case.softcap)
        if cap and self.get("cap") == "unscaled":
            s = cap * torch.tanh(s / scale / cap) * scale
        elif cap and self.get("cap") == "twice":
            s = cap * torch.tanh(cap * torch.tanh(s / cap) / cap)
        elif cap and self.get("cap") != "late":
            s = cap * torch.tanh(s / cap)
            if self.get("cap") == "forgotten":
                s = s / cap
        mask = self.x.get("attn_mask")
        seen = self.seen().expand(s.shape)
        if "alibi_slopes" in self.x and not self.get("no_alibi"):
            i, j = _each(case.q_len)[:, None], _each(case.kv_len)
            far = (j - i - (0 if self.get("alibi") == "absolute" else self.offset)).abs().double()
            slopes = self.x["alibi_slopes"].double()
            heads = _each(case.q_heads)
            order = {"reversed": heads.flip(0), "mod 32": heads % 32}
            slopes = slopes[order.get(self.get("alibi"), heads)]
            if self.get("alibi") == "usual":
                slopes = torch.exp2(-8.0 * (heads + 1).double() / case.q_heads)
            s = s + (1 if self.get("alibi") == "added" else -1) * slopes[:, None, None] * far
        if mask is not None and not self.get("no_mask"):
            if self.get("mask") == "first sequence":
                mask = mask[:1]
            if self.get("mask") == "first head":
                mask = mask[:, :1]
            if mask.dtype == torch.bool:
                seen = seen & (~mask if self.get("mask") == "inverted" else mask)
            else:
                seen = seen & (mask > -math.inf)
                s = s + mask.masked_fill(mask == -math.inf, 0).double() * (scale if self.get("mask") == "scaled" else 1)
        if self.get("scores"):
            s = rounded_to(s, self.get("scores"))
        fill = self.get("fill", -math.inf)
        s = s.masked_fill(~seen, fill)
        if cap and self.get("cap") == "late":
            s = cap * torch.tanh(s / cap)
        if self.get("log2"):
            s = s * self.get("log2")
        return s, seen

    def sinks(self) -> Tensor:
        """Return the sinks (Hq, 1, 1), changed by a factor, a sum or a largest number."""
        factor, more, most = self.get("sinks", (1.0, 0.0, math.inf))
        changed: Tensor = self.x["sinks"].double() * factor + more
        return changed.clamp_max(most)[:, None, None]

    def solve(self) -> tuple[Tensor, Tensor]:
        s, seen = self.scores()
        v = self.heads(self.x["v"])
        if self.get("columns"):
            v = torch.cat([v[..., : self.get("columns")], 0 * v[..., self.get("columns") :]], -1)
        if self.get("products"):
            v = rounded_to(v, self.get("products"))
        pads = -self.case.kv_len % self.get("pad") if self.get("pad") else 0
        if pads:
            s = torch.nn.functional.pad(s, (0, pads), value=0.0)
            v = torch.nn.functional.pad(v, (0, 0, 0, pads))
        if "sinks" in self.x and self.get("sinks") != "none":  # one more key, whose value is 0
            s = torch.cat([s, self.sinks().expand(*s.shape[:-1], 1)], -1)
            v = torch.nn.functional.pad(v, (0, 0, 0, 1))
        if self.get("tile"):
            o, lse = self.tiled(s, v)
        else:
            o, lse = self.whole(s, v)
        empty = ~seen.any(-1, keepdim=True)
        if not self.get("empty"):
            o = o.masked_fill(empty, 0.0)
        if self.get("rounded"):
            o = rounded_to(o, self.get("rounded"))
        rows = self.get("rows")
        if rows:
            o = o.masked_fill(_each(self.case.q_len)[:, None] >= rows, 0.0)
        return o, lse

    def whole(self, s: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.get("max") == "none":
            top = torch.zeros_like(s[..., :1])
        elif self.get("max") == "least":
            top = s.amax(-1, keepdim=True).clamp_min(self.get("start", 0.0))
        elif self.get("max") == "first":
            top = s[..., : self.get("of", 64)].amax(-1, keepdim=True)
        elif self.get("max") == "heads":
            top = s.amax((1, 2, 3), keepdim=True).expand_as(s[..., :1])
        elif self.get("max") == "rows":
            top = s.amax((2, 3), keepdim=True).expand_as(s[..., :1])
        else:
            top = s.amax(-1, keepdim=True)
        top = top.masked_fill(top == -math.inf, 0.0).detach()
        low, high = self.get("clamp", (-math.inf, math.inf))
        p = exp32((s - top).clamp(low, high).masked_fill(s == -math.inf, -math.inf))
        if self.get("weights"):
            p = rounded_to(p, self.get("weights"))
        total = p.sum(-1, keepdim=True)
        if self.get("norm") == "none":
            total = torch.ones_like(total)
        if self.get("epsilon"):
            total = total + self.get("epsilon")
        o = p @ v / total
        if self.get("nan_to_zero"):
            o = torch.where(total == 0, 0.0, o)
        return o, (top + total.log())[..., 0]

    def tiled(self, s: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the online softmax tile by tile, and omit one step."""
        tile, skip = self.get("tile"), self.get("skip", "")
        top = torch.full_like(s[..., :1], self.get("start", -math.inf))
        total, acc = torch.zeros_like(top), s.new_zeros(*s.shape[:-1], v.shape[-1])
        for start in range(0, s.shape[-1], tile):
            part = s[..., start : start + tile]
            new = torch.maximum(top, part.amax(-1, keepdim=True))
            if skip == "maximum":
                new = part.amax(-1, keepdim=True)
            if self.get("far"):  # skip a tile whose scores are all far below the maximum
                part = part.masked_fill(part.amax(-1, keepdim=True) < top - self.get("far"), -math.inf)
            shift = new.masked_fill(new == -math.inf, 0.0)
            p, shrink = exp32(part - shift), exp32(top - shift)
            shrink = torch.where(top == -math.inf, 0.0 if skip != "maximum" else 1.0, shrink)
            if skip == "maximum":  # use each tile's own maximum, and omit the correction factor
                shrink = torch.ones_like(shrink)
            total = total * (1.0 if skip in ("sum", "both") else shrink) + p.sum(-1, keepdim=True)
            acc = acc * (1.0 if skip in ("values", "both") else shrink) + p @ v[..., start : start + tile, :]
            if self.get("acc"):
                acc, total = rounded_to(acc, self.get("acc")), rounded_to(total, self.get("sums", "none"))
            elif self.get("sums"):
                total = rounded_to(total, self.get("sums"))
            top = new
        return acc / total, (top + total.log())[..., 0]


def rounded_to(t: Tensor, kind: str) -> Tensor:
    """Return numbers rounded to a type; the gradient ignores the rounding."""
    if kind == "none":
        return t
    if kind == "tf32":
        bits = t.detach().float().view(torch.int32)
        done = ((bits + 0x1000) & ~0x1FFF).view(torch.float32).double()
    else:
        to = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}[kind]
        done = t.detach().to(to).double()
    return t + (done - t.detach())


def answers(
    mistake: Mistake, tensors: Mapping[str, Tensor], case: Case, top_left: bool, gradients: bool
) -> dict[str, Tensor]:
    """Return o and lse, and with `gradients` also dq, dk and dv, computed with a mistake."""
    x = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
    if mistake.backward:
        return _backward(x, case, top_left, mistake.backward)
    leaves = [x[n].clone().requires_grad_(gradients) for n in ("q", "k", "v")]
    forward = Forward(x | dict(zip(("q", "k", "v"), leaves, strict=True)), case, top_left, mistake.forward)
    o, lse = forward.solve()
    computed = {"o": o.detach(), "lse": lse.detach()}
    if gradients and o.requires_grad:
        grads = torch.autograd.grad(o, leaves, x["do"], allow_unused=True)
        computed |= {f"d{n}": g for n, g in zip("qkv", grads, strict=True) if g is not None}
    return computed


def _backward(x: Mapping[str, Tensor], case: Case, top_left: bool, change: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the gradients of a backward pass with the mistake `change`, after a right forward pass."""
    right = Forward(x, case, top_left, {})
    s, seen = right.scores()
    k, v, q, do = right.heads(x["k"]), right.heads(x["v"]), x["q"], x["do"]
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    top = s.amax(-1, keepdim=True)
    top = top.masked_fill(top == -math.inf, 0.0)
    if "sinks" in x:
        top = torch.maximum(top, right.sinks())
    total = (s - top).exp().sum(-1, keepdim=True)
    if "sinks" in x:
        total = total + (right.sinks() - top).exp()
    p = (s - top).exp() / total.clamp_min(1e-300)
    o = p @ v
    changed = Forward(x, case, top_left, change.get("forward", {}))
    if "forward" in change:  # recompute P from a changed score, but normalise it by the right lse
        other, _ = changed.scores()
        p = (other - top).exp() / total.clamp_min(1e-300)
        p = p.masked_fill(other == -math.inf, 0.0)
    if "lse" in change:
        lse = top + total.clamp_min(1e-300).log()
        p = p * (lse - rounded_to(lse, change["lse"])).exp()
    p = p.masked_fill(p < change.get("least", 0.0), 0.0)
    dead = ~seen.any(-1, keepdim=True)
    weights = rounded_to(p, change.get("weights", "none"))
    if "dead" in change:  # give the rows that see no key these weights
        p = torch.where(dead, change["dead"], p)
        weights = p if change["dead_values"] else weights
    dp = do @ v.mT
    dp = dp.clamp(-change.get("dp_most", math.inf), change.get("dp_most", math.inf))
    delta = (o * do).sum(-1, keepdim=True)
    kind = change.get("delta", "")
    if kind == "none":
        delta = torch.zeros_like(delta)
    elif kind == "negative":
        delta = -delta
    elif kind == "rounded":
        delta = rounded_to(delta, change["to"])
    elif kind == "first head":
        delta = delta[:, :1].expand_as(delta)
    elif kind == "sum":
        delta = do.sum(-1, keepdim=True)
    elif kind == "sum of o":
        delta = o.sum(-1, keepdim=True)
    ds = p * (dp - delta)
    if case.softcap and change.get("softcap") != "no derivative":
        raw = q @ k.mT * scale
        ds = ds * (1 - torch.tanh(raw / case.softcap) ** 2)
    if case.softcap and change.get("softcap") == "of the capped":
        ds = p * (dp - delta) * (1 - (s.masked_fill(~seen, 0) / case.softcap).tanh() ** 2)
    ds = rounded_to(ds, change.get("ds", "none"))
    ds = ds.clamp(-change.get("ds_most", math.inf), change.get("ds_most", math.inf))
    rows, keys = change.get("rows", case.q_len), change.get("keys", case.kv_len)
    first = change.get("first_rows", 0)
    kept = (_each(case.q_len)[:, None] < rows) & (_each(case.q_len)[:, None] >= first)
    dq = scale * (ds * (_each(case.kv_len) < keys)) @ k
    dk = scale * (ds * kept).mT @ q
    dv = (weights * kept).mT @ do
    for name in ("dq", "dk", "dv"):
        factor = change.get(name)
        if factor is not None:
            dq, dk, dv = (t * factor if n == name else t for n, t in (("dq", dq), ("dk", dk), ("dv", dv)))
    group = change.get("group", "sum")
    folded = []
    for t in (dk, dv):
        t = t.unflatten(1, (case.kv_heads, case.group))
        folded.append({"sum": t.sum(2), "mean": t.mean(2), "first": t[:, :, 0], "last": t[:, :, -1]}[group])
    if change.get("group_order") == "mod":
        folded = [t.unflatten(1, (case.group, case.kv_heads)).sum(1) for t in (dk, dv)]
    if change.get("batch"):
        pick = 0 if change["batch"] == "first" else -1
        at = _each(case.batch)[pick:][:1]
        folded = [torch.zeros_like(t).index_copy_(0, at, t[pick][None]) for t in folded]
    dk, dv = folded
    tails = change.get("tail_keys")
    if tails is not None:
        cut = _each(case.kv_len)[:, None] < tails
        dk, dv = dk * cut, dv * cut
    if "tail_rows" in change:
        dq = dq * (_each(case.q_len)[:, None] < change["tail_rows"])
    if change.get("heads") == "first":
        dq = dq * (_each(case.q_heads) % case.group == 0)[:, None, None]
    return {"dq": dq, "dk": dk, "dv": dv}
