"""One thing to time, and how carefully: plain data, checked, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from flashpoint_contract.options import ProblemError
from flashpoint_contract.tensors import MAX_HEAD_DIM

CaseDirection = Literal["forward", "backward", "both"]
DIRECTIONS = ("forward", "backward", "both")
DTYPES = ("float16", "bfloat16", "float32")

# What a case may name: our backends, the formula written out, torch's own, and packages that may be installed.
TIMED = (
    "naive", "naive_explicit", "triton", "torch", "tiled", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math",
    "flex", "flash_attn", "flash_attn_3", "flashinfer", "xformers",
)  # fmt: skip

ROW_FIELDS = (
    "backend", "version", "device", "direction", "dtype", "causal", "batch", "q_heads", "kv_heads", "q_len", "kv_len",
    "head_dim", "value_dim", "ms", "ms_p20", "ms_p80", "repeats", "tflops", "tflops_standard", "flops",
    "flops_standard", "bytes", "gb_per_s", "arithmetic_intensity", "roofline_percent", "peak_bytes",
    "speedup_over_naive", "longest_slice_ms", "skipped",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """One implementation on one problem, standard normal q, k, v and do in layout bhsd. Raises ProblemError.

    `direction`: "forward"; "backward" alone, from what a forward kept; "both", one after the other. The diagonal of a
    causal problem is aligned bottom right. `kv_heads`, `kv_len` and `value_dim` of 0 are q's.
    """

    backend: str
    batch: int
    q_heads: int
    q_len: int
    head_dim: int
    kv_heads: int = 0
    kv_len: int = 0
    value_dim: int = 0
    dtype: str = "bfloat16"
    causal: bool = False
    direction: CaseDirection = "forward"

    def __post_init__(self) -> None:
        for name, same in (("kv_heads", self.q_heads), ("kv_len", self.q_len), ("value_dim", self.head_dim)):
            object.__setattr__(self, name, getattr(self, name) or same)
        allowed = {"backend": TIMED, "dtype": DTYPES, "direction": DIRECTIONS}
        errors = [
            (name, f"{getattr(self, name)!r} is none of {', '.join(choices)}")
            for name, choices in allowed.items()
            if getattr(self, name) not in choices
        ]
        sizes = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim")
        errors += [(name, "must be at least 1") for name in sizes if getattr(self, name) < 1]
        errors += [
            (name, f"must be at most {MAX_HEAD_DIM}")
            for name in ("head_dim", "value_dim")
            if getattr(self, name) > MAX_HEAD_DIM
        ]
        if not errors and self.q_heads % self.kv_heads:
            errors.append(("kv_heads", f"q_heads, {self.q_heads}, must be a multiple of them, not {self.kv_heads}"))
        if errors:
            raise ProblemError(errors)

    @property
    def problem(self) -> tuple[Any, ...]:
        """What cases share that differ in their implementation alone."""
        return (
            self.batch, self.q_heads, self.kv_heads, self.q_len, self.kv_len, self.head_dim, self.value_dim,
            self.dtype, self.causal, self.direction,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How long to look. Raises ProblemError.

    After a first call and `warmup_ms` of others, calls are repeated until the median is known to `precision`, half the
    width of its 95% confidence interval over itself, but for no longer than `max_seconds` of work, and `min_repeats`
    times at least, however long that is.
    """

    precision: float = 0.01
    max_seconds: float = 3.0
    min_repeats: int = 3
    max_repeats: int = 1000  # a hundredth is known long before, unless something else runs
    warmup_ms: float = 50.0  # a CPU's clock and thread pool, a GPU's clock, settle in less
    slice_ms: float = 20.0

    def __post_init__(self) -> None:
        errors = [
            (name, "must be above 0")
            for name in ("precision", "max_seconds", "slice_ms")
            if not getattr(self, name) > 0
        ]
        if not self.warmup_ms >= 0:
            errors.append(("warmup_ms", "must not be negative"))
        if not 1 <= self.min_repeats <= self.max_repeats:
            errors.append(("min_repeats", "must be at least 1, and at most max_repeats"))
        if errors:
            raise ProblemError(errors)
