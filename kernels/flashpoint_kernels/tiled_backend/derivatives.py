"""Derivatives along a direction, by tiles: the tangents of o and lse, and those of the gradients. O(N) extra memory.

A dot marks a tangent: q̇ is the direction of q. With P = exp(s − lse), the derivative of the softmax's loop is one more
sum beside it (Lu & Song 2024, arXiv 2410.11081, appendix E):

    ṡ = scale·(q̇·kᵀ + q·k̇ᵀ) + mask's tangent;   l̇se = Σ P∘ṡ;   ȯ = (P∘ṡ)·v + P·v̇ − l̇se·o

The gradients' tangents are the derivatives of the backward's tiles (tiles.py), with Ṗ = P∘(ṡ − l̇se):

    dS = P∘(do·vᵀ − delta)     dṠ = dS∘(ṡ − l̇se) + P∘(ḋo·vᵀ + do·v̇ᵀ − deltȧ)     dq̇ = scale·(dṠ·k + dS·k̇)  …

Second derivatives need no other kernel: gradients are the first derivative of <do, o> + <dlse, lse>, whose second
derivatives are symmetric. Shapes are those of tiles.py; softcap's u is scale·q·kᵀ / softcap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashpoint_contract.spec import Row
from flashpoint_kernels.problems.masks import added
from flashpoint_kernels.problems.problem import Problem
from flashpoint_kernels.problems.reproducible import flushing, threads
from flashpoint_kernels.problems.sequences import parted
from flashpoint_kernels.tiled_backend.arithmetic import add_product, product, shaped
from flashpoint_kernels.tiled_backend.tiles import BACKWARD_TILE, FORWARD_TILE, INF, Tiles, part_of, steps, with_queries

Tensors = dict[str, Tensor]


def solve(problems: Sequence[Problem], tile: tuple[int, int] | None = None) -> None:
    """Write the outputs of each problem's `tangents`. `tile` replaces the queries and keys of a tile of one head."""
    for problem in problems:
        of_tangents = problem.tangents
        assert of_tangents is not None, "a problem with a direction"
        of_tangents.clear_outputs()
        if of_tangents.has_gaps:
            of_tangents.own_part("lse").zero_()  # the tangent of −∞
        shared: Tensors = {
            name: of_tangents.own_part(name).float().zero_()
            for name in ("dattn_mask", "dsinks")
            if name in of_tangents.outputs
        }
        pairs = zip(with_queries(problem), with_queries(of_tangents), strict=True)
        for (rows, x), (_, dots) in pairs:
            with threads(problem, rows[0]) as count, flushing(problem, count):
                _solve(problem, rows, x, dots, shared, tile)
        for name, total in shared.items():
            of_tangents.own_part(name).copy_(total)


def _solve(
    problem: Problem, rows: Sequence[Row], x: Tensors, dots: Tensors, shared: Tensors, tile: tuple[int, int] | None
) -> None:
    of_tangents = problem.tangents
    assert of_tangents is not None, "a problem with a direction"
    t = Directed.of(problem, rows, x, dots)
    o, o_dot, lse_dot = t.forward(x["o"], x["lse"], tile)
    dots["o"].copy_(o_dot.view(dots["o"].shape))
    dots["lse"].copy_(lse_dot.view(dots["lse"].shape))
    if problem.spec.direction == "forward":
        return
    out: Tensors = {name: dots[name] for name in ("dq", "dk", "dv") if name in dots}
    if "dsinks" in shared:
        out["dsinks"] = shared["dsinks"]
    if "dattn_mask" in shared:
        out["dattn_mask"] = of_tangents.mask_part(shared["dattn_mask"], rows)
    t.backward(x | {"o": o}, dots | {"o": o_dot, "lse": lse_dot}, out, tile)
    if "dattn_mask" in out:
        of_tangents.put_mask_part(shared["dattn_mask"], rows, out["dattn_mask"])


