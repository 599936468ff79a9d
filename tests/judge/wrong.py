"""Wrong kernels, each modelled on a kind of public bug report; `STEPS` has the codes of causes that name a mistake."""

# ruff: noqa: N801 (a class has the name of its kernel)
from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.judge.tiled import INF, Tiled, collected

STEPS, _, wrong = collected()


# The softmax


@wrong("sentinel")
class finite_start(Tiled):
    """The running maximum starts at -5e4: rows with lower scores become 0 (FlashInfer)."""

    start = -5e4


@wrong("sentinel")
class finite_hidden(Tiled):
    """Hidden keys have a score of -1e4, which real scores fall below."""

    hidden = -1e4


@wrong("missing-rescale")
class no_rescale(Tiled):
    """The accumulator is not rescaled when the maximum rises."""

    def rescale(self, acc: Tensor, by: Tensor) -> Tensor:
        return acc.where(by > 0, 0.0)


@wrong("missing-rescale")
class no_rescale_of_sum(Tiled):
    """The sum is not rescaled when the maximum rises."""

    def rescale_sum(self, total: Tensor, by: Tensor) -> Tensor:
        return total.where(by > 0, 0.0)


@wrong("missing-rescale")
class lazy_rescale(Tiled):
    """The accumulator is rescaled only when the maximum rises by more than 8, but the sum is always rescaled."""

    def rescale(self, acc: Tensor, by: Tensor) -> Tensor:
        return acc * by.where(by < math.exp(-8), 1.0)

    def rescale_sum(self, total: Tensor, by: Tensor) -> Tensor:
        return total * by


@wrong("no-maximum")
class no_maximum(Tiled):
    """The maximum is not subtracted from scores, so exp overflows above 88."""

    def maximum(self, s: Tensor, m: Tensor) -> Tensor:
        return torch.zeros_like(m)

    start = 0.0


@wrong("maximum-of-first-tile", "no-maximum")
class maximum_of_first_tile(Tiled):
    """The maximum of the first tile is used for all other tiles."""

    def maximum(self, s: Tensor, m: Tensor) -> Tensor:
        return super().maximum(s, m) if bool((m == -INF).all()) else m


@wrong("clamped-exponent")
class clamped(Tiled):
    """Exponents are clamped at -20, to avoid a slow path for very small numbers."""

    def exp(self, x: Tensor) -> Tensor:
        return x.clamp_min(-20).exp().where(x > -INF, 0.0)


@wrong("epsilon")
class epsilon(Tiled):
    """1e-3 is added to the sum, to avoid a division by 0."""

    def finish(self, acc: Tensor, total: Tensor) -> Tensor:
        return acc / (total + 1e-3)


@wrong("base-2")
class base_two(Tiled):
    """Weights are exp2 of the scores, without the factor log2(e)."""

    def exp(self, x: Tensor) -> Tensor:
        return x.exp2()


# Tiles and limits


@wrong("last-tile", "key-tail")
class last_tile(Tiled):
    """The loop visits only whole tiles, so the last, partial tile is ignored."""

    def ends(self, length: int) -> int:
        return length if length < self.tile else length // self.tile * self.tile


