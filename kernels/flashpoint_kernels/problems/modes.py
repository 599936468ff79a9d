"""Keep modes that a program may set from changing the bits of torch's operators: autocast, products and denormals.

`torch.set_float32_matmul_precision("medium")` lets products of float32 matrices run in bfloat16 or TF32, also on the
CPU. `torch.set_flush_denormal(True)` turns denormal numbers into zeros in the thread that calls it. The kernels in C
and Triton's kernels depend on neither.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_DENORMAL = torch.tensor(1e-40, dtype=torch.float32, device="cpu")
_PRODUCTS = ("cuda", "matmul"), ("mkldnn", "matmul")
# The functions of `torch.backends.*.matmul.fp32_precision`, which a program may freeze for itself.
_precision, _set_precision = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter


def traced() -> bool:
    """Return whether `torch.jit.trace` records this call. torch.compile does not know torch's function for it."""
    return not torch.compiler.is_compiling() and torch._C._is_tracing()


def readable(t: torch.Tensor) -> bool:
    """Return whether values of `t` may be read: not where this waits for a GPU, nor in a program that is recorded.

    `torch.jit.trace` records a shape as an operation, but a value as a constant. `torch.compile` has no values.
    """
    return not (t.is_cuda or torch.compiler.is_compiling() or traced())


class _Exact:
    """The process's precision of float32 products, which threads share: exact while any thread needs it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before: list[str] = []

    @contextmanager
    def held(self) -> Iterator[None]:
        with self._lock:
            if not self._users:
                self._before = [_precision(*products) for products in _PRODUCTS]
                self._set(["ieee"] * len(_PRODUCTS))
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._set(self._before)

    def _set(self, precisions: list[str]) -> None:
        for products, before, precision in zip(_PRODUCTS, self._before, precisions, strict=True):
            if before not in ("ieee", "none"):  # these two are exact already
                _set_precision(*products, precision)


_exact = _Exact()


@contextmanager
def exact_products() -> Iterator[None]:
    """Compute products of float32 matrices in float32, in all threads, and restore the process's precision."""
    with _exact.held():
        yield


@contextmanager
def without_autocast() -> Iterator[None]:
    """Compute each operator in the dtype of its tensors, in this thread."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def flushes() -> bool:
    """Return whether this thread treats denormal numbers as zeros."""
    return not bool(_DENORMAL * 1.0 != 0.0)


@contextmanager
def flushing(wanted: bool) -> Iterator[None]:
    """Treat denormal numbers as zeros in this thread, or keep them, and restore the thread's mode."""
    before = flushes()
    if before != wanted:
        torch.set_flush_denormal(wanted)
    try:
        yield
    finally:
        if before != wanted:
            torch.set_flush_denormal(before)
