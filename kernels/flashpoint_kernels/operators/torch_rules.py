"""Follow torch's rules for a call: `__torch_function__`, autocast, and the errors that a caller of torch expects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function

from flashpoint_contract.options import ProblemError
from flashpoint_kernels.problems.memory import check_memory

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias  # imports torch._dynamo, which takes seconds

P = ParamSpec("P")
T = TypeVar("T")
# The types of devices that have autocast: found here, because torch.compile cannot trace `is_autocast_available` in
# torch 2.11.
_AUTOCAST = frozenset(kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind))


def raises_as(
    error_of: Callable[[list[tuple[str, str]]], Exception], names: Mapping[str, str]
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that replaces a ProblemError by `error_of(errors)`, with the caller's `names` of arguments."""

    def decorated(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except ProblemError as error:
                raise error_of([(names.get(name, name), text) for name, text in error.errors]) from None

        return wrapped

    return decorated


def overridable(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function, decorated: arguments with `__torch_function__` may answer its calls, as for torch's own.

    Such arguments are subclasses of Tensor, classes of masks and proxies of torch.fx; a `TorchFunctionMode` is asked
    before them. They are told the decorated function, which is the public one. A `torch.nn.attention.bias.CausalBias`
    is not asked: its `__torch_function__` would call kernels of torch.
    """

    @wraps(function)
    def asked(*args: P.args, **kwargs: P.kwargs) -> T:
        if has_torch_function(args) or (kwargs and has_torch_function(tuple(kwargs.values()))):
            able = [t for t in (*args, *kwargs.values()) if not is_causal_bias(t)]
            if has_torch_function(able):
                return handle_torch_function(asked, able, *args, **kwargs)
        return function(*args, **kwargs)

    return asked


def is_causal_bias(mask: object) -> TypeGuard[CausalBias]:
    """Return whether an argument is torch's `CausalBias`, without an import of its module."""
    return type(mask).__module__ == "torch.nn.attention.bias"


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Convert q, k and v to autocast's dtype, as `torch.autocast` does for SDPA, except for float64 and 8 bits.

    The device of q decides. Tensors on other devices, and values that are not tensors, stay unchanged.
    """
    kind = tensors[0].device.type
    if kind not in _AUTOCAST or not torch.is_autocast_enabled(kind):
        return tensors
    check_memory(**dict(zip("qkv", tensors, strict=False)))
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) if _casts(t, kind) else t for t in tensors)


def _casts(t: object, kind: str) -> bool:
    return isinstance(t, Tensor) and t.is_floating_point() and t.device.type == kind and t.dtype.itemsize in (2, 4)


def refuse_nested(tensors: Iterable[tuple[str, Tensor | None]]) -> None:
    """Raise ProblemError for a NestedTensor."""
    if torch.compiler.is_compiling():
        return
    for name, t in tensors:
        if t is not None and t.is_nested:
            raise ProblemError([(
                name,
                "is a NestedTensor: pass its values() with layout='thd', and its offsets() as cu_seqlens_q and _k",
            )])  # fmt: skip


def refuse_transforms(tensors: Sequence[tuple[str, Tensor | None]]) -> None:
    """Raise RuntimeError if torch.func or forward-mode AD differentiates a tensor, ProblemError for a NestedTensor."""
    refuse_nested(tensors)
    if torch.compiler.is_compiling():
        return
    functorch, level = torch._C._functorch, forward_ad._current_level
    unpack: Any = forward_ad.unpack_dual
    for _, t in tensors:
        if t is None:
            continue
        tracked = False
        while functorch.is_functorch_wrapped_tensor(t):  # wrapped by vmap, or by a derivative
            tracked = tracked or functorch.is_gradtrackingtensor(t)
            t = functorch.get_unwrapped(t)
        if tracked or (level >= 0 and unpack(t).tangent is not None):
            raise RuntimeError("the weights of attention have no derivatives: detach the inputs")
