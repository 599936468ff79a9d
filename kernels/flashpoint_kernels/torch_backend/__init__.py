"""The backend `torch`: on the CPU the kernels in C (cpu.py), on CUDA torch's own fused operators (fused.py)."""

# The features of torch's operators, on CUDA. "value_dim" (D ≠ Dv) and "dlse" are not among them. On the CPU,
# native.SUPPORT has those of the kernels in C.
SUPPORT = frozenset({
    "float16", "bfloat16", "float32", "causal", "gqa", "thd", "tf32", "lengths", "bool_mask", "float_mask", "lse",
    "backward", "paged", "quantized", "sinks", "dsinks",
})  # fmt: skip
