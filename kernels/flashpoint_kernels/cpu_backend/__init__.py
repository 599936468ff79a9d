"""The backend `cpu`: the kernels in C (flashpoint_kernels.native), for problems on a CPU."""

from flashpoint_contract.spec import Spec
from flashpoint_kernels import native

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

# Features, and tensors and options, of a forward whose tangents the kernel tangent.c computes.
SUPPORT_IN_DERIVATIVES = frozenset({
    "float32", "causal", "window", "tf32", "lse", "thd", "lengths", "gqa", "value_dim", "wide_head_dim",
})  # fmt: skip
IN_DERIVATIVES = frozenset({
    "q", "k", "v", "q_lengths", "kv_lengths", "offset", "cu_seqlens_q", "cu_seqlens_k", "o", "lse",
    "layout", "causal", "causal_alignment", "window", "scale", "precision", "return_lse", "grads", "deterministic",
    "backend",
})  # fmt: skip


def supports(spec: Spec) -> bool:
    """Return whether the kernels are available and support the problem."""
    return native.library() is not None and spec.features <= SUPPORT and spec.given <= HANDLES
