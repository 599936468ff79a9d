"""Check whether a model's attention can be replaced, and whether the replacement applies all that its own does.

transformers accepts any registered name as `attn_implementation` of any model. But a model whose code does not use the
`AttentionInterface` of transformers ignores the name, and computes its own attention. And no model is asked whether it
supports an attention that is not transformers' own: those of `sdpa` are refused with `_supports_sdpa = False`.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from transformers import PreTrainedModel

Invalid = Callable[[str, str], Exception]  # a function (field, message) -> error

# The arguments and the attributes of a module that an attention function may use in transformers, and ours applies.
_ARGUMENTS = {
    "module", "query", "query_states", "key", "key_states", "value", "value_states", "attention_mask", "scaling",
    "dropout", "is_causal", "position_bias", "softcap", "s_aux", "sinks", "sliding_window", "indices",
}  # fmt: skip
_ATTRIBUTES = {"training", "num_key_value_groups", "head_dim", "sinks", "is_causal"}
_ASKS = re.compile(r"\bget_interface\(|\bALL_ATTENTION_FUNCTIONS\b")
_COMPUTES = re.compile(
    r"softmax\(|scaled_dot_product_attention\(|multi_head_attention_forward\(|logsumexp\(", re.IGNORECASE
)
_LOOKS_UP = re.compile(r"_CLASSES\[(self\.)?(config\._)?attn_implementation\]")
OURS: dict[str, Invalid] = {}  # names that `register` has registered, with their `invalid`


def install() -> None:
    """Check each model that is made from now on, and each that is given another implementation."""
    _after(PreTrainedModel, "_check_and_adjust_attn_implementation", _check_class)
    _after(PreTrainedModel, "post_init", lambda model, _: _check(model))
    _after(PreTrainedModel, "set_attn_implementation", _check_all)


def _check(model: PreTrainedModel) -> None:
    """Raise an error if a model's attention cannot be replaced; warn if a part of it cannot.

    Nested models are checked separately, because they may have another implementation.
    """
    name = getattr(model.config, "_attn_implementation", None)
    if name not in OURS:
        return
    if _refuse_weights not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_refuse_weights, with_kwargs=True)
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
    """Raise an error for a model that looks up its attention class by name and would raise KeyError, and for one that
    takes no `sdpa` because its own attention uses something that is not applied here.
    """
    kind: Any = type(model)
    source = _source(kind) if name in OURS else ""
    if _LOOKS_UP.search(source):
        raise _refusal(name, type(model), ())
    if source and not model._supports_sdpa and (unknown := _unknown(source)):
        raise OURS[name](
            "attn_implementation",
            f"cannot be {name!r}: {type(model).__name__} does not support 'sdpa', and its own attention uses "
            f"{', '.join(unknown)}, which is not applied here. Leave it out",
        )


@functools.cache
def _unknown(source: str) -> tuple[str, ...]:
    """Return the arguments, and the attributes of the module, that the attention functions of a source file use and
    that are not applied here.
    """
    found: set[str] = set()
    for function in ast.parse(source).body:
        if isinstance(function, ast.FunctionDef) and "eager" in function.name:
            named = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            found |= {each.arg for each in named} - _ARGUMENTS
            for each in ast.walk(function):
                if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "module":
                    found |= {f"module.{each.attr}"} - {f"module.{name}" for name in _ATTRIBUTES}
    return tuple(sorted(found))


@functools.cache
def relies_on_is_causal(kind: type) -> bool:
    """Return whether modules of a class without a mask mean their `is_causal`, as in `sdpa`.

    Models that do not support `sdpa` always pass a mask where keys are masked, as in `eager`.
    """
    module = inspect.getmodule(kind)
    models = [
        each for each in vars(module).values()
        if inspect.isclass(each) and issubclass(each, PreTrainedModel) and each.__module__ == kind.__module__
    ]  # fmt: skip
    return not models or any(model._supports_sdpa for model in models)


@functools.cache
def _source(kind: type) -> str:
    """Return the source of the file of a class; empty if there is none."""
    try:
        return inspect.getsource(inspect.getmodule(kind) or kind)
    except (OSError, TypeError):
        return ""


def _refuse_weights(model: PreTrainedModel, _: Any, keywords: dict[str, Any]) -> None:
    """Raise an error if a call asks for the weights of the softmax, which no call here makes."""
    name = getattr(model.config, "_attn_implementation", None)
    if name in OURS and keywords.get("output_attentions", getattr(model.config, "output_attentions", False)):
        raise no_weights(OURS[name])


def no_weights(invalid: Invalid) -> Exception:
    return invalid(
        "output_attentions",
        "is True, and this attention does not make the weights. Leave it out, or call "
        "model.set_attn_implementation('eager')",
    )


def _refusal(name: str, kind: type, computing: Iterable[type]) -> Exception:
    return OURS[name](
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
