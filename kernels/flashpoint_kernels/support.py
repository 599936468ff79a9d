"""Choose the backend for a problem, from the features of each. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence

from flashpoint_contract.options import ProblemError
from flashpoint_contract.spec import Spec
from flashpoint_contract.tensors import FEATURES
from flashpoint_kernels import reference_backend, tiled_backend, torch_backend, triton_backend

SUPPORT = {
    "triton": triton_backend.SUPPORT,
    "torch": torch_backend.SUPPORT,
    "tiled": tiled_backend.SUPPORT,
    "reference": reference_backend.SUPPORT,
}


def unsupported(backend: str, spec: Spec) -> list[tuple[str, str]]:
    """Return (field, message) for each feature that `spec` needs and `backend` does not support."""
    missing = spec.features - SUPPORT[backend]
    return [
        (field, f"the {backend} backend does not support {what}")
        for feature in sorted(missing)
        for field, what in [said(feature)]
    ]


def said(feature: str) -> tuple[str, str]:
    """Return the field that needs a feature, and the feature's name in errors."""
    field, row = FEATURES[feature]
    return field, row.said or feature


def choose_backend(spec: Spec, available: Sequence[str]) -> str:
    """Return the backend for `spec`: the one chosen by name, which is never replaced, or else the first that supports
    it.

    `available` lists the device's backends in order of preference. Raises ProblemError, which names `backend`, or the
    fields that the chosen backend does not support.
    """
    asked = spec.options.backend
    if asked != "auto":
        if asked not in available:
            raise ProblemError([("backend", f"{asked} is not available on this device; use {' or '.join(available)}")])
        if errors := unsupported(asked, spec):
            raise ProblemError(errors)
        return asked
    for backend in available:
        if not unsupported(backend, spec):
            return backend
    raise ProblemError([("backend", "no backend of this device supports this problem")])
