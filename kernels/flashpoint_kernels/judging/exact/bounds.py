"""Exact answers in float64, and two bounds for the error of each element, from the inputs alone.

`limits` returns, for each answer, its exact value and

    S  the largest error of a kernel that keeps scores, and all other intermediate results but P, dS and o, in float32
    L  the largest error of the formula with every intermediate result rounded to the data type of q

An error of at most S is right, one between S and L is imprecise, one above L is wrong. docs/judge.md derives both. They
are first-order error estimates with constants for the order of sums, multiplied by `SAFETY`. They do not depend on the
answer that is judged.

Notation: w and u are the units of rounding of float32 and of the data type; A = |scale|·Σ|q||k|; p the weights, o the
output, delta = rowsum(o∘do) − dlse; e the absolute error of a score, r the relative error of p.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashpoint_contract.spec import Row
from flashpoint_kernels.judging.exact.rounding import LARGEST, ROUND, Maxima, rounded, unit_of
from flashpoint_kernels.problems.dropout import kept_bits
from flashpoint_kernels.problems.problem import Problem
from flashpoint_kernels.quantization import scaled

SAFETY = 2.0  # factor of both bounds
ILL_POSED = 0.1  # a row of o is ill-posed if its bound S exceeds this fraction of the largest |v| of its head
CHUNK = 1 << 17  # scores in memory at a time: 1 MiB in float64; about twenty such tensors exist at once

# Constants of the derivation, for: the dot product of a score, the argument of exp, other sums, roundings to the type.
_DOT, _ARGUMENT, _SUM, _ROUND = 4.0, 4.0, 16.0, ROUND


@dataclass(frozen=True)
class Limits:
    """The exact value of an answer, and the bounds S and L of each element; float64, of the answer's shape."""

    value: Tensor
    accurate: Tensor  # S
    allowed: Tensor  # L

    def excess(self, answer: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
        """Return error/S and error/L of each element.

        A value that is not finite, but should be, has infinite ratios. If the exact value overflows the answer's data
        type, every value is accepted.
        """
        answer = answer.to(self.value.device).double()
        same = (answer == self.value) | (answer.isnan() & self.value.isnan())
        error = (answer - self.value).abs().masked_fill(same, 0.0).nan_to_num(nan=math.inf)
        fits = self.value.abs() < 0.99 * LARGEST[dtype]
        error = error.masked_fill(~(fits | self.value.isinf()), 0.0)
        bad = error.isinf()

        def over(bound: Tensor) -> Tensor:
            ratio = torch.where(error == 0, 0.0, error / bound.clamp_min(1e-300))
            return ratio.masked_fill(bad, math.inf)

        return over(self.accurate), over(self.allowed)


def _nothing() -> None: ...


def limits(
    problem: Problem, names: Sequence[str], block: Callable[[], None] = _nothing, *, chunk: int | None = None,
    queries: range | None = None, pause: Callable[[], None] = _nothing,
) -> tuple[dict[str, Limits], Tensor]:  # fmt: skip
    """Return the limits of the answers `names`, and which rows are ill-posed (bool, of lse's shape).

    Args:
        problem: A problem of either direction. `o` and `lse` of the caller are not used. Gradients need `do`.
        names: Any of o, lse, dq, dk, dv, dattn_mask, dsinks.
        block: Called before each block of the computation. If it raises, the computation ends.
        chunk: Maximum scores of a block, unless one query has more; CHUNK by default.
        queries: Compute only these queries of each sequence; dk, dv and gradients that are sums need all.
        pause: Called between the matrix products of a block. If it raises, the computation ends.
    """
    spec = problem.spec
    inputs = {name: t for name, t in problem.tensors.items() if name not in ("o", "lse")}
    shapes = {"o": (*problem.tensors["q"].shape[:-1], spec.value_dim), "lse": spec.lse_shape}
    shapes |= {f"d{name}": t.shape for name, t in inputs.items()}

    def room() -> dict[str, Tensor]:
        return {n: torch.zeros(shapes[n], dtype=torch.float64, device=problem.device) for n in names}

    parts = [room(), room(), room()]
    if "lse" in names:
        parts[0]["lse"].fill_(-math.inf)
    ill = torch.zeros(spec.lse_shape, dtype=torch.bool, device=problem.device)
    views = [replace(problem, tensors=inputs, outputs=each) for each in parts]
    together = lambda row: max(1, CHUNK // max(1, spec.q_heads * row.q_len * row.kv_len))  # noqa: E731
    for (rows, x), (_, s), (_, allowed) in zip(*(view.batches(together) for view in views), strict=True):
        batch = _Rows(problem, rows, x, (x, s, allowed), parts, ill, pause)
        batch.solve(block, chunk or CHUNK, range(batch.queries) if queries is None else queries)
    return {n: Limits(parts[0][n], parts[1][n] * SAFETY, parts[2][n] * SAFETY) for n in names}, ill


def blocks(problem: Problem) -> int:
    """Return how many times `limits` calls its argument `block`."""
    heads, alike = problem.spec.q_heads, Counter((row.q_len, row.kv_len, row.offset) for row in problem.rows)
    total = 0
    for (queries, keys, _), count in alike.items():
        together = max(1, CHUNK // max(1, heads * queries * keys))
        for n in (*(together,) * (count // together), count % together):
            total += -(-queries // max(1, CHUNK // max(1, n * heads * keys))) if n else 0
    return total


class _Rows:
    """Sequences of equal lengths: compute their exact answers and bounds, some queries at a time."""

    def __init__(
        self,
        problem: Problem,
        rows: Sequence[Row],
        x: Mapping[str, Tensor],
        outputs: Sequence[Mapping[str, Tensor]],
        parts: Sequence[dict[str, Tensor]],
        ill: Tensor,
        pause: Callable[[], None],
    ) -> None:
        spec, self.pause = problem.spec, pause
        self.problem, self.rows, self.outputs, self.parts, self.ill = problem, rows, outputs, parts, ill
        self.names = parts[0].keys()
        self.unit = unit_of(spec.dtype, spec.options.precision)
        self.group = spec.q_heads // spec.kv_heads
        self.queries, self.keys = rows[0].q_len, rows[0].kv_len
        self.x = {name: t.double() for name, t in x.items() if name in ("q", "do", "dlse")}
        self.k = x["k"].double()
        pause()
        self.v = x["v"].double()
        if spec.quantized:
            self.k = scaled(x["k"], x["k_scale"], torch.float64)
            self.v = scaled(x["v"], x["v_scale"], torch.float64)
        self.slopes = x["alibi_slopes"].double() if "alibi_slopes" in x else None
        self.sinks = problem.tensors["sinks"].double() if "sinks" in problem.tensors else None
        if self.slopes is not None:  # x has the slopes in float32, but a float64 problem needs those of the caller
            slopes = problem.tensors["alibi_slopes"].double()
            self.slopes = slopes[[row.index for row in rows]] if slopes.ndim == 2 else slopes[None]
        self.mask = problem.mask_part(problem.tensors["attn_mask"], rows) if spec.has("attn_mask") else None
        self.gradients = any(name.startswith("d") for name in self.names)
        self.sums: dict[str, list[Tensor]] = {}

    def solve(self, block: Callable[[], None], chunk: int, queries: range) -> None:
        heads = len(self.rows) * self.problem.spec.q_heads
        step = max(1, chunk // max(1, heads * self.keys))
        for start in range(queries.start, queries.stop, step):
            block()
            _Chunk(self, slice(start, min(start + step, queries.stop))).solve()
        for name, (value, size, *errors) in self.sums.items():  # dk, dv: a kernel may round each query head's sum
            unit = self.unit
            for place, error in zip(self.outputs, (None, *errors), strict=True):
                total = value if error is None else error + _ROUND * unit.u * size + unit.tiny
                place[name].copy_(total.unflatten(1, (-1, self.group)).sum(2))  # type: ignore[no-untyped-call]

    def put(self, name: str, rows: slice, value: Tensor, accurate: Tensor, allowed: Tensor) -> None:
        for place, t in zip(self.outputs, (value, accurate, allowed), strict=True):
            place[name][:, :, rows] = t

    def add(self, name: str, *terms: Tensor) -> None:
        """Add a chunk's value and bounds to dk or dv of each query head: (n, Hq, Sk, ·)."""
        if name not in self.sums:
            self.sums[name] = [torch.zeros_like(terms[0]) for _ in range(4)]
        value, size, accurate, allowed = self.sums[name]
        value += terms[0]
        size += terms[0].abs()
        accurate += terms[1]
        allowed += terms[2]

    def put_mask(self, rows: slice, terms: Sequence[Tensor]) -> None:
        problem, unit = self.problem, unit_of(self.problem.spec.tensors["attn_mask"].dtype)
        size = _ROUND * unit.u * terms[0].abs() + unit.tiny
        for part, t in zip(self.parts, (terms[0], terms[1] + size, terms[2] + size), strict=True):
            whole = part["dattn_mask"]
            own_mask = problem.mask_part(whole, self.rows)
            place = own_mask[:, :, rows] if own_mask.shape[2] > 1 else own_mask
            shared = [axis for axis in range(4) if place.shape[axis] == 1]
            place += t.sum(shared, keepdim=True) if shared else t
            problem.put_mask_part(whole, self.rows, own_mask)

    def put_sinks(self, terms: Sequence[Tensor]) -> None:
        unit = unit_of(self.problem.spec.tensors["sinks"].dtype)
        size = _ROUND * unit.u * terms[0].abs() + unit.tiny
        for part, t in zip(self.parts, (terms[0], terms[1] + size, terms[2] + size), strict=True):
            part["dsinks"] += t.sum((0, 2, 3))


class _Chunk:
    """A chunk: some queries of some sequences. Tensors are (n, Hq, queries, ·)."""

    def __init__(self, rows: _Rows, queries: slice) -> None:
        self.batch, self.at, self.unit = rows, queries, rows.unit
        self.q = rows.x["q"][:, :, queries]
        self.options = rows.problem.spec.options
        self.scale = rows.problem.spec.scale

    def by_keys(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Return rows (n, Hq, S, d) times keys (n, Hk, m, d) transposed: (n, Hq, S, m)."""
        self.batch.pause()
        n, heads, length, _ = rows.shape
        grouped = rows.reshape(n, keys.shape[1], self.batch.group * length, rows.shape[-1])
        return (grouped @ keys.mT).view(n, heads, length, keys.shape[2])

    def onto_keys(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Return rows (n, Hq, S, m) times keys (n, Hk, m, d): (n, Hq, S, d)."""
        self.batch.pause()
        n, heads, length, _ = rows.shape
        grouped = rows.reshape(n, keys.shape[1], self.batch.group * length, rows.shape[-1])
        return (grouped @ keys).view(n, heads, length, keys.shape[-1])

    def seen(self, ahead: Tensor) -> Tensor:
        batch, options = self.batch, self.options
        left, right = batch.problem.spec.window
        seen = ((ahead <= right) & (ahead >= -left)).expand(len(batch.rows), batch.problem.spec.q_heads, -1, -1)
        if batch.mask is not None and batch.mask.dtype == torch.bool:
            seen = seen & self.mask()
        elif batch.mask is not None:
            seen = seen & (self.mask() > -math.inf)
        if batch.problem.spec.has("block_mask"):
            device = ahead.device
            rows = (
                torch.arange(self.at.start, self.at.stop, dtype=torch.int64, device=device)[:, None]
                // options.block_size[0]
            )
            keys = torch.arange(batch.keys, dtype=torch.int64, device=device) // options.block_size[1]
            seen = seen & batch.problem.block_part(batch.rows)[:, :, rows, keys]
        return seen

    def mask(self) -> Tensor:
        assert self.batch.mask is not None
        return self.batch.mask[:, :, self.at] if self.batch.mask.shape[2] > 1 else self.batch.mask

    def keep(self) -> Tensor | None:
        """Return the dropout factor of each weight, 0 or 1/(1 − p); None without dropout."""
        problem, options = self.batch.problem, self.options
        if not options.dropout_p:
            return None
        assert problem.seed is not None
        numbers = [row.index for row in self.batch.rows]
        place = (numbers, problem.query_heads, range(self.at.start, self.at.stop), range(self.batch.keys))
        kept = kept_bits(problem.seed, options.dropout_p, *place, problem.device) != 0
        return kept.view(len(numbers), -1, *kept.shape[1:]).double() / (1.0 - options.dropout_p)

    def scores(self) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor], Tensor]:
        """Return the scores (−∞ if hidden), which are visible, their errors for S and L, and softcap's derivative."""
        batch, unit, options = self.batch, self.unit, self.options
        q, k, scale = self.q, batch.k, self.scale
        w = unit.w
        raw = scale * self.by_keys(q, k)
        sizes = abs(scale) * self.by_keys(q.abs(), k.abs())
        strict = (_DOT * (1 + q.shape[-1] ** 0.5 / 8) * w + unit.tf32) * sizes
        if batch.problem.spec.quantized:  # a kernel may round dequantized keys to q's type
            strict = strict + abs(scale) * self.by_keys(q.abs(), (k.to(unit.to).double() - k).abs())
        loose = strict
        if unit.half:
            off = (rounded(raw, unit.to) - raw).abs()
            if scale:  # a kernel may round before and after it scales, unless the product overflows
                twice = rounded(rounded(raw / scale, unit.to) * scale, unit.to)
                off = torch.where(twice.isfinite(), torch.maximum(off, (twice - raw).abs()), off)
            loose = strict + off + self.prescaled(q, k, scale)
        derivative = torch.ones((), dtype=torch.float64, device=raw.device)
        s = raw
        if options.softcap:
            t = torch.tanh(raw / options.softcap)
            s, derivative = options.softcap * t, 1 - t * t
            bent = 0.77 / options.softcap
            strict = strict * (derivative + bent * strict).clamp_max(1) + _ARGUMENT * w * options.softcap
            if unit.half:
                loose = (
                    (loose + unit.u * raw.abs()) * derivative + bent * loose.square() + _ARGUMENT * w * options.softcap
                )
                loose = loose + 2 * unit.u * s.abs()
            else:
                loose = strict
        place = torch.arange(batch.keys, dtype=torch.int64, device=raw.device)
        rows = torch.arange(self.at.start, self.at.stop, dtype=torch.int64, device=raw.device)
        ahead = place - rows[:, None] - batch.rows[0].offset
        bias = None
        if batch.slopes is not None:
            bias = -batch.slopes[:, :, None, None] * ahead.abs()
        if batch.mask is not None and batch.mask.dtype != torch.bool:
            bias = self.mask().double() if bias is None else bias + self.mask().double()
        seen = self.seen(ahead)
        magnitude = raw.abs()
        if bias is not None:
            s = s + bias
            magnitude = magnitude + bias.masked_fill(~seen, 0.0).abs()
            if unit.half:
                loose = loose + unit.u * bias.masked_fill(~seen, 0.0).abs() + (rounded(s, unit.to) - s).abs()
        s = s.masked_fill(~seen, -math.inf)
        self.magnitude = magnitude
        return s, seen, (strict, loose), derivative

    def prescaled(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """Return the largest error of scores from rounding scaled inputs.

        A kernel may round q·scale, or both q·sqrt(scale) and k·sqrt(scale). Take the larger of the two errors.
        """
        to, root = self.unit.to, abs(scale) ** 0.5

        def off(t: Tensor) -> Tensor:
            self.batch.pause()
            return (rounded(t, to) - t).abs()

        of_q = self.by_keys(off(q * scale), k.abs())
        of_both = self.by_keys(off(q * root), (k * root).abs()) + self.by_keys((q * root).abs(), off(k * root))
        return torch.maximum(of_q, of_both)

    def solve(self) -> None:
        batch, unit = self.batch, self.unit
        s, seen, errors, derivative = self.scores()
        top = s.amax(-1, keepdim=True) if batch.keys else s.new_full((*s.shape[:-1], 1), -math.inf)
        sink = None
        if batch.sinks is not None:
            sink = batch.sinks[None, :, None, None].expand(*s.shape[:-1], 1)
            top = torch.maximum(top, sink)
        none = top == -math.inf
        base = top.masked_fill(none, 0.0)
        weights = (s - base).exp()
        total = weights.sum(-1, keepdim=True)
        if sink is not None:
            total = total + (sink - base).exp()
        p = weights / total.masked_fill(none, 1.0)
        self.p, self.none, self.base = p, none, base
        lse = (base + total.masked_fill(none, 1.0).log()).masked_fill(none, -math.inf)[..., 0]
        self.sunk = None if sink is None else (sink - base).exp() / total.masked_fill(none, 1.0)
        argument = _ARGUMENT * unit.w * (s.masked_fill(~seen, 0.0).abs() + base.abs() + self.magnitude)
        kinds = errors if unit.half else errors[:1]  # for float32, L is S: there is no other rounding
        self.e = [(each + argument).masked_fill(~seen, 0.0) for each in kinds]
        mean = [(p * each).sum(-1, keepdim=True) for each in self.e]
        self.r = [torch.expm1((e + m).clamp_max(50.0)) + _SUM * unit.w for e, m in zip(self.e, mean, strict=True)]
        self.z = self.keep()
        self.seen_keys = seen
        length = 1 + batch.keys**0.5 / 8
        z = p if self.z is None else p * self.z
        o = self.onto_keys(z, batch.v)
        sizes, spreads = self.spread(o)
        bounds = []
        visible = self.onto_keys(seen.double(), batch.v.abs())
        quantized = None
        if batch.problem.spec.quantized:
            quantized = self.onto_keys(z, (batch.v.to(unit.to).double() - batch.v).abs())
        for spread in spreads:
            bound = spread + _ARGUMENT * unit.w * base.abs() * o.abs()
            bound = bound + (unit.half + _SUM * unit.w * length + unit.tf32) * sizes
            bound = bound + _ROUND * unit.u * o.abs() + 2 * unit.eta * visible + unit.tiny
            bounds.append(bound if quantized is None else bound + quantized)
        batch.pause()
        largest = (
            batch.v.abs().amax((2, 3)).repeat_interleave(batch.group, 1)[..., None, None] if batch.keys else 0 * total
        )
        ill = (bounds[0].amax(-1, keepdim=True) > ILL_POSED * largest) & ~none & seen.any(-1, keepdim=True)
        if batch.keys and self.z is None:
            # Without dropout, a weighted average lies between the smallest and the largest value (with a sink, 0 is one
            # of the values). So the error of an average is at most the larger distance of o to these two.
            batch.pause()
            slack = 2 * unit.u * largest + unit.tiny
            high = batch.v.amax(2, keepdim=True).repeat_interleave(batch.group, 1)
            low = batch.v.amin(2, keepdim=True).repeat_interleave(batch.group, 1)
            if sink is not None:
                high, low = high.clamp_min(0), low.clamp_max(0)
            room = torch.maximum(high - o, o - low) + slack
            bounds = [torch.minimum(bound, room) for bound in bounds]
        nothing = none.expand_as(o) if sink is None else ~seen.any(-1, keepdim=True).expand_as(o)
        bounds = [bound.masked_fill(nothing, 0.0) for bound in bounds]
        self.note_ill(ill[..., 0])
        if "o" in batch.names:
            batch.put("o", self.at, o, bounds[0], bounds[-1])
        if "lse" in batch.names:
            rounding = (
                _ARGUMENT * unit.w * (base.abs()[..., 0] + lse.abs().nan_to_num(0, 0, 0)) + _SUM * unit.w * length
            )
            rounding = rounding + 2.0**-22 * lse.abs().nan_to_num(0, 0, 0) + 2.0**-23
            accurate, allowed = mean[0][..., 0] + rounding, mean[-1][..., 0] + rounding
            if unit.half:
                allowed = allowed + 2 * unit.u * lse.abs().nan_to_num(0, 0, 0)
            dead = none[..., 0]
            batch.put("lse", self.at, lse, accurate.masked_fill(dead, 0.0), allowed.masked_fill(dead, 0.0))
        if batch.gradients:
            self.solve_gradients(o, z, sizes, spreads, visible, derivative, s)

    def note_ill(self, ill: Tensor) -> None:
        batch, problem = self.batch, self.batch.problem
        view = problem.canonical("lse", batch.ill)
        for number, row in enumerate(batch.rows):
            start = row.q_start + self.at.start
            view[row.batch, :, start : start + ill.shape[2]] = ill[number]

    def spread(self, o: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return Σp|v|, and the errors of o that relative errors of p cause, for S and L.

        A relative error that all weights share cancels, so the formula uses the distance of v from its mean c: Σ p·r·|v
        − c| + |o − c|·Σ p·r.
        """
        batch = self.batch
        z = self.p if self.z is None else self.p * self.z
        sizes = self.onto_keys(z, batch.v.abs())
        if self.z is not None or not batch.keys:
            return sizes, [
                self.onto_keys(z * r, batch.v.abs()) + o.abs() * (self.p * r).sum(-1, keepdim=True) for r in self.r
            ]
        batch.pause()
        centre = batch.v.mean(2, keepdim=True)
        heads = centre.repeat_interleave(batch.group, 1)
        partial_bounds = []
        for r in self.r:
            weighted = self.p * r
            rest = (o - heads).abs() * weighted.sum(-1, keepdim=True)
            if self.sunk is not None:
                rest = rest + heads.abs() * self.sunk * r.amax(-1, keepdim=True).clamp_max(1e20)
            partial_bounds.append(self.onto_keys(weighted, (batch.v - centre).abs()) + rest)
        return sizes, partial_bounds

    def solve_gradients(
        self, o: Tensor, z: Tensor, sizes: Tensor, spreads: list[Tensor], visible: Tensor, derivative: Tensor, s: Tensor
    ) -> None:
        batch, unit, w, p = self.batch, self.unit, self.unit.w, self.p
        do = batch.x["do"][:, :, self.at]
        dp, dp_sizes = self.by_keys(do, batch.v), self.by_keys(do.abs(), batch.v.abs())
        if self.z is not None:
            dp, dp_sizes = dp * self.z, dp_sizes * self.z
        delta = (o * do).sum(-1, keepdim=True)
        if "dlse" in batch.x:
            dlse = batch.x["dlse"][:, :, self.at, None]
            delta = delta - dlse
        off = dp - delta
        ds = p * off
        length_q, length_k = 1 + batch.queries**0.5 / 8, 1 + batch.keys**0.5 / 8
        products = o * do
        rounded = unit.u * products.abs().sum(-1, keepdim=True)
        common = 2 * (_SUM * w + unit.tf32) * sizes + 2 * unit.eta * (visible + 1)
        shared = (common * do.abs()).sum(-1, keepdim=True)
        shared = shared + _ARGUMENT * w * self.base.abs() * products.abs().sum(-1, keepdim=True)
        own_rounding = _SUM * w * length_k * ds.abs() + unit.half * (ds.abs() + p * off.abs())
        own_rounding = own_rounding + 2 * unit.eta * (1 + off.abs())
        maxima = Maxima(s)
        masks, bent, weights, sinks = [], [], [], []
        for which, (spread, r) in enumerate(zip(spreads, self.r, strict=True)):
            is_loose = which == 1
            e_delta = (spread * do.abs()).sum(-1, keepdim=True) + shared
            if unit.half and not is_loose:  # rounding errors of o and P are independent, so add their squares
                e_delta = e_delta + 5 * unit.u * products.norm(dim=-1, keepdim=True)
                squares = self.onto_keys(z * z, batch.v * batch.v).sqrt()
                e_delta = e_delta + unit.half * (squares * do.abs()).sum(-1, keepdim=True)
            else:
                e_delta = e_delta + _ROUND * rounded
            if unit.half and is_loose:
                e_delta = e_delta + unit.half * (sizes * do.abs()).sum(-1, keepdim=True)
            e_dp = (_SUM * w + unit.tf32 + (unit.u if is_loose else 0)) * dp_sizes
            if unit.half:
                e_dp = e_dp + unit.u * dp.abs()
            moved = p * (e_dp + e_delta)
            e_ds = p * r * off.abs() + moved + own_rounding + maxima.through(moved)
            e_ds = e_ds.masked_fill(~self.seen_keys, 0.0)
            masks.append(e_ds)
            if self.options.softcap:
                steep = 4 * w + (4 * unit.u if is_loose else 0) + 2 * self.e[which] / self.options.softcap
                e_ds = e_ds * derivative + ds.abs() * steep.clamp_max(2)
            bent.append(e_ds)
            if self.sunk is not None:
                sinks.append(self.sunk * (r.amax(-1, keepdim=True) * delta.abs() + e_delta + _SUM * w * delta.abs()))
            of_p = p * (r + unit.half + _SUM * w * length_q) + 2 * unit.eta
            weights.append(of_p.masked_fill(~self.seen_keys, 0.0))
        if "dattn_mask" in batch.names:
            batch.put_mask(self.at, (ds, masks[0], masks[-1]))
        if "dsinks" in batch.names and self.sunk is not None:
            batch.put_sinks((-self.sunk * delta, sinks[0], sinks[-1]))
        ds = ds * derivative
        scale = abs(self.scale)
        more = (unit.tf32 + _SUM * w * length_q) * ds.abs()
        if "dq" in batch.names:
            dq = self.scale * self.onto_keys(ds, batch.k)
            size = _ROUND * unit.u * dq.abs() + unit.tiny
            errors = [scale * self.onto_keys(e + unit.tf32 * ds.abs(), batch.k.abs()) + size for e in bent]
            errors = [t.masked_fill(self.hidden, 0.0) for t in errors]
            batch.put("dq", self.at, dq, errors[0], errors[-1])
        if "dk" in batch.names:
            errors = [scale * ((e + more).mT @ self.q.abs()) for e in bent]
            batch.add("dk", self.scale * (ds.mT @ self.q), errors[0], errors[-1])
        if "dv" in batch.names:
            keep = 1.0 if self.z is None else self.z
            errors = [(each * keep + unit.tf32 * z).mT @ do.abs() for each in weights]
            batch.add("dv", z.mT @ do, errors[0], errors[-1])

    @property
    def hidden(self) -> Tensor:
        """Return which rows see no key: (n, Hq, queries, 1)."""
        return ~self.seen_keys.any(-1, keepdim=True)
