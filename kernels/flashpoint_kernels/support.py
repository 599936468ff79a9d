"""Which backend runs a problem: what each can do, and which one is meant. No torch here."""

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
    """(field, message) for each thing that `spec` asks and `backend` cannot do; empty when it can do all."""
    missing = spec.features - SUPPORT[backend]
    return [
        (field, f"the {backend} backend does not do {what}")
        for feature in sorted(missing)
        for field, what in [said(feature)]
    ]


def said(feature: str) -> tuple[str, str]:
    """Return the field that asks for a feature, and how an error says it."""
    field, row = FEATURES[feature]
    return field, row.said or feature


def choose_backend(spec: Spec, available: Sequence[str]) -> str:
    """The backend that runs `spec`: the one asked for by name, never substituted, or `auto`'s first that can.

    `available` lists the device's backends in order of preference. Raises ProblemError naming `backend`, or the
    fields that the backend asked for cannot do.
    """
    asked = spec.options.backend
    if asked != "auto":
        if asked not in available:
            raise ProblemError(
                [("backend", f"{asked} is not available on this device; there are {', '.join(available)}")]
            )
        if errors := unsupported(asked, spec):
            raise ProblemError(errors)
        return asked
    for backend in available:
        if not unsupported(backend, spec):
            return backend
    raise ProblemError([("backend", "no backend of this device can do this")])
