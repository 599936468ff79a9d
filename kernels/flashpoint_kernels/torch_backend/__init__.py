"""The backend `torch`: on the CPU the kernels in C (cpu.py), on CUDA torch's own fused operators (fused.py)."""

# These are torch's operators: one head dimension, no gradient through lse. The kernels in C have native.SUPPORT.
SUPPORT = frozenset({
    "float16", "bfloat16", "float32", "causal", "gqa", "thd", "tf32", "lengths", "bool_mask", "float_mask", "lse",
    "backward", "paged", "quantized", "sinks", "dsinks",
})  # fmt: skip
