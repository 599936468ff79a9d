"""The backend `torch`: torch's own fused operators, on CUDA (fused.py)."""

# "value_dim" (D ≠ Dv) and "dlse" are not among the features.
SUPPORT = frozenset({
    "float16", "bfloat16", "float32", "causal", "gqa", "thd", "tf32", "lengths", "bool_mask", "float_mask", "lse",
    "backward", "paged", "quantized", "sinks", "dsinks",
})  # fmt: skip
HANDLES = frozenset({  # tensors and options; a problem with another one is refused by name
    "q", "k", "v", "attn_mask", "sinks", "q_lengths", "kv_lengths", "offset", "cu_seqlens_q", "cu_seqlens_k",
    "block_table", "k_scale", "v_scale", "do", "o", "lse",
    "layout", "causal", "causal_alignment", "block_size", "scale", "dropout_seed", "precision", "return_lse", "grads",
    "deterministic", "backend",
})  # fmt: skip
