"""The backend `tiled`: FlashAttention's tile loop in plain torch, on any device. See tiles.py."""

SUPPORT = frozenset({  # keys of `tensors.FEATURES`
    "float16", "bfloat16", "float32", "causal", "window", "softcap", "dropout", "tf32", "lse", "thd", "bool_mask",
    "float_mask", "block_mask", "alibi_slopes", "sinks", "lengths", "paged", "quantized", "dlse", "gqa", "value_dim",
    "backward", "dattn_mask", "dsinks", "key_weights",
    "wide_head_dim",
})  # fmt: skip
HANDLES = frozenset({  # tensors and options of tiles.py; a problem with another one is refused by name
    "q", "k", "v", "attn_mask", "block_mask", "alibi_slopes", "sinks", "q_lengths", "kv_lengths", "offset",
    "cu_seqlens_q", "cu_seqlens_k", "block_table", "k_scale", "v_scale", "do", "dlse", "o", "lse",
    "layout", "causal", "causal_alignment", "window", "block_size", "scale", "softcap", "dropout_p", "dropout_seed",
    "precision", "return_lse", "return_key_weights", "grads", "deterministic", "backend",
})  # fmt: skip
IN_BLOCKS = frozenset({  # those of blocks.py, which computes all problems with a block mask
    "q", "k", "v", "attn_mask", "block_mask", "alibi_slopes", "sinks", "q_lengths", "kv_lengths", "offset",
    "cu_seqlens_q", "cu_seqlens_k", "block_table", "k_scale", "v_scale", "do", "dlse", "o", "lse",
    "layout", "causal", "causal_alignment", "window", "block_size", "scale", "softcap", "dropout_p", "dropout_seed",
    "precision", "return_lse", "return_key_weights", "grads", "deterministic", "backend",
})  # fmt: skip
IN_DERIVATIVES = frozenset({  # those of derivatives.py: forward mode, and derivatives of gradients
    "q", "k", "v", "attn_mask", "block_mask", "alibi_slopes", "sinks", "q_lengths", "kv_lengths", "offset",
    "cu_seqlens_q", "cu_seqlens_k", "block_table", "k_scale", "v_scale", "do", "dlse", "o", "lse",
    "layout", "causal", "causal_alignment", "window", "block_size", "scale", "softcap", "dropout_p", "dropout_seed",
    "precision", "return_lse", "return_key_weights", "grads", "deterministic", "backend",
})  # fmt: skip
