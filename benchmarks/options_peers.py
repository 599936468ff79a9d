"""Measure rows of options.py: each option beside compiled FlexAttention, and decode beside torch's fused operator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from runner import pair
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from flashpoint_kernels import attention

HEADS, LENGTH, DIM, DOCUMENT, CAP, KEYS = 8, 2048, 64, 256, 30.0, 4096
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 4e-2}
ROUND = 0.15  # least seconds of each of the two sides in a round

Call = Callable[[], Tensor]


def qkv(length: int = LENGTH, kv_heads: int = HEADS, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return tuple(torch.randn(1, heads, length, DIM).to(dtype) for heads in (HEADS, kv_heads, kv_heads))


def flex(q: Tensor, k: Tensor, v: Tensor, mod: Any = None, sees: Any = None) -> Call:
    """Return a call of FlexAttention that compiles when first called; `sees` is a mask_mod, `mod` a score_mod."""
    torch.compiler.reset()
    lengths = q.shape[2], k.shape[2]
    blocks = None if sees is None else create_block_mask(sees, None, None, *lengths, device="cpu")
    compiled = torch.compile(flex_attention)
    return lambda: compiled(q, k, v, score_mod=mod, block_mask=blocks, enable_gqa=q.shape[1] != k.shape[1])


def cases() -> Iterator[tuple[str, bool, Callable[[], tuple[Call, Call]]]]:
    """Yield each option's name, whether it counts for the targets, and a function that makes the two calls."""
    slopes = torch.tensor([2.0 ** -(head + 1) for head in range(HEADS)])
    allowed, bias = torch.rand(LENGTH, LENGTH) < 0.8, torch.randn(LENGTH, LENGTH)
    document = torch.arange(LENGTH) // DOCUMENT

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    def narrow(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i - j <= 256)

    def wide(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i - j <= 1024) & (j - i <= 1024)

    def dense(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return allowed[i, j]

    def documents(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (document[i] == document[j]) & (i >= j)

    def linear(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s - slopes[h] * (i - j)

    def capped(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return CAP * torch.tanh(s / CAP)

    def biased(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + bias[i, j]

    def both(mod: Any = None, sees: Any = None, sizes: dict[str, Any] | None = None, **keywords: Any) -> Any:
        def calls() -> tuple[Call, Call]:
            q, k, v = qkv(**(sizes or {}))
            return lambda: attention(q, k, v, **keywords), flex(q, k, v, mod, sees)

        return calls

    def packed() -> tuple[Call, Call]:
        q, k, v = qkv()
        ragged_qkv = [t[0].transpose(0, 1).contiguous() for t in (q, k, v)]
        starts = torch.arange(0, LENGTH + 1, DOCUMENT, dtype=torch.int32)
        ragged: dict[str, Any] = {"layout": "thd", "cu_seqlens_q": starts, "cu_seqlens_k": starts, "causal": True}
        return lambda: attention(*ragged_qkv, **ragged).transpose(0, 1)[None], flex(q, k, v, sees=documents)

    yield "no options", True, both()
    yield "causal", True, both(sees=causal, causal=True)
    yield "window [256, 0], causal", True, both(sees=narrow, causal=True, window=(256, 0))
    yield "window [1024, 1024]", True, both(sees=wide, window=(1024, 1024))
    yield "alibi_slopes, causal", True, both(linear, causal, causal=True, alibi_slopes=slopes)
    yield "softcap", True, both(capped, softcap=CAP)
    yield "softcap, causal", True, both(capped, causal, softcap=CAP, causal=True)
    yield "attn_mask, bool", True, both(sees=dense, attn_mask=allowed)
    yield "attn_mask, float", True, both(biased, attn_mask=bias)
    yield "documents of 256, causal (ours: ragged)", True, packed
    yield "Hk 2 (GQA), causal", True, both(sees=causal, made={"kv_heads": 2}, causal=True)
    yield "causal, N 512", False, both(sees=causal, made={"length": 512}, causal=True)
    yield "causal, bfloat16", False, both(sees=causal, made={"dtype": torch.bfloat16}, causal=True)
    yield "softcap, bfloat16", False, both(capped, made={"dtype": torch.bfloat16}, softcap=CAP)


def beside_flex(rounds: int) -> Iterator[dict[str, Any]]:
    """Yield each option beside FlexAttention. Its first call, which compiles, is timed apart."""
    torch.manual_seed(0)
    for name, counted, make in cases():
        ours, other = make()
        began = time.perf_counter()
        theirs = other()
        compiled = time.perf_counter() - began
        check(name, ours(), theirs)
        yield {
            "option": name,
            "counted": counted,
            **pair(ours, other, rounds, ROUND),
            "compile_s": round(compiled, 2),
        }


def check(name: str, ours: Tensor, theirs: Tensor) -> None:
    """Raise AssertionError if the two answers differ by more than rounding."""
    torch.testing.assert_close(
        ours, theirs, atol=CLOSE[ours.dtype], rtol=CLOSE[ours.dtype], msg=lambda text: f"{name}: {text}"
    )


def paged(k: Tensor, v: Tensor, size: int) -> dict[str, Any]:
    """Return the keys and values in pages of `size` keys, in random order."""
    batch, heads, length, _ = k.shape
    count = batch * length // size
    order = torch.randperm(count)
    pools = (t.view(batch, heads, -1, size, t.shape[-1]).transpose(1, 2).flatten(0, 1) for t in (k, v))
    pool_k, pool_v = (pool[order].contiguous() for pool in pools)
    table = order.argsort().view(batch, -1).to(torch.int32)
    lengths = torch.full((batch,), length, dtype=torch.int32)
    return {"k": pool_k, "v": pool_v, "block_table": table, "kv_lengths": lengths}


def decode(rounds: int) -> Iterator[dict[str, Any]]:
    """Yield rows of one query of 8 sequences against 4,096 keys, beside torch's operator with contiguous keys.

    Torch's operator reads grouped keys once for each query head. So it gets the heads of a group as queries.
    """
    torch.manual_seed(0)
    q, k, v = (torch.randn(8, 8, length, 64) for length in (1, KEYS, KEYS))

    def torchs() -> Tensor:
        return scaled_dot_product_attention(q, k, v)

    def row(name: str, ours: Call, other: Call, least: float) -> dict[str, Any]:
        check(name, ours(), other())
        return {"decode": name, **pair(ours, other, rounds, ROUND), "least": least}

    yield row("(8,8,1,64), float32", lambda: attention(q, k, v), torchs, 0.95)
    for size, least in ((1024, 0.95), (16, 0.35)):
        pages = paged(k, v, size)
        yield row(f"(8,8,1,64), float32, pages of {size:,}", lambda p=pages: attention(q, **p), torchs, least)
    grouped = [torch.randn(8, heads, length, 128).bfloat16() for heads, length in ((32, 1), (8, KEYS), (8, KEYS))]
    folded = [grouped[0].view(8, 8, 4, 128), *grouped[1:]]
    yield row(
        "(8,32,1,128), 8 key heads, bfloat16",
        lambda: attention(*grouped),
        lambda: scaled_dot_product_attention(*folded).view(8, 32, 1, 128),
        0.95,
    )
