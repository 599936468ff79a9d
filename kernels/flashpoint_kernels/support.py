"""Which backend runs a problem: what each can do, which one is meant, what may share a launch. No torch here either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashpoint_kernels.spec import FLOATS, MAX_HEAD_DIM, ProblemError, Spec

# What each backend can do, in the words of `Spec.features`. `reference` can do everything.
_EVERY_OPTION = frozenset({
    "float16", "bfloat16", "float32", "causal", "window", "gqa", "thd", "softcap", "tf32", "value_dim", "lengths",
    "bool_mask", "float_mask", "alibi_slopes", "sinks", "lse", "dlse", "backward", "dattn_mask", "dsinks", "dropout",
})  # fmt: skip
SUPPORT: dict[str, frozenset[str]] = {
    "triton": _EVERY_OPTION,
    # torch's fused op: no window, softcap, ALiBi, sinks or dropout of ours, one head dimension, no gradient through lse
    "torch": _EVERY_OPTION
    - {"window", "softcap", "value_dim", "alibi_slopes", "sinks", "dlse", "dattn_mask", "dsinks", "dropout"},
    "tiled": _EVERY_OPTION,
    "reference": _EVERY_OPTION | {"float64", "large_head_dim"},
}

FEATURE_FIELDS = {
    "thd": ("layout", "thd"),
    "gqa": ("k", "fewer key/value heads than query heads"),
    "dropout": ("dropout_p", "dropout"),
    "tf32": ("precision", "tf32"),
    "value_dim": ("v", "a value head dimension other than q's"),
    "large_head_dim": ("q", f"a head dimension above {MAX_HEAD_DIM}"),
    "lengths": ("kv_lengths", "q_lengths and kv_lengths"),
    "bool_mask": ("attn_mask", "a boolean mask"),
    "float_mask": ("attn_mask", "a float mask"),
    "lse": ("return_lse", "lse"),
    "backward": ("grads", "gradients"),
    "dattn_mask": ("grads", "dattn_mask"),
    "dsinks": ("grads", "dsinks"),
    **{dtype: ("q", dtype) for dtype in FLOATS},
}


def unsupported(backend: str, spec: Spec) -> list[tuple[str, str]]:
    """(field, message) for each thing that `spec` asks and `backend` cannot do; empty when it can do all."""
    missing = spec.features - SUPPORT[backend]
    return [
        (field, f"the {backend} backend does not do {what}")
        for feature in sorted(missing)
        for field, what in [FEATURE_FIELDS.get(feature, (feature, feature))]
    ]


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


def launch_key(spec: Spec, backend: str) -> tuple[Any, ...]:
    """What requests must share to run in one launch; lengths, batch sizes, head counts and scalars are free."""
    mask = spec.tensors["attn_mask"].dtype if spec.has("attn_mask") else None
    return backend, spec.direction, spec.dtype, spec.head_dim, spec.value_dim, spec.options.precision, spec.level, mask


_VECTOR = 16  # float32s of an AVX-512 register


def whole_vectors(spec: Spec) -> bool:
    """Whether rows are of whole vectors: then torch's fused CPU operators sum in one order, whoever else is there."""
    return spec.head_dim % _VECTOR == 0 and spec.value_dim % _VECTOR == 0
