"""The tensors and options that each surface takes. A name that is not listed is refused there, by name.

A surface is a format, an interface, or a kind of call. A new row of the tables is on no list: so it cannot be accepted
and ignored. Add its name where a surface carries it, and its test to `tests/e2e/test_surfaces.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_INPUTS = frozenset(
    (
        "q", "k", "v", "attn_mask", "block_mask", "alibi_slopes", "sinks", "q_lengths", "kv_lengths", "offset",
        "cu_seqlens_q", "cu_seqlens_k",
    )
)  # fmt: skip
_SCALES = frozenset(("k_scale", "v_scale"))
_OF_GRADIENTS = frozenset(("do", "dlse", "o", "lse"))
_ANSWERS = frozenset(("o", "lse", "key_weights", "dq", "dk", "dv", "dattn_mask", "dsinks"))
_OPTIONS = frozenset(
    (
        "layout", "causal", "causal_alignment", "window", "block_size", "scale", "softcap", "dropout_p", "dropout_seed",
        "precision", "return_lse", "return_key_weights", "grads", "deterministic", "backend",
    )
)  # fmt: skip
_KEY_WEIGHTS = frozenset(("key_weights", "return_key_weights"))
_WIRE = _INPUTS | _OF_GRADIENTS | _ANSWERS | _OPTIONS

TAKES: Mapping[str, frozenset[str]] = MappingProxyType({
    "json": _WIRE,
    "safetensors": _WIRE | _SCALES,
    "oip": (_WIRE | _SCALES) - _KEY_WEIGHTS,
    "grpc": (_WIRE | _SCALES) - _KEY_WEIGHTS,
    "sdk": _WIRE | _SCALES,
    "async": _WIRE | _SCALES,
    "cli": (_WIRE | _SCALES) - {"return_lse"} - _KEY_WEIGHTS,
    "torch": (_INPUTS | _SCALES | _OPTIONS | _ANSWERS) - {"grads", "o", "lse"},
    "jax": (_INPUTS | _OPTIONS | _ANSWERS) - {"grads", "o", "lse"} - _KEY_WEIGHTS,
    "sharded": (_WIRE | _SCALES) - {"block_mask", "block_size", "dropout_p", "dropout_seed"} - _KEY_WEIGHTS,
    "caches": frozenset(
        ("q", "k", "v", "attn_mask", "block_mask", "alibi_slopes", "sinks", "q_lengths", "cu_seqlens_q")
    ) | _OPTIONS,
    "saved": _WIRE - _KEY_WEIGHTS,
    "verify": (_WIRE | _SCALES) - _KEY_WEIGHTS,
})  # fmt: skip

_REASONS = {
    "caches": "cannot be combined with caches, which have their own lengths and positions",
    "saved": "has no gradient: omit `save`",
    "verify": "is not judged: a verification judges o, lse and gradients",
}


def completed(name: str, reasons: Mapping[str, str]) -> Mapping[str, str]:
    """Return the reason of each surface that refuses the entry `name`: `reasons`, and those that do not list it."""
    others = {surface: _REASONS.get(surface, f"is not taken by {surface}") for surface, names in TAKES.items()
              if name not in names}  # fmt: skip
    return MappingProxyType({**others, **reasons})
