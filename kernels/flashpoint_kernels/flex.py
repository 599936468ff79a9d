"""`flex_attention`, with the signature of torch's function of that name: any `score_mod`, any `BlockMask`, gradients.

It runs by tiles of torch operations. A tile is TILE_Q queries and up to TILE_K keys of all heads: the scores of a tile
are computed, changed by `score_mod` and added to an online softmax, so memory is O(N) (FlashAttention, Dao et al. 2022,
Algorithm 1). The backward computes the scores again, and differentiates `score_mod` by autograd, tile by tile. Blocks
that the mask excludes for all heads are not computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from flashpoint_contract.options import UNBOUNDED, ProblemError
from flashpoint_kernels.operators.torch_rules import autocast, overridable, refuse_batched_gradients, refuse_transforms
from flashpoint_kernels.problems.memory import check_memory
from flashpoint_kernels.problems.modes import exact_products, flushing, traced, without_autocast
from flashpoint_kernels.problems.strides import empty_like

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask  # slow: imports torch._dynamo

TILE_Q, TILE_K = 128, 512
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreMod | None = None, block_mask: BlockMask | None = None,
    scale: float | None = None, enable_gqa: bool = False, return_lse: Literal[False] = False,
    kernel_options: Any = None, *, return_aux: None = None,
) -> Tensor: ...  # fmt: skip


@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreMod | None = None, block_mask: BlockMask | None = None,
    scale: float | None = None, enable_gqa: bool = False, *, return_lse: Literal[True], kernel_options: Any = None,
    return_aux: None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreMod | None = None, block_mask: BlockMask | None = None,
    scale: float | None = None, enable_gqa: bool = False, return_lse: Literal[False] = False,
    kernel_options: Any = None, *, return_aux: AuxRequest,
) -> tuple[Tensor, AuxOutput]: ...  # fmt: skip


@overridable
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Return softmax(score_mod(scale·query·keyᵀ))·value, where `block_mask` lets a query see a key.

    Args:
        query: (B, Hq, L, E), float16, bfloat16, float32 or float64. Scores are computed in float32, or in float64.
        key: (B or 1, Hk, S, E).
        value: (B or 1, Hk, S, Ev).
        score_mod: Function of a score, and of the numbers of its sequence, head, query and key, which are tensors
            without dimensions. It is mapped over a tile by `torch.vmap`, as in torch.
        block_mask: torch's BlockMask. Keys in blocks that it does not list are not visible; in blocks that are not
            full, its `mask_mod` decides which keys are visible.
        scale: Factor of query·key. None is 1/sqrt(E).
        enable_gqa: Hq may be a multiple of Hk: each key head has Hq/Hk query heads.
        return_lse: Return (out, lse).
        kernel_options: Changes nothing: these options choose a schedule.
        return_aux: Return (out, AuxOutput), with the values that this AuxRequest names: lse, max_scores.

    Returns:
        out, (B, Hq, L, Ev), in query's dtype, with the dimensions in the order of query's strides; lse and max_scores
        are (B, Hq, L), float32, or float64 for float64. A query that sees no key has out = 0 and lse = −∞.

        Differentiable once, in query, key, value, and the tensors that `score_mod` captures and that require a
        gradient, through out and lse.

    Raises:
        ProblemError: a ValueError whose `errors` name what is not valid.
    """
    refuse_transforms((("query", query), ("key", key), ("value", value)))
    query, key, value = autocast(query, key, value)
    _check(query, key, value, score_mod, block_mask, enable_gqa, return_lse, return_aux)
    check_memory(query=query, key=key, value=value)
    key, value = (t.expand(query.shape[0], -1, -1, -1) for t in (key, value))
    blocks = None if block_mask is None else _Blocks.of(block_mask, query.shape[2], key.shape[2])
    scale = 1 / math.sqrt(max(query.shape[3], 1)) if scale is None else scale
    out, lse, largest = _run(_Flex(float(scale), score_mod, blocks), query, key, value)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse if return_aux.lse else None, largest if return_aux.max_scores else None)
    return (out, lse) if return_lse else out


