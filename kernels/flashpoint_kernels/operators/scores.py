"""The scores of flex attention: blocks, `score_mod`, and the tensors that it captures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from flashpoint_kernels.operators.derivatives import transformed

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask  # slow: imports torch._dynamo

TILE_Q, TILE_K = 128, 512
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(eq=False)
class Blocks:
    """A BlockMask as bool tensors (B or 1, Hq or 1, rows, columns) with one element for each block.

    `seen` marks the blocks with a visible score, `full` the blocks in which all scores are visible.
    """

    seen: Tensor
    full: Tensor
    size: tuple[int, int]
    mask_mod: Callable[..., Tensor]

    @classmethod
    def of(cls, mask: BlockMask, queries: int, keys: int) -> Blocks:
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
class Flex:
    """The options of one call: the scale, `score_mod` with the tensors that it captures, and the blocks that are seen.

    `moved`: the captured tensors are wrapped by a transform, so that values replace them in the forward, too.
    """

    scale: float
    score_mod: ScoreMod | None
    blocks: Blocks | None
    captured: tuple[Tensor, ...] = ()
    moved: bool = False

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

    def leaves(self, captured: Sequence[Tensor | None]) -> dict[int, Tensor]:
        """Return a leaf of autograd for each captured tensor, with its value, by the tensor's id."""
        values = [wide(t.detach()).requires_grad_() for t in captured if t is not None]
        return {id(t): leaf for t, leaf in zip(self.captured, values, strict=True)}

    def replaced(self, captured: Sequence[Tensor | None]) -> AbstractContextManager[Any]:
        """Return a context in which values replace captured tensors that a transform wraps."""
        if not self.moved:
            return nullcontext()
        return Captured(
            {id(t): value for t, value in zip(self.captured, captured, strict=True) if value is not None}, wide=False
        )

    def rounded(
        self, scores: Tensor, products: Tensor, numbers: list[Tensor], captured: Sequence[Tensor | None], rounds: bool
    ) -> Tensor:
        """Return the scores of the forward. With 16-bit tensors, those that are differentiated round less."""
        if not rounds:
            return scores.detach()
        with self.replaced(captured):
            return self.scores(products.detach(), numbers)


def _range(part: slice, device: torch.device) -> Tensor:
    return torch.arange(part.start, part.stop, dtype=torch.int64, device=device)


def _as_slice(keys: Tensor) -> slice | Tensor:
    """Return indices of adjacent keys as a slice, because indexing with a slice copies nothing."""
    first, last = int(keys[0]), int(keys[-1])
    return slice(first, last + 1) if last - first + 1 == len(keys) else keys


def exact(t: Tensor) -> Tensor:
    """Return a tile, contiguous, in the data type in which products are computed."""
    return t.to(products_dtype(t)).contiguous()


def wide(t: Tensor) -> Tensor:
    """Return a 16-bit tensor in float32; return any other tensor unchanged."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def products_dtype(t: Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def grouped_by(t: Tensor, heads: int) -> Tensor:
    """Return (B, Hq, rows, …) as (B, heads, Hq/heads·rows, …): one key head gets the rows of all its query heads."""
    return t.reshape(len(t), heads, t.shape[1] // max(heads, 1) * t.shape[2], t.shape[3])


class Captured(TorchFunctionMode):
    """Find the tensors that score_mod captures: the arguments of its torch functions that require a gradient.

    Intermediate tensors of score_mod require no gradient, because gradients are off. With `instead`, replace captured
    tensors: it maps the id of each to a leaf of autograd, at which the tile's derivative ends. Then 16-bit arguments
    are computed with in float32 if `wide`, so that autograd sums in float32 what many scores add to one number.
    """

    def __init__(self, instead: Mapping[int, Tensor] | None = None, *, wide: bool = True) -> None:
        super().__init__()
        self._wide = wide
        top = torch._C._functorch.peek_interpreter_stack()
        self._level = 0 if top is None else top.level()
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
            t = self._instead.get(id(t), t)
            return wide(t) if self._wide else t
        if t.requires_grad or self._follows(t):
            self.found[id(t)] = t
        return t

    def _follows(self, t: Tensor) -> bool:
        """Return whether an active transform, or a level of dual numbers, follows the tensor."""
        unpack: Any = forward_ad.unpack_dual
        if torch._C._functorch.is_functorch_wrapped_tensor(t):
            # the arguments of score_mod have levels of their own, of the maps over a tile
            return bool(torch._C._functorch.maybe_get_level(t) <= self._level)
        return forward_ad._current_level >= 0 and unpack(t).tangent is not None


def captured_by(flex: Flex, q: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that score_mod uses and that have derivatives or are mapped, found by one call."""
    if flex.score_mod is None or not (torch.is_grad_enabled() or transformed()) or not q.numel():
        return ()
    score_mod, seen = flex.score_mod, Captured()

    def watched(*arguments: Tensor) -> Tensor:
        with seen:  # not around the maps, whose own tensors a transform follows, too
            return score_mod(*arguments)

    one = [torch.zeros(1, dtype=torch.long, device=q.device)] * 4
    with torch.no_grad():
        _mapped(watched, one, q.new_zeros(1, 1, 1, 1, dtype=products_dtype(q)))
    return tuple(seen.found.values())