@wrong("padded-keys")
class padded(Tiled):
    """Without causal, padding keys of the last tile have a score of 0, and count in the sum."""

    def scores(self, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
        s = super().scores(q, k, seen)
        return torch.nn.functional.pad(s, (0, self.tile - s.shape[-1])) if not self.causal else s

    def weights(self, p: Tensor, v: Tensor) -> Tensor:
        return p

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        return a[..., : b.shape[-2]] @ b

    def backward(self, *all: Tensor) -> tuple[Tensor, ...]:
        own = Tiled(self.causal, self.scale, self.window, self.softcap, 1)  # type: ignore[arg-type]
        return own.backward(*all)


@wrong("key-limit")
class limit(Tiled):
    """Keys from 16,384 on are ignored, as with a block table of a fixed size."""

    def ends(self, length: int) -> int:
        return min(length, 16384)


@wrong("key-limit")
class short_index(Tiled):
    """Keys from 1,024 on are ignored."""

    def ends(self, length: int) -> int:
        return min(length, 1024)


@wrong("key-missing", "last-tile")
class one_key_less(Tiled):
    """The loop ends one key early if there are several tiles."""

    def ends(self, length: int) -> int:
        return length - (length > self.tile)


@wrong("head-dim-tail")
class narrow(Tiled):
    """Only the first 64 dimensions of q and k are read."""

    def scores(self, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
        return super().scores(q[..., :64], k[..., :64], seen)


# Scale, masks and options


@wrong("scale-padded")
class padded_scale(Tiled):
    """The default scale is that of D rounded up to a power of 2."""

    def scaled(self, scale: float | None, dim: int) -> float:
        return (1 << (dim - 1).bit_length()) ** -0.5 if scale is None else scale


@wrong("scale-ignored")
class own_scale(Tiled):
    """The caller's scale is ignored: scores are multiplied by 1/sqrt(D)."""

    def scaled(self, scale: float | None, dim: int) -> float:
        return dim**-0.5


@wrong("causal-alignment")
class top_left(Tiled):
    """The causal mask is aligned to the top left corner."""

    def offset(self, q_len: int, kv_len: int) -> int:
        return 0 if self.causal and self.window == (-1, -1) else kv_len - q_len


@wrong("causal-by-one")
class sees_next(Tiled):
    """A query sees the key after its own."""

    def visible(self, i: Tensor, j: Tensor) -> Tensor:
        return super().visible(i + self.causal, j)


@wrong("window-by-one")
class window_by_one(Tiled):
    """The window's left side has one key too few."""

    def visible(self, i: Tensor, j: Tensor) -> Tensor:
        left = self.window[0]
        return super().visible(i, j) & ((left < 1) | (j > i - left))


@wrong("window-right")
class window_of_future(Tiled):
    """A query with a window sees all keys to its right (JAX)."""

    def visible(self, i: Tensor, j: Tensor) -> Tensor:
        return j >= i - self.window[0] if self.window[0] >= 0 and not self.causal else super().visible(i, j)


@wrong("softcap-late")
class late_softcap(Tiled):
    """The softcap comes after the mask: hidden keys have a score of -softcap."""

    def scores(self, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
        return self.cap((self.dot(q, k.mT) * self.scale).masked_fill(~seen, -INF))


@wrong("softcap-unscaled")
class unscaled_softcap(Tiled):
    """The softcap comes before the scale."""

    def scores(self, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
        return (self.cap(self.dot(q, k.mT)) * self.scale).masked_fill(~seen, -INF)

    def cap_gradient(self, ds: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ds if not self.softcap else ds * (1 - torch.tanh(self.dot(q, k.mT) / self.softcap) ** 2)


@wrong("empty-rows", "sentinel")
class empty_rows(Tiled):
    """The output of a row without keys is the mean of all values, because hidden keys have a finite score."""

    hidden = -1e30


@wrong("group-head")
class interleaved(Tiled):
    """Query head h uses key head h % Hk."""

    def heads(self, t: Tensor, count: int) -> Tensor:
        return t.repeat(1, count // t.shape[1], 1, 1)

    def grouped(self, t: Tensor, like: Tensor) -> Tensor:
        return t.unflatten(1, (-1, like.shape[1])).sum(1)


@wrong("batch-index")
class first_sequence(Tiled):
    """All sequences read keys and values of the first."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(q, k[:1].expand_as(k), v[:1].expand_as(v))


# Precision


@wrong("low-precision-scores", "low-precision")
class scores_in_bfloat16(Tiled):
    """Scores are rounded to bfloat16."""

    def cap(self, s: Tensor) -> Tensor:
        return super().cap(s).bfloat16().float()


@wrong("low-precision-weights", "low-precision")
class weights_in_8_bits(Tiled):
    """P is rounded to an 8-bit float."""

    def weights(self, p: Tensor, v: Tensor) -> Tensor:
        return p.to(torch.float8_e4m3fn).float()


@wrong("low-precision-sum", "low-precision")
class sum_in_bfloat16(Tiled):
    """The accumulator is rounded to bfloat16 at each tile."""

    def rescale(self, acc: Tensor, by: Tensor) -> Tensor:
        return (acc * by).bfloat16().float()


@wrong("low-precision", "low-precision-gradient", "tf32", "low-precision-scores")
class products_in_bfloat16(Tiled):
    """All products round their inputs to bfloat16, whatever the type of q, k and v."""

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        return a.bfloat16().float() @ b.bfloat16().float()


@wrong("low-precision-gradient", "low-precision")
class ds_in_8_bits(Tiled):
    """dS is rounded to an 8-bit float."""

    def ds(self, p: Tensor, dp: Tensor, delta: Tensor) -> Tensor:
        return super().ds(p, dp, delta).to(torch.float8_e4m3fn).float()


# The backward


@wrong("delta-missing")
class no_delta(Tiled):
    """dS is computed without delta, the sum of o · do."""

    def delta(self, o: Tensor, do: Tensor) -> Tensor:
        return torch.zeros_like(o[..., :1])


@wrong("softcap-gradient")
class no_cap_gradient(Tiled):
    """The derivative of the softcap is missing."""

    def cap_gradient(self, ds: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ds


@wrong("group-gradient")
class first_of_group(Tiled):
    """dk and dv of a group have only the part of its first head."""

    def grouped(self, t: Tensor, like: Tensor) -> Tensor:
        return t.unflatten(1, (like.shape[1], -1))[:, :, 0]


@wrong("group-gradient")
class mean_of_group(Tiled):
    """dk and dv are the mean over the heads of a group, in place of the sum."""

    def grouped(self, t: Tensor, like: Tensor) -> Tensor:
        return t.unflatten(1, (like.shape[1], -1)).mean(2)


@wrong("batch-gradient")
class last_sequence(Tiled):
    """dk and dv of all sequences but the last are 0."""

    def grouped(self, t: Tensor, like: Tensor) -> Tensor:
        return super().grouped(t, like) * (torch.arange(t.shape[0]) == t.shape[0] - 1)[:, None, None, None]


@wrong("gradient-tile")
class tail_of_gradient(Tiled):
    """The backward's loop ignores the last, partial tile."""

    def back_ends(self, length: int) -> int:
        return length if length < self.tile else length // self.tile * self.tile


@wrong("gradient-factor")
class twice_scaled(Tiled):
    """dk is multiplied by the scale twice, as if q had been scaled before."""

    def gradients(self, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return dq * self.scale, dk * self.scale**2, dv


@wrong("gradient-factor")
class log2_in_dq(Tiled):
    """dq has a factor ln 2, left over from exp2."""

    def gradients(self, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return dq * self.scale * math.log(2), dk * self.scale, dv


@wrong("backward-causal-missing", "backward-causal", "backward-window-missing")
class no_mask_in_backward(Tiled):
    """The backward has no causal mask, and no window."""

    def back_seen(self, i: Tensor, j: Tensor) -> Tensor:
        return (j >= 0).expand(i.shape[0], j.shape[1])


@wrong("backward-window-missing", "backward-window")
class no_window_in_backward(Tiled):
    """The backward has no window."""

    def back_seen(self, i: Tensor, j: Tensor) -> Tensor:
        kept, self.window = self.window, (-1, -1)
        seen = self.visible(i, j)
        self.window = kept
        return seen


@wrong("clamped-gradient")
class clipped_gradient(Tiled):
    """dS is clipped to [-1, 1]: right on Gaussian inputs (Transformer Engine)."""

    def ds(self, p: Tensor, dp: Tensor, delta: Tensor) -> Tensor:
        return super().ds(p, dp, delta).clamp(-1, 1)


@wrong("skipped-weights")
class skipped_weights(Tiled):
    """dS is computed as if weights below 1e-3 were 0."""

    def ds(self, p: Tensor, dp: Tensor, delta: Tensor) -> Tensor:
        return super().ds(p.where(p >= 1e-3, 0.0), dp, delta)
