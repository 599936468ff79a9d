"""Flex attention by tiles of torch operations: the forward, the gradients, and their derivatives along a direction.

The autograd functions are closed under differentiation, as those of derivatives.py, which has the rules. `score_mod` is
differentiated by autograd, tile by tile: with g(w) the gradient of <w, scores>, which is linear in w, and ṗ the
direction of the products and of the captured tensors, the gradient of <g(w), ṗ> for w is the tangent of the scores.

Tensors that `score_mod` captures are arguments of the autograd functions, in the order of `Flex.captured`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashpoint_kernels.operators.derivatives import THIRD, TWICE, applied, asks, keep, looped
from flashpoint_kernels.operators.scores import Captured, Flex, exact, grouped_by, products_dtype
from flashpoint_kernels.problems.modes import exact_products, flushing, without_autocast
from flashpoint_kernels.problems.strides import empty_like


def _settled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, decorated: modes of the program do not change its bits."""
    return without_autocast()(exact_products()(flushing(False)(function)))


@looped
class FlexAttention(torch.autograd.Function):
    """The function with outputs out, lse and the largest score of each query. Arguments: flex, q, k, v, captured."""

    @staticmethod
    @_settled
    def forward(flex: Flex, q: Tensor, k: Tensor, v: Tensor, *captured: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = k.shape[1]
        out = empty_like(q, (*q.shape[:3], v.shape[3])).zero_()
        lse = torch.full(q.shape[:3], -torch.inf, device=q.device, dtype=products_dtype(q))
        largest = lse.clone()
        for rows, tiles in flex.tiles(q, k):
            queries = grouped_by(exact(q[:, :, rows]), heads)
            largest_so_far = queries.new_full((*q.shape[:2], rows.stop - rows.start, 1), -torch.inf)
            total, sums = torch.zeros_like(largest_so_far), queries.new_zeros(*largest_so_far.shape[:3], v.shape[3])
            for columns in tiles:
                keys, values = exact(k[:, :, columns]), exact(v[:, :, columns])
                products = (queries @ keys.mT).view(*largest_so_far.shape[:3], -1) * flex.scale
                with flex.replaced(captured):
                    scores = flex.scores(products, flex.numbers(q, rows, columns))
                new_largest = torch.maximum(largest_so_far, scores.amax(-1, keepdim=True))
                base = new_largest.masked_fill(new_largest == -torch.inf, 0)
                p, alpha = (scores - base).exp(), (largest_so_far - base).exp()
                total = total * alpha + p.sum(-1, keepdim=True)
                sums = sums * alpha + (grouped_by(p, heads) @ values).view(sums.shape)
                largest_so_far = new_largest
            seen = total != 0
            out[:, :, rows] = torch.where(seen, sums / total, 0).to(q.dtype)
            lse[:, :, rows] = torch.where(seen, largest_so_far + total.log(), -torch.inf).squeeze(-1)
            largest[:, :, rows] = largest_so_far.squeeze(-1)
        return out, lse, largest

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.flex, *tensors = inputs
        out, lse, largest = output
        ctx.mark_non_differentiable(largest)
        keep(ctx, *tensors[:3], out, lse, *tensors[3:])

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *captured = ctx.saved_tensors  # also checks that no captured tensor was changed in place
        if dout is None and dlse is None:
            return (None,) * (4 + len(captured))
        dout = torch.zeros_like(out) if dout is None else dout
        return None, *applied(FlexGradients, ctx.flex, q, k, v, out, lse, dout, dlse, *captured)

    @staticmethod
    def jvp(ctx: Any, _: None, *dots: Any) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *captured = ctx.saved_tensors
        if all(t is None for t in dots):
            return None, None, None
        return *applied(FlexTangents, ctx.flex, q, k, v, out, lse, *captured, *dots), None


@looped
class FlexGradients(torch.autograd.Function):
    """dq, dk, dv and the gradients of captured tensors. Arguments: flex, q, k, v, out, lse, dout, dlse, captured."""

    @staticmethod
    @_settled
    def forward(
        flex: Flex, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
        *captured: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        heads = k.shape[1]
        dq = torch.zeros_like(q)
        dk, dv = (torch.zeros_like(t, dtype=products_dtype(t)) for t in (k, v))
        leaves = flex.leaves(captured)
        of_captured = [torch.zeros_like(leaf) for leaf in leaves.values()]
        rounds = any(leaf.dtype != t.dtype for leaf, t in zip(leaves.values(), captured, strict=True))
        for rows, tiles in flex.tiles(q, k):
            queries, do = exact(q[:, :, rows]), exact(dout[:, :, rows])
            delta = (do * exact(out[:, :, rows])).sum(-1, keepdim=True)
            if dlse is not None:
                delta = delta - dlse[:, :, rows, None]
            sums = lse[:, :, rows, None].to(queries.dtype)
            base = sums.masked_fill(sums == -torch.inf, 0)
            grouped, of_rows = grouped_by(queries, heads), torch.zeros_like(grouped_by(queries, heads))
            for columns in tiles:
                keys, values = exact(k[:, :, columns]), exact(v[:, :, columns])
                products = (grouped @ keys.mT).view(*queries.shape[:3], -1) * flex.scale
                numbers = flex.numbers(q, rows, columns)
                with torch.enable_grad(), Captured(leaves):
                    products = products.requires_grad_(flex.score_mod is not None)
                    scores = flex.scores(products, numbers)
                p = flex.rounded(scores, products, numbers, captured, rounds)
                p = (p - base).exp()
                dp = (grouped_by(do, heads) @ values.mT).view(p.shape)
                ds = p * (dp - delta)
                if flex.score_mod is not None:
                    ds = _through(scores, ds, products, tuple(leaves.values()), of_captured)
                weights = grouped_by(ds * flex.scale, heads)
                of_rows += weights @ keys
                dk[:, :, columns] += weights.mT @ grouped
                dv[:, :, columns] += grouped_by(p, heads).mT @ grouped_by(do, heads)
            dq[:, :, rows] = of_rows.view(queries.shape).to(q.dtype)
        return dq, dk.to(k.dtype), dv.to(v.dtype), *(g.to(t.dtype) for g, t in zip(of_captured, captured, strict=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.flex, *tensors = inputs
        keep(ctx, *tensors)

    @staticmethod
    def backward(ctx: Any, *along: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, dout, dlse, *captured = ctx.saved_tensors
        if all(t is None for t in along):
            return (None,) * (8 + len(captured))
        found = applied(FlexSecond, ctx.flex, q, k, v, out, lse, dout, dlse, *captured, *along, None, None)
        of_dout, of_dlse, dq, dk, dv, *of_captured = found
        return None, dq, dk, dv, None, None, of_dout, None if dlse is None else of_dlse.to(dlse.dtype), *of_captured

    @staticmethod
    def jvp(ctx: Any, _: None, *dots: Any) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, dout, dlse, *captured = ctx.saved_tensors
        of_inputs, (dout_dot, dlse_dot) = (*dots[:3], *dots[7:]), dots[5:7]
        if all(t is None for t in (*of_inputs, dout_dot, dlse_dot)):
            return (None,) * (3 + len(captured))
        found = applied(
            FlexSecond, ctx.flex, q, k, v, out, lse, dout, dlse, *captured, *of_inputs, dout_dot, dlse_dot
        )  # fmt: skip
        return tuple(found[2:])


@looped
class FlexTangents(torch.autograd.Function):
    """The tangents of out and lse. Arguments: flex, q, k, v, out, lse, captured, directions of q, k, v and these."""

    @staticmethod
    @_settled
    def forward(flex: Flex, *tensors: Any) -> tuple[Tensor, Tensor]:
        q, _, _, out, lse, *_ = tensors
        _, out_dot, lse_dot = _tangents(flex, *tensors)
        answer = empty_like(q, out.shape, out.dtype).copy_(out_dot)
        return answer, lse_dot.squeeze(-1).to(lse.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.flex, *tensors = inputs
        keep(ctx, *tensors)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *rest = ctx.saved_tensors
        captured, dots = rest[: len(ctx.flex.captured)], rest[len(ctx.flex.captured) :]
        if dout is None and dlse is None:
            return (None,) * (6 + len(rest))
        dout = torch.zeros_like(out) if dout is None else dout
        given = (ctx.flex, q, k, v, out, lse, dout, dlse, *captured)
        _, _, dq, dk, dv, *of_captured = applied(FlexSecond, *given, *dots, None, None)
        linear = applied(FlexGradients, *given)
        of_dots = (g if dot is not None else None for g, dot in zip(linear, dots, strict=True))
        return None, dq, dk, dv, None, None, *of_captured, *of_dots

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        raise RuntimeError(TWICE)


@looped
class FlexSecond(torch.autograd.Function):
    """The tangents of out, lse and of the gradients.

    Arguments: those of `FlexGradients`, and the directions of q, k, v, the captured tensors, dout and dlse.
    """

    @staticmethod
    @_settled
    def forward(flex: Flex, *tensors: Any) -> tuple[Tensor, ...]:
        return _second(flex, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.flex, *tensors = inputs
        ctx.given = [isinstance(t, Tensor) for t in inputs]
        keep(ctx, *tensors)

    @staticmethod
    def backward(ctx: Any, dout_dot: Tensor | None, dlse_dot: Tensor | None, *along: Any) -> tuple[Any, ...]:
        """Return the gradients of the directions, in which this function is linear, and its own transpose."""
        fixed = 8 + len(ctx.flex.captured)
        if any(asks(ctx, n) for n in range(fixed)):
            raise RuntimeError(THIRD)
        of_dout, of_dlse, *grads = applied(
            FlexSecond, ctx.flex, *ctx.saved_tensors[: fixed - 1], *along, dout_dot, dlse_dot
        )
        found = (g if yes else None for g, yes in zip((*grads, of_dout, of_dlse), ctx.given[fixed:], strict=True))
        return *(None,) * fixed, *found

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        raise RuntimeError(THIRD)


def _tangents(
    flex: Flex, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, its tangent and that of lse (B, Hq, L, 1), in the dtype of products."""
    captured, dots = rest[: len(flex.captured)], rest[len(flex.captured) :]
    q_dot, k_dot, v_dot, *of_captured = dots
    heads, leaves = k.shape[1], flex.leaves(captured)
    found = q.new_zeros((2, *out.shape), dtype=products_dtype(q))
    exact_out, out_dot = found
    lse_dot = q.new_zeros((*q.shape[:3], 1), dtype=products_dtype(q))
    for rows, tiles in flex.tiles(q, k):
        base = _base(lse, rows, out_dot.dtype)
        for columns in tiles:
            tile = _Tile.of(flex, q, k, q_dot, k_dot, rows, columns, leaves, captured)
            s_dot = tile.scores_along(of_captured)
            p, values = (tile.values - base).exp(), exact(v[:, :, columns])
            weights = p * s_dot
            lse_dot[:, :, rows] += weights.sum(-1, keepdim=True)
            exact_out[:, :, rows] += (grouped_by(p, heads) @ values).view(exact_out[:, :, rows].shape)
            sums = grouped_by(weights, heads) @ values
            if v_dot is not None:
                sums += grouped_by(p, heads) @ exact(v_dot[:, :, columns])
            out_dot[:, :, rows] += sums.view(out_dot[:, :, rows].shape)
    out_dot -= lse_dot * exact_out
    return exact_out, out_dot, lse_dot


def _second(
    flex: Flex, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    *rest: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    count = len(flex.captured)
    captured, (q_dot, k_dot, v_dot, *of_captured, dout_dot, dlse_dot) = rest[:count], rest[count:]
    exact_out, out_dot, lse_dot = _tangents(flex, q, k, v, out, lse, *captured, q_dot, k_dot, v_dot, *of_captured)
    heads, leaves = k.shape[1], flex.leaves(captured)
    dq, dk, dv = (torch.zeros_like(t, dtype=products_dtype(t)) for t in (q, k, v))
    sums = [torch.zeros_like(leaf) for leaf in leaves.values()]
    for rows, tiles in flex.tiles(q, k):
        do, base = exact(dout[:, :, rows]), _base(lse, rows, out_dot.dtype)
        delta = (do * exact_out[:, :, rows]).sum(-1, keepdim=True)
        delta_dot = (do * out_dot[:, :, rows]).sum(-1, keepdim=True)
        do_dot = None if dout_dot is None else exact(dout_dot[:, :, rows])
        if do_dot is not None:
            delta_dot += (do_dot * exact_out[:, :, rows]).sum(-1, keepdim=True)
        if dlse is not None:
            delta -= dlse[:, :, rows, None]
        if dlse_dot is not None:
            delta_dot -= dlse_dot[:, :, rows, None]
        for columns in tiles:
            tile = _Tile.of(flex, q, k, q_dot, k_dot, rows, columns, leaves, captured)
            values = exact(v[:, :, columns])
            p = (tile.values - base).exp()
            ds = p * ((grouped_by(do, heads) @ values.mT).view(p.shape) - delta)
            change = tile.scores_along(of_captured, ds) - lse_dot[:, :, rows]
            rate = -delta_dot
            if do_dot is not None:
                rate = rate + (grouped_by(do_dot, heads) @ values.mT).view(p.shape)
            if v_dot is not None:
                rate = rate + (grouped_by(do, heads) @ exact(v_dot[:, :, columns]).mT).view(p.shape)
            da, da_dot = tile.back(ds * change + p * rate, sums)
            weights, along = grouped_by(da_dot * flex.scale, heads), grouped_by(da * flex.scale, heads)
            of_rows = weights @ tile.keys
            dk[:, :, columns] += weights.mT @ tile.grouped
            if k_dot is not None:
                of_rows = of_rows + along @ exact(k_dot[:, :, columns])
            if q_dot is not None:
                dk[:, :, columns] += along.mT @ grouped_by(exact(q_dot[:, :, rows]), heads)
            dq[:, :, rows] += of_rows.view(dq[:, :, rows].shape)
            dv[:, :, columns] += grouped_by(p * change, heads).mT @ grouped_by(do, heads)
            if do_dot is not None:
                dv[:, :, columns] += grouped_by(p, heads).mT @ grouped_by(do_dot, heads)
    answers = (empty_like(q, out.shape, out.dtype).copy_(out_dot), lse_dot.squeeze(-1).to(lse.dtype))
    inputs = (t for t in (q, k, v, *captured) if t is not None)
    grads = (total.to(t.dtype) for total, t in zip((dq, dk, dv, *sums), inputs, strict=True))
    return *answers, *grads


def _base(lse: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
    """Return lse of queries (B, Hq, rows, 1), with 0 for queries that see no key."""
    sums = lse[:, :, rows, None].to(dtype)
    return sums.masked_fill(sums == -torch.inf, 0)


@dataclass(eq=False)
class _Tile:
    """The scores of a tile, recorded by autograd from the products and the captured tensors, and their direction."""

    keys: Tensor
    grouped: Tensor  # queries, as `grouped_by` returns them
    products: Tensor
    scores: Tensor
    values: Tensor  # the scores of the forward, which rounds as 16-bit captured tensors do
    leaves: tuple[Tensor, ...]
    along: Tensor  # the direction of the products
    inner: Tensor | None = None
    first: Tensor | None = None

    @classmethod
    def of(
        cls, flex: Flex, q: Tensor, k: Tensor, q_dot: Tensor | None, k_dot: Tensor | None, rows: slice,
        columns: slice | Tensor, leaves: dict[int, Tensor], captured: Sequence[Tensor | None],
    ) -> _Tile:  # fmt: skip
        queries, keys = exact(q[:, :, rows]), exact(k[:, :, columns])
        grouped = grouped_by(queries, k.shape[1])
        shape = (*queries.shape[:3], keys.shape[2])
        along = grouped.new_zeros(shape)
        if q_dot is not None:
            along = along + (grouped_by(exact(q_dot[:, :, rows]), k.shape[1]) @ keys.mT).view(shape)
        if k_dot is not None:
            along = along + (grouped @ exact(k_dot[:, :, columns]).mT).view(shape)
        numbers, rounds = flex.numbers(q, rows, columns), False
        for leaf, t in zip(leaves.values(), captured, strict=True):
            rounds = rounds or (t is not None and leaf.dtype != t.dtype)
        with torch.enable_grad(), Captured(leaves):
            products = ((grouped @ keys.mT).view(shape) * flex.scale).detach().requires_grad_()
            scores = flex.scores(products, numbers)
        values = flex.rounded(scores, products, numbers, captured, rounds)
        return cls(keys, grouped, products, scores, values, tuple(leaves.values()), along * flex.scale)

    def scores_along(self, of_captured: Sequence[Tensor | None], weights: Tensor | None = None) -> Tensor:
        """Return the tangent of the scores. `weights`, the gradient of the scores, is kept for `back`."""
        if not self.scores.requires_grad:  # score_mod uses neither the score nor a captured tensor
            return torch.zeros_like(self.scores)
        with torch.enable_grad():
            w = (torch.zeros_like(self.scores) if weights is None else weights).detach().requires_grad_()
            ends = (self.products, *self.leaves)
            grads = torch.autograd.grad(self.scores, ends, w, create_graph=True, allow_unused=True)
            self.first = grads[0]
            parts = [
                (g * dot.to(g.dtype)).sum()
                for g, dot in zip(grads, (self.along, *of_captured), strict=True)
                if g is not None and dot is not None and g.requires_grad
            ]
            if not parts:
                return torch.zeros_like(self.scores)
            self.inner = torch.stack(parts).sum()
            (found,) = torch.autograd.grad(self.inner, w, retain_graph=True, allow_unused=True)
        return torch.zeros_like(self.scores) if found is None else found

    def back(self, change: Tensor, sums: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the gradient of the products and its tangent; add the tangents of captured tensors to `sums`.

        `change` is the tangent of the gradient of the scores.
        """
        nothing = torch.zeros_like(self.products)
        if not self.scores.requires_grad:
            return nothing, nothing
        with torch.enable_grad():
            total = (self.scores * change).masked_fill(self.scores == -torch.inf, 0).sum()
            total = total if self.inner is None else total + self.inner
            found = torch.autograd.grad(total, (self.products, *self.leaves), allow_unused=True)
        for whole, part in zip(sums, found[1:], strict=True):
            if part is not None:
                whole += part
        first = nothing if self.first is None else self.first.detach()
        return first, nothing if found[0] is None else found[0]


def _through(
    scores: Tensor, ds: Tensor, products: Tensor, captured: Sequence[Tensor], of_captured: Sequence[Tensor]
) -> Tensor:
    """Differentiate `score_mod` on one tile: return the gradient of `products`, from `ds`, the gradient of `scores`.

    The gradients of the `captured` tensors are added to `of_captured`.
    """
    if not scores.requires_grad:  # score_mod uses neither the score nor a captured tensor
        return torch.zeros_like(products)
    gradients = torch.autograd.grad(scores, (products, *captured), ds, allow_unused=True)
    for total, gradient in zip(of_captured, gradients[1:], strict=True):
        if gradient is not None:
            total += gradient
    return torch.zeros_like(products) if gradients[0] is None else gradients[0]
