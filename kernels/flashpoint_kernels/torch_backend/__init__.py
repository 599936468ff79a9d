"""torch's own fused attention as a backend: fused.py."""

# No window, softcap, ALiBi, sinks or dropout of ours, one head dimension, no gradient through lse.
SUPPORT = frozenset({
    "float16", "bfloat16", "float32", "causal", "gqa", "thd", "tf32", "lengths", "bool_mask", "float_mask", "lse",
    "backward",
})  # fmt: skip
