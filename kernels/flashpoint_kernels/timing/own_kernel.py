"""Find the keywords for a call of the caller's own attention function, to time it.

The call is kernel(q, k, v, causal=…, …). Only options that are not the default are passed.
Parameters may have torch's or flash-attn's names: is_causal, softmax_scale, …
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from flashpoint_contract.options import GRADS, OPTIONS, Options
from flashpoint_contract.tensors import TENSORS
from flashpoint_contract.wording.hints import meant

NOT_PASSED = ("layout", "causal_alignment", "return_lse", "grads", "deterministic", "backend", "precision")

Kernel = Callable[..., Any]


class NotTakenError(Exception):
    """The function has no parameter for an option or a tensor of the problem."""


def parameters(kernel: Kernel) -> dict[str, str] | None:
    """Return the function's parameters after q, k and v, as {name of our option or tensor: name of the parameter}.

    Return None if the function accepts every keyword or has no signature.
    """
    try:
        listed = inspect.signature(kernel).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in listed):
        return None
    known = (*OPTIONS, *TENSORS)
    names = [each.name for each in listed if each.kind is not inspect.Parameter.VAR_POSITIONAL][3:]
    return {ours: name for name in names if (ours := name if name in known else meant(name, known))}


def keywords(kernel: Kernel, tensors: Mapping[str, Tensor], options: Options) -> dict[str, Any]:
    """Return the keyword arguments for a call of the function with q, k and v. Raises NotTakenError."""
    wanted: dict[str, Any] = {
        name: getattr(options, name)
        for name, row in OPTIONS.items()
        if name not in NOT_PASSED and getattr(options, name) != row.default
    }
    wanted |= {n: t for n, t in tensors.items() if n not in ("q", "k", "v", "do", "dlse", "o", "lse", *GRADS)}
    taken = parameters(kernel)
    if taken is None:
        return wanted
    if missing := [name for name in wanted if name not in taken]:
        raise NotTakenError(f"it has no parameter {missing[0]}")
    return {taken[name]: value for name, value in wanted.items()}
