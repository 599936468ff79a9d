"""A user's function is called with its own parameter names, and only with options that differ from the defaults."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flashpoint_contract.options import Options
from flashpoint_kernels.timing.own_kernel import NotTakenError, keywords, parameters


def ours(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, attn_mask: Tensor | None = None) -> None: ...


def flash(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, window_size: Any = (-1, -1)) -> None: ...


def anything(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None: ...


def test_parameters_are_known_by_our_names() -> None:
    assert parameters(ours) == {"causal": "causal", "attn_mask": "attn_mask"}
    assert parameters(flash) == {"scale": "softmax_scale", "window": "window_size"}
    assert parameters(lambda query, key, value, is_causal: None) == {"causal": "is_causal"}
    assert parameters(anything) is None
    assert parameters(dict) is None, "it has no signature"


def test_only_what_differs_from_the_defaults_is_passed() -> None:
    q = torch.ones(1, 1, 2, 3)
    tensors = {"q": q, "k": q, "v": q, "do": q, "o": q}
    assert keywords(ours, tensors, Options(causal=True, return_lse=True, backend="tiled")) == {"causal": True}
    assert keywords(flash, tensors, Options(scale=0.5, window=(3, 0))) == {"softmax_scale": 0.5, "window_size": (3, 0)}
    given = keywords(anything, tensors | {"sinks": q}, Options(softcap=2.0))
    assert given.keys() == {"softcap", "sinks"}
    assert given["sinks"] is q


def test_an_option_without_a_parameter_is_named() -> None:
    with pytest.raises(NotTakenError, match="it has no parameter softcap"):
        keywords(ours, {}, Options(causal=True, softcap=2.0))
    with pytest.raises(NotTakenError, match="it has no parameter attn_mask"):
        keywords(flash, {"attn_mask": torch.ones(2, 2)}, Options())
