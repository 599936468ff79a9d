"""torch's own fused attention as a backend: fused.py, and blocks.py for features that its operators do not have."""

# The operators support only one head dimension, and no gradient through lse.
SUPPORT = frozenset({
    "float16", "bfloat16", "float32", "causal", "gqa", "thd", "tf32", "lengths", "bool_mask", "float_mask", "lse",
    "backward", "paged", "quantized", "window", "alibi_slopes", "sinks", "dsinks",
})  # fmt: skip
