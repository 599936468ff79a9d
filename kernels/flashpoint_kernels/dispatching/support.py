"""Choose the backend for a problem from the features that each backend supports. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flashpoint_contract.options import BackendRenamedError, ProblemError
from flashpoint_contract.spec import Spec
from flashpoint_contract.tensors import FEATURES
from flashpoint_kernels import cpu_backend, native, reference_backend, tiled_backend, torch_backend, triton_backend
from flashpoint_kernels.native import switches

SUPPORT = {
    "triton": triton_backend.SUPPORT,
    "cpu": cpu_backend.SUPPORT,
    "torch": torch_backend.SUPPORT,
    "tiled": tiled_backend.SUPPORT,
    "reference": reference_backend.SUPPORT,
}
HANDLES = {
    "triton": triton_backend.HANDLES,
    "cpu": cpu_backend.HANDLES,
    "torch": torch_backend.HANDLES,
    "tiled": tiled_backend.HANDLES,
    "reference": reference_backend.HANDLES,
}
# The backends that compute scores in further modules, which may lack a row or a feature that the backend has.
IN_BLOCKS = {"tiled": tiled_backend.IN_BLOCKS}
IN_DERIVATIVES = {"cpu": cpu_backend.IN_DERIVATIVES, "tiled": tiled_backend.IN_DERIVATIVES}
SUPPORT_IN_DERIVATIVES = {"cpu": cpu_backend.SUPPORT_IN_DERIVATIVES}


class Backends(tuple[str, ...]):
    """The backends of a device, in the order in which `auto` prefers them.

    `kind` is torch's name of the device: `cpu`, `cuda` or another. `no_triton` says why Triton is not among them. `off`
    has the kernels and backends that are switched off, each with the reason (native/switches.py).
    """

    kind: str
    no_triton: str
    off: Mapping[str, str]

    def __new__(
        cls, names: Iterable[str], kind: str, no_triton: str = "", off: Mapping[str, str] | None = None
    ) -> Backends:
        made = super().__new__(cls, names)
        made.kind, made.no_triton, made.off = kind, no_triton, off or {}
        return made

    def why_off(self, backend: str) -> str:
        """Return why a backend is switched off; empty if it is not."""
        if backend in self:
            return ""
        names = [name for name in self.off if name == backend or (backend == "cpu" and name not in switches.BACKENDS)]
        return "; ".join(f"{name} is switched off by {self.off[name]}" for name in names)

    def __eq__(self, other: object) -> bool:
        """Return whether the names are equal and, if `other` has a `kind`, also the kinds."""
        return super().__eq__(other) and (not isinstance(other, Backends) or self.kind == other.kind)

    __hash__ = tuple.__hash__


def unsupported(backend: str, spec: Spec, derived: bool = False) -> list[tuple[str, str]]:
    """Return (field, message) for each feature of `spec` that `backend` does not support, and each tensor and option
    that it does not list. `derived`: for derivatives along a direction.
    """
    missing, derivatives, of_features = spec.features - SUPPORT[backend], " in forward-mode or second derivatives", ""
    if derived and not missing:
        missing, of_features = spec.features - SUPPORT_IN_DERIVATIVES.get(backend, SUPPORT[backend]), derivatives
    if backend == "cpu" and native.library() is None:
        return [("backend", native.missing())]
    handled, where = HANDLES[backend], ""
    if "block_mask" in spec.tensors and not spec.given <= (listed := IN_BLOCKS.get(backend, handled)):
        handled, where = listed, " with block_mask"
    if derived and not spec.given <= (listed := IN_DERIVATIVES.get(backend, handled)):
        handled, where = listed, derivatives
    if not missing and spec.given <= handled:
        return []
    errors = [
        (field, f"the {backend} backend does not support {what}{of_features}")
        for field, what in map(said, sorted(missing))
    ]
    unnamed = spec.given - handled - {field for field, _ in errors}
    return errors + [(name, f"the {backend} backend does not support {name}{where}") for name in sorted(unnamed)]


def said(feature: str) -> tuple[str, str]:
    """Return the name of the field that needs a feature, and the name that errors use for the feature."""
    field, row = FEATURES[feature]
    return field, row.said or feature


def choose_backend(spec: Spec, available: tuple[str, ...]) -> str:
    """Return the backend for `spec`: the one that `spec` names, or else the first one that supports `spec`.

    A named backend is never replaced by another.
    `available` lists the device's backends in order of preference: a `Backends`, or only names (for a GPU they begin
    with `triton`). Raises ProblemError, which names `backend`, or the fields that the chosen backend does not support;
    BackendRenamedError for `torch` on a CPU.
    """
    if not isinstance(available, Backends):
        available = Backends(available, "cuda" if available[:1] == ("triton",) else "cpu")
    requested = spec.options.backend
    if requested != "auto":
        if requested == "torch" and available.kind == "cpu":
            raise BackendRenamedError
        if requested not in available:
            why = f": {available.no_triton}" if requested == "triton" and available.no_triton else ""
            if off := available.why_off(requested):
                why = f": {off}"
            elif requested == "cpu" and available.kind == "cpu":
                why = f": {native.MISSING}"
            others = " or ".join(available)
            raise ProblemError([("backend", f"{requested} is not available on this device{why}; use {others}")])
        if errors := unsupported(requested, spec):
            raise ProblemError(errors)
        return requested
    for backend in available:
        if not unsupported(backend, spec):
            return backend
    raise ProblemError([("backend", "no backend of this device supports this problem")])