def _check(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreMod | None, block_mask: BlockMask | None,
    enable_gqa: bool, return_lse: bool, return_aux: AuxRequest | None,
) -> None:  # fmt: skip
    if traced() and not (score_mod is None and block_mask is None):
        name = "block_mask" if score_mod is None else "score_mod"
        raise ProblemError([(name, "is not available under torch.jit.trace, as in torch: use torch.compile")])
    errors = []
    for name, t in (("query", query), ("key", key), ("value", value)):
        if t.ndim != 4:
            raise ProblemError([(name, f"must have 4 dimensions, (batch, heads, rows, columns), not {t.ndim}")])
        if not t.is_floating_point() or t.dtype.itemsize == 1:
            errors.append((name, f"must be float16, bfloat16, float32 or float64, not {t.dtype}"))
        if (t.dtype, t.device) != (query.dtype, query.device):
            errors.append((name, f"is {t.dtype} on {t.device}, and query {query.dtype} on {query.device}"))
    (batch, heads, length, _), (_, kv_heads, keys, _) = query.shape, key.shape
    if query.shape[3] != key.shape[3]:
        errors.append(("key", f"has {key.shape[3]} columns, and query {query.shape[3]}"))
    if value.shape[:3] != key.shape[:3]:
        errors.append(("value", f"has shape {tuple(value.shape)}, and key {tuple(key.shape)}"))
    if len(key) not in (1, batch):
        errors.append(("key", f"has {len(key)} sequences, and query {batch}"))
    if heads != kv_heads and not (enable_gqa and kv_heads and heads % kv_heads == 0):
        shared = "" if enable_gqa else "; enable_gqa=True shares key heads"
        errors.append(("key", f"has {kv_heads} heads, and query {heads}{shared}"))
    if return_lse and return_aux is not None:
        errors.append(("return_lse", "must be False with return_aux: ask for AuxRequest(lse=True)"))
    if block_mask is not None:
        counts = block_mask.kv_num_blocks
        if counts.shape[0] not in (1, batch) or counts.shape[1] not in (1, heads):
            errors.append(("block_mask", f"is for {tuple(counts.shape[:2])} sequences and heads, not {(batch, heads)}"))
        # torch's mask for "no mask" has one block, which is larger than any length, and the lengths (1, 1).
        covered = block_mask.seq_lengths if min(block_mask.BLOCK_SIZE) < UNBOUNDED else block_mask.BLOCK_SIZE
        if covered[0] < length or covered[1] < keys:
            errors.append(("block_mask", f"is for {block_mask.seq_lengths} queries and keys, not {(length, keys)}"))
    if errors:
        raise ProblemError(errors)


