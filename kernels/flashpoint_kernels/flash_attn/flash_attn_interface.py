"""The functions of `flash_attn.flash_attn_interface` (FlashAttention-2, Dao 2023).

B is the batch, Sq and Sk are the numbers of queries and keys, H and Hk the heads of q and of k and v (H is a multiple
of Hk), D the columns, T the rows of all sequences one after another. Query i sees the keys j with
i + Sk − Sq − left <= j <= i + Sk − Sq + right, where `window_size` is (left, right) and −1 is without limit; `causal`
sets right to 0. ALiBi subtracts slope·|i + Sk − Sq − j|. A query that sees no key has out = 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashpoint_kernels.flash_attn.layers.rotary import apply_rotary_emb
from flashpoint_kernels.functional import attention
from flashpoint_kernels.operators.torch_rules import overridable, raises_as
from flashpoint_kernels.problems.memory import check_memory
from flashpoint_kernels.problems.modes import readable

Answer = Tensor | tuple[Tensor, Tensor, None]


class FlashAttnError(RuntimeError):
    """An argument is not valid: flash-attn raises RuntimeError for it."""


def _error(errors: Iterable[tuple[str, str]]) -> FlashAttnError:
    return FlashAttnError("; ".join(f"{name}: {text}" for name, text in errors))


# A decorator: replaces a ProblemError by a FlashAttnError, which has flash-attn's names of the arguments.
_in_flash_attns_words = raises_as(
    _error, {"scale": "softmax_scale", "window": "window_size", "kv_lengths": "cache_seqlens"}
)


@overridable
@_in_flash_attns_words
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Answer:
    """Return softmax(softmax_scale·q·kᵀ)·v for sequences of equal length.

    Args:
        q: Queries, (B, Sq, H, D), float16, bfloat16 or float32.
        k: Keys, (B, Sk, Hk, D).
        v: Values, (B, Sk, Hk, D); other columns than D are allowed, too.
        dropout_p: Probability with which each weight is dropped, also in evaluation. The seed is drawn from torch's
            generator of the CPU; the dropped weights are not those of flash-attn.
        softmax_scale: Factor of q·k; None is 1/sqrt(D).
        causal: Query i sees no key after i + Sk − Sq.
        window_size: (left, right), see the module; negative numbers are without limit.
        softcap: c > 0 makes scores c·tanh(score/c).
        alibi_slopes: (H,) or (B, H), float32.
        deterministic: Changes nothing: gradients always have the same bits.
        return_attn_probs: Return lse, too.

    Returns:
        out, (B, Sq, H, D); with `return_attn_probs` (out, softmax_lse, None), lse of shape (B, H, Sq) in float32.
        flash-attn returns a tensor for its tests in the place of None. Differentiable in q, k and v, also through lse.

    Raises:
        FlashAttnError: a RuntimeError that names the argument.
    """
    return _answer(
        attention(
            q, k, v, layout="bshd", dropout_p=dropout_p, scale=softmax_scale, causal=causal,
            window=_window(window_size), softcap=softcap, alibi_slopes=alibi_slopes, return_lse=return_attn_probs,
        )
    )  # fmt: skip


@overridable
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Answer:
    """Return `flash_attn_func` of q and of k and v in one tensor `kv`, (B, Sk, 2, Hk, D)."""
    k, v = _unpacked("kv", kv, 2, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


@overridable
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Answer:
    """Return `flash_attn_func` of q, k and v in one tensor `qkv`, (B, S, 3, H, D)."""
    q, k, v = _unpacked("qkv", qkv, 3, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


@overridable
@_in_flash_attns_words
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Answer:
    """Return softmax(softmax_scale·q·kᵀ)·v for sequences of any lengths, one after another.

    Args:
        q: Queries, (Tq, H, D). Rows after the last sequence are not read; their out is 0.
        k: Keys, (Tk, Hk, D); with `block_table` pages, (n, page_size, Hk, D) of any page size.
        v: Values, as k.
        cu_seqlens_q: Rows where the B sequences of q start, and where the last ends: int32, (B + 1,).
        cu_seqlens_k: The same of k; with `block_table` their differences are the numbers of keys.
        max_seqlen_q: Changes nothing: the length of the longest sequence follows from `cu_seqlens_q`.
        max_seqlen_k: Changes nothing, as `max_seqlen_q`.
        dropout_p: See `flash_attn_func`.
        softmax_scale: Factor of q·k; None is 1/sqrt(D).
        causal: Query i of a sequence sees no key after i + Sk − Sq.
        window_size: (left, right) in each sequence.
        softcap: c > 0 makes scores c·tanh(score/c).
        alibi_slopes: (H,) or (B, H), float32.
        deterministic: Changes nothing.
        return_attn_probs: Return lse, too.
        block_table: Page numbers, int32, (B, pages): key j of sequence b is in page block_table[b, j // page_size].
            Forward only.

    Returns:
        out, (Tq, H, D); with `return_attn_probs` (out, softmax_lse, None), lse of shape (H, Tq) in float32.

    Raises:
        FlashAttnError: a RuntimeError that names the argument.
    """
    options: dict[str, Any] = {
        "layout": "thd", "dropout_p": dropout_p, "scale": softmax_scale, "causal": causal,
        "window": _window(window_size), "softcap": softcap, "alibi_slopes": alibi_slopes,
    }  # fmt: skip
    check_memory(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    end_q = _end(cu_seqlens_q, q)
    if block_table is not None:
        options |= {"kv_lengths": cu_seqlens_k.diff(), "block_table": block_table}
    else:
        end_k = _end(cu_seqlens_k, k)
        k, v = k[:end_k], v[:end_k]
        options["cu_seqlens_k"] = cu_seqlens_k
    answer = attention(q[:end_q], k, v, cu_seqlens_q=cu_seqlens_q, **options, return_lse=return_attn_probs)
    if end_q == len(q):
        return _answer(answer)
    o, lse = answer if isinstance(answer, tuple) else (answer, None)
    o = torch.cat([o, o.new_zeros(len(q) - end_q, *o.shape[1:])])
    if lse is None:
        return o
    return o, torch.cat([lse, lse.new_full((len(lse), len(q) - end_q), -torch.inf)], 1), None


@overridable
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Answer:
    """Return `flash_attn_varlen_func` of q and of k and v in one tensor `kv`, (Tk, 2, Hk, D)."""
    k, v = _unpacked("kv", kv, 2, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@overridable
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Answer:
    """Return `flash_attn_varlen_func` of q, k and v in one tensor `qkv`, (T, 3, H, D)."""
    q, k, v = _unpacked("qkv", qkv, 3, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@overridable
@_in_flash_attns_words
@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Append k and v to a cache in place, and return attention of q over it. Forward only.

    Args:
        q: Queries, (B, Sq, H, D).
        k_cache: Keys, (B_cache, S_cache, Hk, D); with `block_table` pages, (n, page_size, Hk, D) of any page size.
        v_cache: Values, as `k_cache`.
        k: New keys, (B, S_new, Hk, D), written after the first `cache_seqlens` keys. Needs v. None: write nothing.
        v: Values, as k.
        rotary_cos: Cosines of the rotary embedding, (positions, rotary_dim/2). Row i of k is rotated by its position
            in the cache, `cache_seqlens` + i. With `causal` or a window row i of q is rotated by the same position,
            otherwise each row of q by position `cache_seqlens`. Needs k.
        rotary_sin: Sines, as `rotary_cos`.
        cache_seqlens: Number of keys in the cache before the call: a number, or int32 (B,). None: all S_cache keys are
            valid. Needed with k.
        cache_batch_idx: Row of the cache for each sequence, int32, (B,); None: row b. Not with `block_table`.
        cache_leftpad: Number of keys at the start of each sequence that are not seen, int32, (B,). Not with
            `block_table`.
        block_table: Page numbers, int32, (B, pages).
        softmax_scale: Factor of q·k; None is 1/sqrt(D).
        causal: The last query sees all keys, the one before it all but the last one, and so on.
        window_size: (left, right), see the module.
        softcap: c > 0 makes scores c·tanh(score/c).
        rotary_interleaved: Columns 2i and 2i + 1 are a pair (GPT-J); else columns i and i + rotary_dim/2 (GPT-NeoX).
        alibi_slopes: (H,) or (B, H), float32.
        num_splits: Changes nothing.
        return_softmax_lse: Return lse, too.

    Returns:
        out, (B, Sq, H, D); with `return_softmax_lse` (out, softmax_lse), lse of shape (B, H, Sq) in float32.

    Raises:
        FlashAttnError: a RuntimeError that names the argument.
    """
    check_memory(
        q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
        block_table=block_table,
    )  # fmt: skip
    batch, capacity = len(q), k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    _check_cache(q, k_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    lengths = torch.full((batch,), capacity, dtype=torch.int32, device=q.device)
    if cache_seqlens is not None:
        lengths = (lengths * 0 + cache_seqlens).to(torch.int32)
    if block_table is not None and readable(lengths) and batch:
        longest = int(lengths.max()) + (0 if k is None else k.shape[1])
        if longest > capacity:
            room = f"{block_table.shape[1]} pages of {k_cache.shape[1]} keys"
            raise FlashAttnError(f"block_table: its {room} have no room for {longest}: pass more pages for a sequence")
    if rotary_cos is not None and rotary_sin is not None and k is not None:
        turned = partial(
            apply_rotary_emb, cos=rotary_cos, sin=rotary_sin, interleaved=rotary_interleaved, seqlen_offsets=lengths
        )
        # Without `causal` or a window, all queries of a sequence get the same position: pass them as heads of one row.
        moving = causal or max(window_size) >= 0
        k, q = turned(k), turned(q) if moving else turned(q.flatten(1, 2).unsqueeze(1)).view(q.shape)
    pages = block_table
    if pages is None and cache_batch_idx is not None:  # each row of the cache is a page
        pages = cache_batch_idx[:, None].to(torch.int32)
    if k is not None and v is not None:
        _append(k_cache, v_cache, k, v, lengths, pages, capacity)
        lengths = lengths + k.shape[1]
    mask = None
    if cache_leftpad is not None:
        seen = torch.arange(capacity, dtype=torch.int64, device=q.device) >= cache_leftpad[:, None]
        mask = seen[:, None, None, :]
    return attention(
        q, k_cache, v_cache, layout="bshd", kv_lengths=lengths, block_table=pages, attn_mask=mask, scale=softmax_scale,
        causal=causal, window=_window(window_size), softcap=softcap, alibi_slopes=alibi_slopes,
        return_lse=return_softmax_lse,
    )  # fmt: skip


def _check_cache(
    q: Tensor, k_cache: Tensor, k: Tensor | None, v: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    seqlens: int | Tensor | None, batch_idx: Tensor | None, leftpad: Tensor | None, block_table: Tensor | None,
) -> None:  # fmt: skip
    """Raise FlashAttnError for arguments that cannot be combined."""
    wrong = [
        ("v", "must be given with k", (k is None) != (v is None)),
        ("cache_seqlens", "must be given with k", k is not None and seqlens is None),
        ("rotary_sin", "must be given with rotary_cos", (cos is None) != (sin is None)),
        ("rotary_cos", "needs k: keys in the cache are turned already", cos is not None and k is None),
        ("cache_batch_idx", "must be None with block_table", batch_idx is not None and block_table is not None),
        ("cache_leftpad", "must be None with block_table", leftpad is not None and block_table is not None),
        (
            "k_cache",
            f"has {len(k_cache)} sequences, and q {len(q)}: give cache_batch_idx",
            block_table is None and batch_idx is None and len(k_cache) != len(q),
        ),
    ]
    for name, text, is_wrong in wrong:
        if is_wrong:
            raise FlashAttnError(f"{name}: {text}")


def _append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, lengths: Tensor, pages: Tensor | None, capacity: int
) -> None:
    """Write k and v (B, S_new, Hk, D) into the cache, after the first `lengths` rows of each sequence.

    Raises FlashAttnError if they do not fit. On a GPU and in a compiled program torch's indexing checks it.
    """
    places = lengths[:, None].long() + torch.arange(k.shape[1], dtype=torch.int64, device=k.device)
    if readable(lengths) and places.numel() and int(places.max()) >= capacity:
        of = "the cache" if pages is None else "the pages of block_table"
        raise FlashAttnError(f"k: {int(places.max()) + 1} keys do not fit into {of}, with room for {capacity}")
    if pages is None:
        page, row = torch.arange(len(k), dtype=torch.int64, device=k.device)[:, None], places
    else:
        size = k_cache.shape[1]
        page, row = pages.long().gather(1, places // size), places % size
    k_cache[page, row] = k
    v_cache[page, row] = v


def _answer(answer: Tensor | tuple[Tensor, Tensor]) -> Answer:
    return (*answer, None) if isinstance(answer, tuple) else answer


def _window(window_size: Sequence[int]) -> tuple[int, int]:
    """Return the window with −1 in place of any negative number."""
    left, right = window_size
    return max(int(left), -1), max(int(right), -1)


def _unpacked(name: str, t: Tensor, count: int, rank: int) -> tuple[Tensor, ...]:
    if t.ndim != rank or t.shape[-3] != count:
        before = "B, S" if rank == 5 else "T"
        raise FlashAttnError(f"{name}: must have shape ({before}, {count}, heads, D), not {tuple(t.shape)}")
    return t.unbind(-3)


def _end(cu_seqlens: Tensor, t: Tensor) -> int:
    """Return the end of the last sequence; the rows of `t` where it cannot be read: then the operator checks it."""
    return int(cu_seqlens[-1]) if readable(cu_seqlens) and cu_seqlens.numel() else t.shape[0]