@dataclass(eq=False)
class Directed:
    """Sequences of equal lengths, ready to be cut into tiles, with a direction. `q` and `k` may have no tangent."""

    t: Tiles
    q: Tensor | None  # as in `Tiles`: multiplied by the scale, divided by softcap
    k: Tensor | None
    v: Tensor | None
    mask: Tensor | None
    sinks: Tensor | None  # (n·Hq, 1, 1)
    blocks: Tensor | None  # (n|1, Hq|1, blocks of queries, blocks of keys) bool

    @classmethod
    def of(cls, problem: Problem, rows: Sequence[Row], x: Tensors, dots: Tensors) -> Directed:
        t, spec, of_tangents = Tiles.of(problem, rows, x), problem.spec, problem.tangents
        assert of_tangents is not None, "a problem with a direction"
        q = t.grouped(dots["q"]) * (spec.scale / (t.softcap or 1.0)) if "q" in dots else None
        k, v = (
            dots[name].to(torch.float32).contiguous().flatten(0, 1) if name in dots else None for name in ("k", "v")
        )
        mask = of_tangents.tensors.get("attn_mask")
        mask = None if mask is None else of_tangents.mask_part(mask, rows)
        sinks = dots["sinks"].repeat(len(rows))[:, None, None] if "sinks" in dots else None
        return cls(t, q, k, v, mask, sinks, problem.block_part(rows) if spec.has("block_mask") else None)

    def forward(self, o: Tensor, lse: Tensor, tile: tuple[int, int] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return o and ȯ (n·Hk, G, sq, Dv), and l̇se (n·Hq, sq, 1), in float32."""
        t = self.t
        o, base = t.grouped(o), _finite_rows(t, lse)
        o_dot, lse_dot = torch.zeros_like(o), t.q.new_zeros(t.heads, t.q_len, 1)
        own = torch.zeros_like(o) if t.problem.spec.dtype != "float32" else None  # 16 bits of o are too few
        block_m, block_n = t.block(tile or FORWARD_TILE)
        memory = [t.memory(block_m, block_n) for _ in range(3)]
        for i0, i1 in steps(0, t.q_len, block_m):
            rows = t.q.shape[0], t.q.shape[1] * (i1 - i0), o.shape[-1]
            acc, sums = t.q.new_zeros(rows), t.q.new_zeros(rows) if own is not None else None
            for j0, j1 in steps(*t.key_range(i0, i1), block_n):
                if (scores := self.scores(i0, i1, j0, j1, memory)) is None:
                    continue
                s, s_dot, _, _ = scores
                p = s.sub_(base[:, i0:i1]).exp_()
                if s_dot is not None:
                    weights = torch.mul(p, s_dot, out=shaped(memory[1], p.shape))
                    lse_dot[:, i0:i1] += weights.sum(-1, keepdim=True)
                bits = t.kept(i0, i1, j0, j1)
                if bits is not None:
                    p = _and(p, bits)
                if s_dot is not None:
                    add_product(
                        acc, (weights if bits is None else _and(weights, bits)).view(*rows[:2], -1), t.values(j0, j1)
                    )
                if self.v is not None:
                    add_product(acc, p.view(*rows[:2], -1), self.v[:, j0:j1])
                if sums is not None:
                    add_product(sums, p.view(*rows[:2], -1), t.values(j0, j1))
            o_dot[:, :, i0:i1] = acc.view(*o.shape[:2], i1 - i0, -1)
            if own is not None and sums is not None:
                own[:, :, i0:i1] = sums.view(*o.shape[:2], i1 - i0, -1)
        if self.sinks is not None:
            lse_dot += torch.exp(t.sinks - base) * self.sinks
        o = o if own is None else own.div_(1.0 - t.dropout_p)
        o_dot.div_(1.0 - t.dropout_p).sub_(lse_dot.view(*o.shape[:3], 1) * o)
        return o, o_dot, lse_dot

    def backward(self, x: Tensors, dots: Tensors, out: Tensors, tile: tuple[int, int] | None) -> None:
        """Write the tangents of dq, dk and dv into `out`, and add to its dsinks and dattn_mask.

        `x` and `dots` have do and dlse and their tangents, and o, ȯ and l̇se from `forward`.
        """
        t = self.t
        do, do_dot = t.grouped(x["do"]), t.grouped(dots["do"]) if "do" in dots else None
        delta, delta_dot = (x["o"] * do).sum(-1), (dots["o"] * do).sum(-1)
        if do_dot is not None:
            delta_dot += (x["o"] * do_dot).sum(-1)
        unseen = x["lse"].isneginf()
        delta, delta_dot = (each.view(t.heads, -1, 1) for each in (delta, delta_dot))
        for each, given in ((delta, x.get("dlse")), (delta_dot, dots.get("dlse"))):
            if given is not None:
                each -= given.float().masked_fill(unseen, 0.0).reshape(t.heads, -1, 1)
        base, lse_dot = _finite_rows(t, x["lse"]), dots["lse"]
        if "dsinks" in out:
            change = lse_dot.neg() if self.sinks is None else self.sinks - lse_dot
            summands = torch.exp(t.sinks - base) * (change * delta + delta_dot)
            out["dsinks"] -= summands.sum((1, 2)).view(t.each).sum(0)
        if not out.keys() - {"dsinks"}:
            return
        if t.dropout_p:
            do = do / (1.0 - t.dropout_p)
            do_dot = None if do_dot is None else do_dot / (1.0 - t.dropout_p)
        block_m, block_n = t.block(tile or BACKWARD_TILE)
        memory = [t.memory(block_m, block_n) for _ in range(3)]
        more = [t.memory(block_m, block_n) for _ in range(2)]
        dq = torch.zeros_like(t.q)
        for j0, j1 in steps(0, t.kv_len, block_n):
            k, v = t.keys(j0, j1), t.values(j0, j1)
            dk, dv = torch.zeros_like(k), torch.zeros_like(v)
            for i0, i1 in steps(*t.query_range(j0, j1), block_m):
                if (scores := self.scores(i0, i1, j0, j1, memory)) is None:
                    continue
                s, s_dot, tanh, u_dot = scores
                q, do_i = t.queries(t.q, i0, i1), t.queries(do, i0, i1)
                shape = (*q.shape[:2], j1 - j0)
                p = s.sub_(base[:, i0:i1]).exp_()
                # ṡ − l̇se: the tangent of log P
                change = torch.sub(s_dot, lse_dot[:, i0:i1]) if s_dot is not None else -lse_dot[:, i0:i1]
                bits = t.kept(i0, i1, j0, j1)
                kept = p if bits is None else _and(p, bits)
                dp = product(do_i, v.mT, shaped(more[0], shape)).view(p.shape)
                ds = dp.mul_(kept).addcmul_(p, delta[:, i0:i1], value=-1.0)
                ds_dot = torch.mul(ds, change, out=shaped(more[1], p.shape))
                ds_dot.addcmul_(p, delta_dot[:, i0:i1], value=-1.0)
                if do_dot is not None:
                    do_dot_i = t.queries(do_dot, i0, i1)
                    ds_dot.addcmul_(kept, product(do_dot_i, v.mT).view(p.shape))
                    add_product(dv, kept.view(shape).mT, do_dot_i)
                if self.v is not None:
                    ds_dot.addcmul_(kept, product(do_i, self.v[:, j0:j1].mT).view(p.shape))
                add_product(dv, (kept * change).view(shape).mT, do_i)
                if "dattn_mask" in out:
                    part, of_heads = part_of(out["dattn_mask"], i0, i1, j0, j1), parted(ds_dot, 0, t.each)
                    part += of_heads.sum_to_size(of_heads.shape[0], *part.shape[1:]).sum_to_size(part.shape)
                if tanh is not None:
                    slope = torch.addcmul(tanh.new_ones(()), tanh, tanh, value=-1.0)
                    ds.mul_(slope)
                    ds_dot.mul_(slope)
                    if u_dot is not None:
                        ds_dot.addcmul_(ds * tanh, u_dot, value=-2.0)
                ds, ds_dot = ds.view(shape), ds_dot.view(shape)
                of_queries = product(ds_dot, k)
                add_product(dk, ds_dot.mT, q)
                if self.k is not None:
                    add_product(of_queries, ds, self.k[:, j0:j1])
                if self.q is not None:
                    add_product(dk, ds.mT, t.queries(self.q, i0, i1))
                dq[:, :, i0:i1] += of_queries.view(*dq.shape[:2], i1 - i0, -1)
            if t.softcap:
                dk.mul_(t.softcap)
            for name, grad in (("dk", dk), ("dv", dv)):
                if name in out:
                    out[name][:, :, j0:j1] = parted(grad, 0, (len(t.rows), t.problem.spec.kv_heads))
        if "dq" in out:
            out["dq"].copy_(dq.mul_(t.scale).view(*t.each, t.q_len, -1))

    def scores(
        self, i0: int, i1: int, j0: int, j1: int, memory: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None] | None:
        """Return s, ṡ, softcap's tanh and u̇ of a tile (n·Hq, bm, bn); None if a block mask hides the whole tile.

        ṡ is None if it is 0, tanh and u̇ without softcap. They lie in `memory`.
        """
        t, blocks = self.t, None
        if self.blocks is not None:
            (m, n), device = t.problem.spec.options.block_size, t.q.device
            rows, keys = (
                torch.arange(*ends, dtype=torch.int64, device=device) // size
                for ends, size in (((i0, i1), m), ((j0, j1), n))
            )
            blocks = self.blocks[:, :, rows][..., keys]
            if not bool(blocks.any()):
                return None
        q = t.queries(t.q, i0, i1)
        s, tanh = t.scores(q, i0, i1, j0, j1, memory[0], memory[2] if t.softcap else memory[0])
        if blocks is not None:
            parted(s, 0, t.each).add_(added(blocks))
        u_dot = None
        if self.q is not None:
            u_dot = product(t.queries(self.q, i0, i1), t.keys(j0, j1).mT, shaped(memory[1], (*q.shape[:2], j1 - j0)))
        if self.k is not None:
            of_k = self.k[:, j0:j1].mT
            if u_dot is None:
                u_dot = product(q, of_k, shaped(memory[1], (*q.shape[:2], j1 - j0)))
            else:
                add_product(u_dot, q, of_k)
        u_dot = None if u_dot is None else u_dot.view(s.shape)
        s_dot = u_dot
        if tanh is not None and u_dot is not None:
            s_dot = torch.addcmul(tanh.new_ones(()), tanh, tanh, value=-1.0).mul_(u_dot).mul_(t.softcap)
        if self.mask is not None:
            of_mask = part_of(self.mask, i0, i1, j0, j1).float()
            s_dot = torch.zeros_like(s) if s_dot is None else s_dot
            parted(s_dot, 0, t.each).add_(of_mask)
        return s, s_dot, tanh, u_dot


def _finite_rows(t: Tiles, lse: Tensor) -> Tensor:
    """Return lse (n·Hq, sq, 1), with +∞ in the place of −∞: rows that see no key get probabilities of 0."""
    lse = lse.float().reshape(t.heads, -1, 1)
    return torch.where(lse == -INF, INF, lse)


def _and(p: Tensor, bits: Tensor) -> Tensor:
    """Return p (float32) with 0 where `bits` has none."""
    return torch.bitwise_and(p.view(torch.int32), bits).view(torch.float32)
