"""The backend `torch`: torch's own fused operators, on CUDA (fused.py)."""

# "value_dim" (D ≠ Dv) and "dlse" are not among the features.
SUPPORT = frozenset({
    "float16", "bfloat16", "float32", "causal", "gqa", "thd", "tf32", "lengths", "bool_mask", "float_mask", "lse",
    "backward", "paged", "quantized", "sinks", "dsinks",
})  # fmt: skip
