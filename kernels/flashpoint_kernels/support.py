"""Choose the backend for a problem, from the features of each. Does not import torch."""

from __future__ import annotations

from flashpoint_contract.options import ProblemError
from flashpoint_contract.spec import Spec
from flashpoint_contract.tensors import FEATURES
from flashpoint_kernels import native, reference_backend, tiled_backend, torch_backend, triton_backend

SUPPORT = {
    "triton": triton_backend.SUPPORT,
    "torch": torch_backend.SUPPORT,
    "tiled": tiled_backend.SUPPORT,
    "reference": reference_backend.SUPPORT,
}


def features(backend: str, device: str = "cpu") -> frozenset[str]:
    """Return the features of a backend on a device, `cpu` or `cuda`.

    On the CPU `torch` also has those of the kernels in C, where these were compiled.
    """
    own = backend == "torch" and device == "cpu" and native.library() is not None
    return SUPPORT[backend] | native.FEATURES if own else SUPPORT[backend]


def unsupported(backend: str, spec: Spec, device: str = "cpu") -> list[tuple[str, str]]:
    """Return (field, message) for each feature that `spec` needs and `backend` does not support."""
    missing = spec.features - SUPPORT[backend]
    if missing and missing <= features(backend, device) and native.supports(spec):
        return []
    return [
        (field, f"the {backend} backend does not support {what}")
        for feature in sorted(missing)
        for field, what in [said(feature)]
    ]


def said(feature: str) -> tuple[str, str]:
    """Return the field that needs a feature, and the feature's name in errors."""
    field, row = FEATURES[feature]
    return field, row.said or feature


def choose_backend(spec: Spec, available: tuple[str, ...]) -> str:
    """Return the backend for `spec`: the one chosen by name, which is never replaced, or else the first that supports
    it.

    `available` lists the device's backends in order of preference, which begins with `triton` on a GPU. Raises
    ProblemError, which names `backend`, or the fields that the chosen backend does not support.
    """
    device = "cuda" if available[:1] == ("triton",) else "cpu"
    asked = spec.options.backend
    if asked != "auto":
        if asked not in available:
            raise ProblemError([("backend", f"{asked} is not available on this device; use {' or '.join(available)}")])
        if errors := unsupported(asked, spec, device):
            raise ProblemError(errors)
        return asked
    for backend in available:
        if not unsupported(backend, spec, device):
            return backend
    raise ProblemError([("backend", "no backend of this device supports this problem")])
