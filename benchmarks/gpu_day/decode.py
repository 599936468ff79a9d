"""Time one query per sequence over a cache of keys and values, contiguous or in pages, with several packages.

If a package is missing, or our library lacks an argument, the row contains the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_day.device import Cuda
from benchmarks.gpu_day.plan import Decode
from flashpoint_kernels import attention
from flashpoint_kernels.timing.implementations import IMPLEMENTATIONS, CannotRunError

_WRONG = 0.05  # largest allowed error over the largest value: more than the rounding of bfloat16


@dataclass(frozen=True)
class Cache:
    """q is (B, 1, Hq, D). k and v are (B, S, Hk, D), or (pages, page, Hk, D) with `table` (B, pages per sequence)."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: Tensor  # (B) int32
    table: Tensor | None


Call = Callable[[], Tensor]


def decode(device: Cuda, task: Decode) -> dict[str, Any]:
    """Return milliseconds, GB/s of keys and values, and the package's version; or `skipped` with the reason."""
    # Decoding reads each key and value at least once: two tensors of two bytes per element.
    nbytes = 2 * 2 * task.batch * task.kv_len * task.kv_heads * task.head_dim
    row: dict[str, Any] = {"ms": None, "skipped": None, "bytes": nbytes}
    try:
        row["version"] = IMPLEMENTATIONS[task.backend].version()
        cache = make_cache(device, task)
        call = _MAKERS[task.backend](task, cache)
        relative_error = _off(call(), cache)
        if not relative_error < _WRONG:
            return row | {"wrong_by": relative_error}
        ms = median(device.milliseconds(call))
    except (CannotRunError, ImportError) as error:
        return row | {"skipped": str(error)}
    return row | {"ms": ms, "off": relative_error, "gb_per_s": nbytes / ms / 1e6}


def make_cache(device: Cuda, task: Decode) -> Cache:
    """Return a cache of standard normal numbers in bfloat16, with pages in random order."""
    generator = torch.Generator(device.name).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device.name, dtype=torch.bfloat16)

    q = normal(task.batch, 1, task.q_heads, task.head_dim)
    lengths = torch.full((task.batch,), task.kv_len, dtype=torch.int32, device=device.name)
    blocks, size, table = task.batch, task.kv_len, None
    if task.page:
        blocks, size = task.batch * -(-task.kv_len // task.page), task.page
        table = torch.randperm(blocks, generator=generator, device=device.name).int().view(task.batch, -1)
    k, v = (normal(blocks, size, task.kv_heads, task.head_dim) for _ in range(2))
    return Cache(q, k, v, lengths, table)


def _off(answer: Tensor, cache: Cache) -> float:
    """Return the largest error in the last sequence against float32, divided by the largest value."""
    k, v = cache.k[-1:], cache.v[-1:]
    if cache.table is not None:
        k, v = (t[cache.table[-1].long()].flatten(0, 1)[None] for t in (cache.k, cache.v))
    length = int(cache.lengths[-1])
    q, k, v = (t.float().transpose(1, 2) for t in (cache.q[-1:], k[:, :length], v[:, :length]))
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    exact = torch.softmax(q @ k.transpose(2, 3) * q.shape[-1] ** -0.5, -1) @ v
    return float((answer[-1].float() - exact[0, :, 0]).abs().max() / exact.abs().max())


def _ours(_task: Decode, cache: Cache) -> Call:
    """Return a call of our kernels with result (B, Hq, D). Lengths are on the CPU, so it does not wait for the GPU."""
    paging: dict[str, Any] = {}
    if cache.table is not None:
        paging = {"block_table": cache.table, "kv_lengths": torch.tensor(cache.lengths.tolist())}
    return lambda: attention(cache.q, cache.k, cache.v, layout="bshd", backend="triton", **paging)[:, 0]


def _sdpa(backend: SDPBackend, task: Decode, cache: Cache) -> Call:
    q, k, v = (t.transpose(1, 2) for t in (cache.q, cache.k, cache.v))

    def call() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, enable_gqa=task.q_heads != task.kv_heads)[:, :, 0]

    try:
        call()
    except RuntimeError as error:  # no SDPA kernel supports the call
        raise CannotRunError(str(error).splitlines()[0]) from error
    return call


def _flash_attn(module: str, table: str, task: Decode, cache: Cache) -> Call:
    if module == "flash_attn" and task.page % 256:
        raise CannotRunError("its pages are multiples of 256")
    run = import_module(module).flash_attn_with_kvcache
    pages = {} if cache.table is None else {table: cache.table}

    def call() -> Tensor:
        o = run(cache.q, cache.k, cache.v, cache_seqlens=cache.lengths, **pages)
        return (o[0] if isinstance(o, tuple) else o)[:, 0]

    return call


def _flashinfer(task: Decode, cache: Cache) -> Call:
    assert cache.table is not None
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=cache.q.device)  # size from flashinfer's documentation
    grouped = task.q_heads // task.kv_heads >= 4
    wrapper = import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=grouped)
    pages = cache.table.shape[1]
    starts = torch.arange(task.batch + 1, dtype=torch.int32, device=cache.q.device) * pages
    wrapper.plan(
        starts, cache.table.flatten(), cache.lengths - (pages - 1) * task.page, task.q_heads, task.kv_heads,
        task.head_dim, task.page, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    q = cache.q[:, 0]
    return lambda: wrapper.run(q, (cache.k, cache.v))


_MAKERS: dict[str, Callable[[Decode, Cache], Call]] = {
    "triton": _ours,
    "sdpa_flash": partial(_sdpa, SDPBackend.FLASH_ATTENTION),
    "sdpa_cudnn": partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
    "flash_attn": partial(_flash_attn, "flash_attn", "block_table"),
    "flash_attn_3": partial(_flash_attn, "flash_attn_interface", "page_table"),
    "flashinfer": _flashinfer,
}
