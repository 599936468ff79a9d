"""Masks that models can compute with as with those of `eager`, and that take no memory while nothing does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from transformers.masking_utils import eager_mask, sdpa_mask

READ = {"shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout", "size", "dim", "numel", "__len__"}


class LazyMask(Tensor):
    """A mask (B, 1, Sq, Sk), with the dtype and, for all code that computes with it, the values of `eager_mask`.

    Attention functions that get it unchanged call `allowed` instead, or rely on `causal`. A model that changes it, for
    example selects queries from it or appends keys to it, gets a tensor: then `causal` cannot be lost on the way.
    """

    causal: bool  # query i sees keys 0 to i, and a single query all keys; then `allowed` need not be called
    _make: Callable[[], Tensor]
    _made: Tensor | None

    @classmethod
    def of(
        cls, sizes: tuple[int, ...], dtype: torch.dtype, device: Any, causal: bool, make: Callable[[], Tensor]
    ) -> Self:
        """Return a mask of these sizes. `make` returns it as booleans."""
        mask = Tensor._make_subclass(cls, torch.zeros((), dtype=dtype, device=device).expand(sizes))
        mask.causal, mask._make, mask._made = causal, make, None
        return mask

    def allowed(self) -> Tensor:
        """Return the mask as booleans: true for the keys that a query sees."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def fits(self, q: Tensor, k: Tensor) -> bool:
        """Return whether the mask has a row for each query and a column for each key."""
        return bool(tuple(self.shape[2:]) == (q.shape[2], k.shape[2]))

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `function` on the values of `eager_mask`, unless it reads sizes or moves the mask to another device."""
        kwargs = kwargs or {}
        getter = function.__name__ == "__get__"
        name = getattr(function, "__self__", function).__name__ if getter else function.__name__
        with torch._C.DisableTorchFunctionSubclass():
            if name in READ:
                return function(*args, **kwargs)
            if name == "to" and isinstance(args[0], LazyMask):
                mask = args[0]
                device, dtype, *_ = torch._C._nn._parse_to(*args[1:], **kwargs)
                if dtype in (None, mask.dtype):
                    return mask if device in (None, mask.device) else mask._on(device)
            return function(*map(values, args), **{name: values(value) for name, value in kwargs.items()})

    def _on(self, device: torch.device) -> Self:
        moved = type(self).of(tuple(self.shape), self.dtype, device, self.causal, lambda: self.allowed().to(device))
        vars(moved).update({name: value for name, value in vars(self).items() if name not in vars(moved)})
        return moved

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def values(value: Any) -> Any:
    """Return the values of `eager_mask` for a `LazyMask`, also within lists and tuples; anything else as it is."""
    if isinstance(value, LazyMask):
        zero = torch.zeros((), dtype=value.dtype, device=value.device)
        return torch.where(value.allowed(), zero, torch.finfo(value.dtype).min)
    if type(value) in (list, tuple):
        return type(value)(map(values, value))
    return value


def lazy_mask(**arguments: Any) -> Tensor | None:
    """Return the mask that transformers asks for, as a `LazyMask`; None if all queries see all keys.

    The arguments are those of `eager_mask` of transformers. `torch.compile` and other tracers get its tensor.
    """
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        traced: Tensor | None = eager_mask(**arguments)
        return traced
    causal = arguments.pop("allow_is_causal_skip", True)
    found: Tensor | None = sdpa_mask(**arguments, allow_is_causal_skip=causal)
    if found is None and not causal:
        return None  # no mask is needed: transformers may skip it for `eager`, too

    def make() -> Tensor:
        if found is not None:
            return found
        made: Tensor | None = sdpa_mask(**arguments, allow_is_causal_skip=False)
        assert made is not None  # `sdpa_mask` returns None only if it may skip the mask
        return made

    sizes = (arguments["batch_size"], 1, arguments["q_length"], arguments["kv_length"])
    dtype, device = arguments.get("dtype", torch.float32), arguments.get("device", "cpu")
    return LazyMask.of(sizes, dtype, device, found is None, make)
