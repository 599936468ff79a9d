"""`register` replaces the attention of Hugging Face transformers, for the client and the attention library.

transformers accepts any registered name as `attn_implementation` of any model. But a model whose code does not use the
`AttentionInterface` of transformers ignores the name, and computes its own attention. So each model whose
configuration has a name of `register` is checked. This module needs transformers 5; nothing else in this package does.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

Invalid = Callable[[str, str], Exception]  # a function (field, message) -> error
Tensor = Any  # torch.Tensor, but this package does not import torch


class Solve(Protocol):
    """Computes o (B,Hq,Sq,Dv) of q (B,Hq,Sq,D), k and v (B,Hk,Sk,D), with the options `scale`, `softcap` and so on.

    mask: (B,1,Sq,Sk), bool or float. bias: (B|1,Hq,Sq,Sk), added to the scores (T5). Without a mask, `causal` means
    that query i sees keys 0 to i, as in torch's SDPA; but a single query sees all keys.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, causal: bool,
        window: int | None, **options: Any,
    ) -> Tensor: ...  # fmt: skip


_RESERVED = re.compile(r"^(eager|paged)$|flash|sdpa|flex_attention|[|/:]")  # names with a meaning in transformers
_ASKS = re.compile(r"\bget_interface\(|\bALL_ATTENTION_FUNCTIONS\b")
_COMPUTES = re.compile(
    r"softmax\(|scaled_dot_product_attention\(|multi_head_attention_forward\(|logsumexp\(", re.IGNORECASE
)
_LOOKS_UP = re.compile(r"_CLASSES\[(self\.)?(config\._)?attn_implementation\]")
_OURS: dict[str, Invalid] = {}  # names that `register` has registered, with their `invalid`


def register(name: str, compute: Solve, make_mask: Callable[..., Any], invalid: Invalid) -> None:
    """Make `attn_implementation=name` run `compute`, for every model of this process.

    Args:
        name: Name of the implementation. A second call with it replaces the first.
        compute: Computes the attention.
        make_mask: Makes the masks, with the arguments of transformers' `sdpa_mask`.
        invalid: Makes the error for an argument, and for models whose attention cannot be replaced.
    """
    if not isinstance(name, str) or not name or _RESERVED.search(name):
        raise invalid(
            "name",
            f"is {name!r}, and must not be one of transformers' own, or contain flash, sdpa, flex_attention, | or /",
        )

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
        scaling: float | None = None, is_causal: bool | None = None, position_bias: Tensor | None = None,
        softcap: float | None = None, s_aux: Tensor | None = None, sliding_window: int | None = None,
        cache: object = None, **_: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Return o (B,Sq,Hq,D) of query (B,Hq,Sq,D), key and value (B,Hk,Sk,D); and None in place of the weights."""
        if cache is not None:
            raise invalid("cache", "is not taken: the model needs another attn_implementation")
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        o = compute(
            query, key, value, attention_mask, position_bias, bool(causal), sliding_window,
            scale=scaling, dropout_p=dropout, softcap=softcap or 0.0, sinks=s_aux,
        )  # fmt: skip
        return o.transpose(1, 2).contiguous(), None

    if not _OURS:
        _after(PreTrainedModel, "_check_and_adjust_attn_implementation", _check_class)
        _after(PreTrainedModel, "post_init", lambda model, _: _check(model))
        _after(PreTrainedModel, "set_attn_implementation", _check_all)
    _OURS[name] = invalid
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, make_mask)


def mask_options(mask: Tensor | None, bias: Tensor | None, causal: bool, queries: int) -> dict[str, Any]:
    """Return attention options equivalent to the arguments `mask`, `bias` and `causal` of `Solve`, for Sq `queries`."""
    return {
        "attn_mask": _biased(mask, bias),
        "causal": causal and mask is None and queries > 1,
        "causal_alignment": "top_left",
    }


def _biased(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Add `bias` (B|1,H,Sq,Sk) to `mask` (B,1,Sq,Sk), bool or float. Return a float mask; without a bias, `mask`.

    A bias of zeros is left out: T5 passes it in layers without a bias of their own.
    """
    if bias is None or not (bias.requires_grad or bias.any()):
        return mask
    if mask is None:
        return bias
    return bias + mask if mask.dtype.is_floating_point else bias.where(mask, -math.inf)


def registered_by(invalid: Invalid, config: Any) -> bool:
    """Return whether a model of this configuration uses an attention that `register` was called for with `invalid`."""
    return _OURS.get(getattr(config.get_text_config(decoder=True), "_attn_implementation", None) or "") is invalid


def _check(model: PreTrainedModel) -> None:
    """Raise an error if a model's attention cannot be replaced; warn if a part of it cannot.

    Nested models are checked separately, because they may have another implementation.
    """
    name = getattr(model.config, "_attn_implementation", None)
    if name not in _OURS:
        return
    kinds: set[Any] = {kind for module in _own_modules(model) if _named(kind := type(module))}
    every: set[Any] = {type(module) for module in model.modules()}
    computing = {kind for kind in kinds if _asks(kind) is False}
    if not any(map(_asks, every)):
        if kinds:
            raise _refusal(name, type(model), computing or kinds)
    elif computing:
        warnings.warn(
            f"{_computes(type(model), computing)}: this part keeps its own attention, the rest runs as {name!r}",
            stacklevel=2,
        )


def _check_all(model: PreTrainedModel, _: object) -> None:
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            _check(module)


def _check_class(model: PreTrainedModel, name: Any) -> None:
    """Raise an error for a model that looks up its attention class by name and would raise KeyError."""
    source = inspect.getsource(inspect.getmodule(type(model)) or type(model)) if name in _OURS else ""
    if _LOOKS_UP.search(source):
        raise _refusal(name, type(model), ())


def _refusal(name: str, kind: type, computing: Iterable[type]) -> Exception:
    return _OURS[name](
        "attn_implementation",
        f"cannot be {name!r}: {_computes(kind, computing)}. Leave it out; in a model of several parts give it by part, "
        f'such as {{"text_config": {name!r}}}',
    )


def _computes(kind: type, computing: Iterable[type]) -> str:
    what = ", ".join(sorted(each.__name__ for each in computing)) or "its attention"
    return f"{kind.__name__} computes {what} itself, where transformers takes no other attention"


def _own_modules(model: Any) -> Iterator[Any]:
    """Yield the modules of a model, except nested models and their modules."""
    for module in model.children():
        if not isinstance(module, PreTrainedModel):
            yield module
            yield from _own_modules(module)


def _named(kind: type) -> bool:
    return re.search("atten|attn", kind.__name__, re.IGNORECASE) is not None


@functools.cache
def _asks(kind: type) -> bool | None:
    """Return whether modules of class `kind` get their attention function from transformers.

    None if they compute no attention.
    """
    if not _named(kind):
        return None
    for base in kind.__mro__:  # the class whose `forward` runs, and the base classes that it may call
        if base.__module__ == "torch.nn.modules.module":
            return None
        try:
            source = inspect.getsource(base)
        except (OSError, TypeError):
            continue
        if _ASKS.search(source):
            return True
        if _COMPUTES.search(source):
            return False
    return None


def _after(kind: type, method: str, then: Any) -> None:
    """Replace a method of a class by one that calls `then(object, result)` afterwards."""
    original = getattr(kind, method)

    @functools.wraps(original)
    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        result = original(self, *args, **keywords)
        then(self, result)
        return result

    setattr(kind, method, call)
