"""Attention functions that tests pass to `judge`: ours with each backend, and those of other packages."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashpoint_kernels
from tests.conftest import FUSED


def _ours(backend: str) -> Callable[..., Any]:
    def attention(
        q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None,
        window: tuple[int, int] = (-1, -1), softcap: float = 0.0, attn_mask: Tensor | None = None,
        alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, kv_lengths: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:  # fmt: skip
        return flashpoint_kernels.attention(
            q, k, v, causal=causal, scale=scale, window=window, softcap=softcap, attn_mask=attn_mask,
            alibi_slopes=alibi_slopes, sinks=sinks, kv_lengths=kv_lengths, return_lse=return_lse, backend=backend,
        )  # fmt: skip

    return attention


def _sdpa(backend: SDPBackend) -> Callable[..., Any]:
    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
            )

    return attention


OURS = {name: _ours(name) for name in ("triton", FUSED, "tiled", "reference")}
SDPA = {
    "sdpa_flash": _sdpa(SDPBackend.FLASH_ATTENTION),
    "sdpa_efficient": _sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "sdpa_cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "sdpa_math": _sdpa(SDPBackend.MATH),
}
for _name, _function in [*((f"ours_{n}", f) for n, f in OURS.items()), *SDPA.items()]:
    _function.__module__, _function.__name__, _function.__qualname__ = __name__, _name, _name
    globals()[_name] = _function

# Functions of other packages, if installed: MODULE:FUNCTION.
OTHERS = {
    "flash_attn": "flash_attn:flash_attn_func",
    "flash_attn_varlen": "flash_attn:flash_attn_varlen_func",
    "flashinfer": "flashinfer:single_prefill_with_kv_cache",
}


def installed(target: str) -> bool:
    """Return whether the module of MODULE:FUNCTION can be found."""
    return importlib.util.find_spec(target.partition(":")[0]) is not None