@dataclass(eq=False)
class _Blocks:
    """A BlockMask as bool tensors (B or 1, Hq or 1, rows, columns) with one element for each block.

    `seen` marks the blocks with a visible score, `full` the blocks in which all scores are visible.
    """

    seen: Tensor
    full: Tensor
    size: tuple[int, int]
    mask_mod: Callable[..., Tensor]

    @classmethod
    def of(cls, mask: BlockMask, queries: int, keys: int) -> _Blocks:
        size = mask.BLOCK_SIZE
        columns = -(-max(keys, mask.seq_lengths[1]) // size[1])
        partial = _dense(mask.kv_num_blocks, mask.kv_indices, columns)
        full = torch.zeros_like(partial)
        if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
            full = _dense(mask.full_kv_num_blocks, mask.full_kv_indices, columns)
        return cls(partial | full, full, size, mask.mask_mod)

    def keys_of(self, first: int, stop: int, keys: int) -> Tensor:
        """Return, in order, the indices of keys in the blocks that at least one head sees for queries [first, stop)."""
        rows = self.seen[:, :, first // self.size[0] : -(-stop // self.size[0])]
        named = rows.flatten(0, 2).any(0)
        places = torch.arange(keys, dtype=torch.int64, device=named.device)
        return places[named[places // self.size[1]]]

    def allowed(self, numbers: Sequence[Tensor]) -> Tensor | None:
        """Return which scores are visible for these sequences, heads, queries and keys; None if all are visible."""
        _, _, i, j = numbers
        rows, columns = i // self.size[0], j // self.size[1]
        seen, full = (t[:, :, rows][..., columns] for t in (self.seen, self.full))
        if bool(full.all()):
            return None
        return seen & (full | _mapped(self.mask_mod, numbers))


def _dense(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Return a bool mask (B, H, rows, columns): the blocks that the first `counts` entries of `indices` name."""
    place = torch.arange(indices.shape[-1], dtype=torch.int64, device=indices.device)
    named = torch.where(place < counts[..., None], indices.long(), columns)
    flags = torch.zeros(*counts.shape, columns + 1, dtype=torch.bool, device=counts.device)
    return flags.scatter_(-1, named, True)[..., :columns]


def _mapped(function: Callable[..., Tensor], numbers: Sequence[Tensor], *scores: Tensor) -> Tensor:
    """Return `function` applied to each score (if given) and its four indices: (B, H, queries, keys)."""
    for axis in (3, 2, 1, 0):
        dims = tuple(0 if n == axis else None for n in range(4))
        function = torch.vmap(function, in_dims=(*((0,) * len(scores)), *dims))
    return function(*scores, *numbers)


@dataclass(eq=False)
class _Flex:
    """The options of one call: the scale, `score_mod`, and the blocks that queries see."""

    scale: float
    score_mod: ScoreMod | None
    blocks: _Blocks | None

    def tiles(self, q: Tensor, k: Tensor) -> Iterator[tuple[slice, list[slice | Tensor]]]:
        """Yield a tile's queries, and the tiles of keys that at least one of these queries sees."""
        for first in range(0, q.shape[2], TILE_Q):
            rows = slice(first, min(first + TILE_Q, q.shape[2]))
            if self.blocks is None:
                yield rows, [slice(n, min(n + TILE_K, k.shape[2])) for n in range(0, k.shape[2], TILE_K)]
                continue
            keys = self.blocks.keys_of(rows.start, rows.stop, k.shape[2])
            yield rows, [_as_slice(part) for part in torch.split(keys, TILE_K) if len(part)]

    def numbers(self, q: Tensor, rows: slice, columns: slice | Tensor) -> list[Tensor]:
        """Return the indices of a tile's sequences, heads, queries and keys."""
        keys = columns if isinstance(columns, Tensor) else _range(columns, q.device)
        return [_range(slice(0, n), q.device) for n in q.shape[:2]] + [_range(rows, q.device), keys]

    def scores(self, products: Tensor, numbers: list[Tensor]) -> Tensor:
        """Return the scores from scaled products (B, Hq, queries, keys), −∞ where a query does not see a key."""
        scores = products
        if self.score_mod is not None:
            scores = _mapped(self.score_mod, numbers, scores).to(products.dtype)
        allowed = None if self.blocks is None else self.blocks.allowed(numbers)
        return scores if allowed is None else torch.where(allowed, scores, -torch.inf)


def _range(part: slice, device: torch.device) -> Tensor:
    return torch.arange(part.start, part.stop, dtype=torch.int64, device=device)


def _as_slice(keys: Tensor) -> slice | Tensor:
    """Return indices of adjacent keys as a slice, because indexing with a slice copies nothing."""
    first, last = int(keys[0]), int(keys[-1])
    return slice(first, last + 1) if last - first + 1 == len(keys) else keys


def _exact(t: Tensor) -> Tensor:
    """Return a tile, contiguous, in the data type in which products are computed."""
    return t.to(_products_dtype(t)).contiguous()


def _wide(t: Tensor) -> Tensor:
    """Return a 16-bit tensor in float32; return any other tensor unchanged."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def _products_dtype(t: Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def _grouped(t: Tensor, heads: int) -> Tensor:
    """Return (B, Hq, rows, …) as (B, heads, Hq/heads·rows, …): one key head gets the rows of all its query heads."""
    return t.reshape(len(t), heads, t.shape[1] // max(heads, 1) * t.shape[2], t.shape[3])


class _Tiled(torch.autograd.Function):
    """The autograd function with outputs out, lse and the largest score of each query.

    Inputs after v are the tensors that score_mod captures.
    """

    @staticmethod
    @without_autocast()
    @exact_products()
    @flushing(False)
    def forward(
        ctx: Any, flex: _Flex, q: Tensor, k: Tensor, v: Tensor, *captured: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = k.shape[1]
        out = empty_like(q, (*q.shape[:3], v.shape[3])).zero_()
        lse = torch.full(q.shape[:3], -torch.inf, device=q.device, dtype=_products_dtype(q))
        largest = lse.clone()
        for rows, tiles in flex.tiles(q, k):
            queries = _grouped(_exact(q[:, :, rows]), heads)
            largest_so_far = queries.new_full((*q.shape[:2], rows.stop - rows.start, 1), -torch.inf)
            total, sums = torch.zeros_like(largest_so_far), queries.new_zeros(*largest_so_far.shape[:3], v.shape[3])
            for columns in tiles:
                keys, values = _exact(k[:, :, columns]), _exact(v[:, :, columns])
                products = (queries @ keys.mT).view(*largest_so_far.shape[:3], -1) * flex.scale
                scores = flex.scores(products, flex.numbers(q, rows, columns))
                new_largest = torch.maximum(largest_so_far, scores.amax(-1, keepdim=True))
                base = new_largest.masked_fill(new_largest == -torch.inf, 0)
                p, alpha = (scores - base).exp(), (largest_so_far - base).exp()
                total = total * alpha + p.sum(-1, keepdim=True)
                sums = sums * alpha + (_grouped(p, heads) @ values).view(sums.shape)
                largest_so_far = new_largest
            seen = total != 0
            out[:, :, rows] = torch.where(seen, sums / total, 0).to(q.dtype)
            lse[:, :, rows] = torch.where(seen, largest_so_far + total.log(), -torch.inf).squeeze(-1)
            largest[:, :, rows] = largest_so_far.squeeze(-1)
        ctx.flex, ctx.captured = flex, captured  # costs no memory: score_mod refers to the captured tensors, too
        ctx.save_for_backward(q, k, v, out, lse, *captured)
        ctx.mark_non_differentiable(largest)
        ctx.set_materialize_grads(False)
        return out, lse, largest

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        refuse_batched_gradients(dout, dlse)
        q, k, v, out, lse = ctx.saved_tensors[:5]  # also checks that no captured tensor was changed in place
        dout = torch.zeros_like(out) if dout is None else dout
        gradients = _TiledGradient.apply(ctx.flex, ctx.captured, q, k, v, out, lse, dout, dlse)  # type: ignore[no-untyped-call]
        return None, *gradients


class _TiledGradient(torch.autograd.Function):
    """Computes dq, dk, dv and the gradients of captured tensors. A second derivative raises RuntimeError."""

    @staticmethod
    @without_autocast()
    @exact_products()
    @flushing(False)
    def forward(
        ctx: Any, flex: _Flex, captured: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        dout: Tensor, dlse: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        heads = k.shape[1]
        dq = torch.zeros_like(q)
        dk, dv = (torch.zeros_like(t, dtype=_products_dtype(t)) for t in (k, v))
        leaves = {id(t): _wide(t.detach()).requires_grad_() for t in captured}
        of_captured = [torch.zeros_like(leaf) for leaf in leaves.values()]
        rounds = any(leaf.dtype != t.dtype for leaf, t in zip(leaves.values(), captured, strict=True))
        for rows, tiles in flex.tiles(q, k):
            queries, do = _exact(q[:, :, rows]), _exact(dout[:, :, rows])
            delta = (do * _exact(out[:, :, rows])).sum(-1, keepdim=True)
            if dlse is not None:
                delta = delta - dlse[:, :, rows, None]
            sums = lse[:, :, rows, None].to(queries.dtype)
            base = sums.masked_fill(sums == -torch.inf, 0)
            grouped, of_rows = _grouped(queries, heads), torch.zeros_like(_grouped(queries, heads))
            for columns in tiles:
                keys, values = _exact(k[:, :, columns]), _exact(v[:, :, columns])
                products = (grouped @ keys.mT).view(*queries.shape[:3], -1) * flex.scale
                numbers = flex.numbers(q, rows, columns)
                with torch.enable_grad(), _Captured(leaves):
                    products = products.requires_grad_(flex.score_mod is not None)
                    scores = flex.scores(products, numbers)
                # With 16-bit tensors, the score_mod that is differentiated rounds less than that of the forward.
                p = ((flex.scores(products.detach(), numbers) if rounds else scores.detach()) - base).exp()
                dp = (_grouped(do, heads) @ values.mT).view(p.shape)
                ds = p * (dp - delta)
                if flex.score_mod is not None:
                    ds = _through(scores, ds, products, tuple(leaves.values()), of_captured)
                weights = _grouped(ds * flex.scale, heads)
                of_rows += weights @ keys
                dk[:, :, columns] += weights.mT @ grouped
                dv[:, :, columns] += _grouped(p, heads).mT @ _grouped(do, heads)
            dq[:, :, rows] = of_rows.view(queries.shape).to(q.dtype)
        return dq, dk.to(k.dtype), dv.to(v.dtype), *(g.to(t.dtype) for g, t in zip(of_captured, captured, strict=True))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        raise RuntimeError("second-order gradients of attention are not available")


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


class _Captured(TorchFunctionMode):
    """Find the tensors that score_mod captures: the arguments of its torch functions that require a gradient.

    Intermediate tensors of score_mod require no gradient, because gradients are off. With `instead`, replace captured
    tensors: it maps the id of each to a leaf of autograd, at which the tile's derivative ends. Then 16-bit arguments
    are computed with in float32, so that autograd sums in float32 what many scores add to one number.
    """

    def __init__(self, instead: Mapping[int, Tensor] | None = None) -> None:
        super().__init__()
        self.found: dict[int, Tensor] = {}
        self._instead = instead

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name: str = getattr(func, "__name__", "")
        in_place = name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
        written = args[:1] if in_place else ()  # not replaced: score_mod reads it later
        args, kwargs = tree_map_only(Tensor, self._see, (args[len(written) :], kwargs or {}))
        return func(*written, *args, **kwargs)

    def _see(self, t: Tensor) -> Tensor:
        if self._instead is not None:
            return _wide(self._instead.get(id(t), t))
        if t.requires_grad:
            self.found[id(t)] = t
        return t


def _captured(flex: _Flex, q: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that score_mod uses and that require a gradient, found by a call with one score."""
    if flex.score_mod is None or not torch.is_grad_enabled() or not q.numel():
        return ()
    one = [torch.zeros(1, dtype=torch.long, device=q.device)] * 4
    with torch.no_grad(), _Captured() as seen:
        _mapped(flex.score_mod, one, q.new_zeros(1, 1, 1, 1, dtype=_products_dtype(q)))
    return tuple(seen.found.values())


def _run(flex: _Flex, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute outside of a compiled program: `torch.compile` breaks its graph at this function."""
    answers: tuple[Tensor, Tensor, Tensor] = _Tiled.apply(flex, q, k, v, *_captured(flex, q))  # type: ignore[no-untyped-call]
    return answers


_run = torch._disable_dynamo(_run)  # type: ignore[attr-defined]  # torch.compiler.disable imports torch._dynamo: seconds
