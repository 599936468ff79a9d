"""One to three float32 query rows for each key/value head, over chunks of keys, by plain matrix products.

torch's fused operator gives other bits there with another number of threads: with AVX2, BLAS selects its code for so
few rows by the alignment of the scores, and the scores of each thread but the first are not aligned. The products of a
batch have the same bits for any batch and any number of threads, and take no more time.

Each chunk has its own largest score and its own sum, so the bits do not depend on which chunks share a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from flashpoint_kernels.products import product

_ROWS = 3
_SCORES = 1 << 18  # maximum scores in memory, if heads allow: 1 MiB, which stays in a core's cache
_LEAST = torch.finfo(torch.float32).min


def is_thin(rows: Tensor, k: Tensor) -> bool:
    """Return whether `solve` is for these rows (n, H, g, D) and keys."""
    return rows.shape[2] <= _ROWS and k.dtype == torch.float32


class Chunks(Protocol):
    """Chunks in place of a tensor (m, H, c, D), which exist one after the other, (H, c, D)."""

    @property
    def shape(self) -> tuple[int, int, int, int]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, some: slice) -> Chunks: ...
    def __iter__(self) -> Iterator[Tensor]: ...


def solve(rows: Tensor, k: Tensor | Chunks, v: Tensor | Chunks, scale: float) -> tuple[Tensor, Tensor]:
    """Return o (m, H, g, Dv) and lse (m, H, g) of rows (m|1, H, g, D), each over its own chunk of k (m, H, c, D) and v
    (m, H, c, Dv).

    A row whose scores are all −∞ has o = 0 and lse = −∞.
    """
    rows = rows.expand(len(k), -1, -1, -1)
    turned = False
    if isinstance(k, Tensor) and isinstance(v, Tensor) and not _is_one(k, v):
        by_head = k.transpose(0, 1), v.transpose(0, 1)
        if turned := _is_one(*by_head):
            rows, (k, v) = rows.transpose(0, 1), by_head
    (count, heads, length, _), height = k.shape, rows.shape[2]
    o, lse = rows.new_empty(count, heads, height, v.shape[3]), rows.new_empty(count, heads, height)
    one, step = _is_one(k, v), max(1, _SCORES // (heads * height * length))
    for first in range(0, count, step):
        own = slice(first, first + step)
        s = rows.new_empty(len(o[own]), heads, height, length)
        _multiply(rows[own], k[own], s, one, transposed=True)
        most = s.mul_(scale).amax(-1, keepdim=True).clamp_(min=_LEAST)  # instead of −∞
        total = s.sub_(most).exp_().sum(-1, keepdim=True)
        _multiply(s, v[own], o[own], one)
        o[own] /= total.clamp(min=1.0)  # it is less only if all scores are −∞
        torch.add(most[..., 0], total[..., 0].log_(), out=lse[own])
    return (o.transpose(0, 1), lse.transpose(0, 1)) if turned else (o, lse)


def _is_one(k: Tensor | Chunks, v: Tensor | Chunks) -> bool:
    """Return whether the first two dimensions of k and of v have equal steps in memory, so that they can be one."""
    if not isinstance(k, Tensor) or not isinstance(v, Tensor):
        return False
    return k.shape[0] == 1 or k.shape[1] == 1 or all(t.stride(0) == t.shape[1] * t.stride(1) for t in (k, v))


def _multiply(a: Tensor, b: Tensor | Chunks, out: Tensor, one: bool, transposed: bool = False) -> None:
    """Write a (m, H, M, K) times b (m, H, K, N), or times its transpose, to `out`, which is contiguous.

    With `one`, in a single call.
    """
    if one:
        assert isinstance(b, Tensor)
        a, b, out = a.flatten(0, 1)[None], b.flatten(0, 1)[None], out.flatten(0, 1)[None]
    for a_, b_, out_ in zip(a, b, out, strict=True):
        product(a_, b_.mT if transposed else b_, out_)
