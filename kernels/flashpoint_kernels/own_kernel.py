"""Call a caller's own attention function on a problem, and return its answers by name, with gradients.

The call is kernel(q, k, v, causal=…, …). The function returns o, or a tuple that starts with o and lse. Only options
that are not the default are passed. Parameters may have torch's or flash-attn's names: is_causal, softmax_scale, …
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flashpoint_contract.hints import meant
from flashpoint_contract.options import GRADS, OPTIONS, Options
from flashpoint_contract.tensors import TENSORS

NOT_PASSED = ("layout", "causal_alignment", "return_lse", "grads", "deterministic", "backend", "precision")

Kernel = Callable[..., Any]


class NotTakenError(Exception):
    """The function has no parameter for an option or a tensor of the problem."""


def parameters(kernel: Kernel) -> dict[str, str] | None:
    """Return the function's parameters by our names; None if it accepts any keyword or has no signature."""
    try:
        found = inspect.signature(kernel).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in found):
        return None
    known = (*OPTIONS, *TENSORS)
    names = [each.name for each in found if each.kind is not inspect.Parameter.VAR_POSITIONAL][3:]
    return {ours: name for name in names if (ours := name if name in known else meant(name, known))}


def answers_of(kernel: Kernel, tensors: Mapping[str, Tensor], options: Options) -> dict[str, Tensor]:
    """Return the function's answers: o, lse if it returns it, and gradients if the problem has `do`.

    Gradients come from autograd; without a graph, they are omitted. Raises NotTakenError, and whatever the function
    raises.
    """
    inputs = {name: tensors[name].detach().clone() for name in "qkv"}
    wants = [name for name in options.grads if name[1:] in inputs] if "do" in tensors else []
    for name in wants:
        inputs[name[1:]].requires_grad_()
    result = kernel(*inputs.values(), **keywords(kernel, tensors, options))
    parts = list(result) if isinstance(result, (tuple, list)) else [result]
    if not parts or not isinstance(parts[0], Tensor):
        raise TypeError(f"it returned {type(result).__name__}, but must return a tensor or a tuple of tensors")
    answers = {"o": parts[0].detach()}
    if len(parts) > 1 and isinstance(parts[1], Tensor) and parts[1].ndim == parts[0].ndim - 1:
        answers["lse"] = parts[1].detach()
    if wants and parts[0].requires_grad:
        of = [inputs[name[1:]] for name in wants]
        grads = torch.autograd.grad(parts[0], of, tensors["do"], allow_unused=True)
        answers |= {name: g for name, g in zip(wants, grads, strict=True) if g is not None}
    return answers


def keywords(kernel: Kernel, tensors: Mapping[str, Tensor], options: Options) -> dict[str, Any]:
    """Return the keywords that the function is called with beside q, k and v. Raises NotTakenError."""
    asked: dict[str, Any] = {
        name: getattr(options, name)
        for name, row in OPTIONS.items()
        if name not in NOT_PASSED and getattr(options, name) != row.default
    }
    asked |= {n: t for n, t in tensors.items() if n not in ("q", "k", "v", "do", "dlse", "o", "lse", *GRADS)}
    taken = parameters(kernel)
    if taken is None:
        return asked
    if missing := [name for name in asked if name not in taken]:
        raise NotTakenError(f"it has no parameter {missing[0]}")
    return {taken[name]: value for name, value in asked.items()}
