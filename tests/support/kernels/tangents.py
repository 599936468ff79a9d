"""Compare the tangents of o and lse with those of the formula in float64, for problems that the kernel in C takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flashpoint_kernels import Options, attention
from flashpoint_kernels.cpu_backend import IN_DERIVATIVES
from flashpoint_kernels.dispatching.dispatch import derivative_backend
from tests.support.kernels.solving import normal, spec_of

BOUND = 2e-5  # of an error, relative to the largest tangent or to 1
DIRECTIONS = ("qkv", "q", "k", "v", "qk", "qv", "kv")  # the inputs that have a tangent


def of_tangents(tensors: Mapping[str, Tensor], options: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the part of a problem whose tangents the kernel in C computes, in float32."""
    given = {
        name: t.float() if t.is_floating_point() else t
        for name, t in tensors.items()
        if name in IN_DERIVATIVES and name not in ("o", "lse")
    }
    return given, {name: value for name, value in options.items() if name in IN_DERIVATIVES and name != "grads"}


def tangents(
    tensors: Mapping[str, Tensor], options: Mapping[str, Any], names: str = "qkv", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """Return o, lse and their tangents along a direction of the inputs `names`."""
    fixed = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    moved = tuple(fixed.pop(name) for name in names)
    dots = tuple(normal(*t.shape, seed=70 + "qkv".index(n)).to(dtype) for n, t in zip(names, moved, strict=True))

    def solve(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        given = dict(zip(names, inputs, strict=True)) | fixed
        return attention(**given, **{**options, "return_lse": True})

    answers, along = torch.func.jvp(solve, moved, dots)
    return *answers, *along


def check_tangents(tensors: Mapping[str, Tensor], options: Mapping[str, Any], names: str = "qkv") -> None:
    """Assert that `auto` takes the kernel in C for `of_tangents` of this problem, and that its tangents are right."""
    given, asked = of_tangents(tensors, dict(options) | {"backend": "auto"})
    spec = spec_of(given, Options(**asked | {"return_lse": True}), "forward")
    assert derivative_backend(spec, "cpu") == "cpu"
    o, lse, *found = tangents(given, asked, names)
    plain = attention(**given, **{**asked, "return_lse": True})
    assert all(torch.equal(a, b) for a, b in zip((o, lse), plain, strict=True)), "other bits beside a tangent"
    *_, o_dot, lse_dot = tangents(given, asked | {"backend": "reference"}, names, torch.float64)
    for name, actual, expected in zip(("o", "lse"), found, (o_dot, lse_dot), strict=True):
        bound = BOUND * max(1.0, float(expected.abs().max())) if expected.numel() else 0.0
        error = (actual.double() - expected).abs()
        assert bool((error <= bound).all()), f"{name}'s tangent along {names}: {float(error.max())} > {bound}"
