"""The Triton kernels as a backend: all options, forward and backward, any mix of problems in one grouped launch.

The functions are imported from launch.py at their first use, so SUPPORT can be read without torch and Triton.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashpoint_kernels.triton_backend.host.launch import compile_ahead as compile_ahead
    from flashpoint_kernels.triton_backend.host.launch import compiled as compiled
    from flashpoint_kernels.triton_backend.host.launch import prepare as prepare

SUPPORT = frozenset({  # keys of `tensors.FEATURES`
    "float16", "bfloat16", "float32", "causal", "window", "softcap", "dropout", "tf32", "lse", "thd", "bool_mask",
    "float_mask", "block_mask", "alibi_slopes", "sinks", "lengths", "paged", "quantized", "dlse", "gqa", "value_dim",
    "backward", "dattn_mask", "dsinks", "key_weights",
    "wide_head_dim",
})  # fmt: skip
HANDLES = frozenset({  # tensors and options; a problem with another one is refused by name
    "q", "k", "v", "attn_mask", "block_mask", "alibi_slopes", "sinks", "q_lengths", "kv_lengths", "offset",
    "cu_seqlens_q", "cu_seqlens_k", "block_table", "k_scale", "v_scale", "do", "dlse", "o", "lse",
    "layout", "causal", "causal_alignment", "window", "block_size", "scale", "softcap", "dropout_p", "dropout_seed",
    "precision", "return_lse", "return_key_weights", "grads", "deterministic", "backend",
})  # fmt: skip
__all__ = ["HANDLES", "SUPPORT", "compile_ahead", "compiled", "prepare"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("flashpoint_kernels.triton_backend.host.launch"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
