"""The library's two functions: `attention`, which is differentiable, and `attention_backward`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from numbers import Real
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from flashpoint_contract.options import Options, ProblemError
from flashpoint_kernels import ops, plain

# all options except `window`, in the order in which `attention` passes them
_OTHERS = (
    "layout", "causal", "causal_alignment", "block_size", "scale", "softcap", "dropout_p", "dropout_seed", "precision",
    "return_lse", "deterministic", "backend",
)  # fmt: skip


class Keywords(TypedDict, total=False):
    """Keywords of `attention` that do not change the type of its result. See `attention`."""

    attn_mask: Tensor | None
    block_mask: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    q_lengths: Tensor | None
    kv_lengths: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    block_table: Tensor | None
    k_scale: Tensor | float | None
    v_scale: Tensor | float | None
    layout: str
    causal: bool
    causal_alignment: str
    window: Sequence[int]
    block_size: Sequence[int]
    scale: float | None
    softcap: float
    dropout_p: float
    dropout_seed: int | None
    precision: str
    deterministic: bool
    backend: str


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **keywords: Unpack[Keywords]
) -> Tensor: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **keywords: Unpack[Keywords]
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **keywords: Unpack[Keywords]
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    block_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    q_lengths: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    block_table: Tensor | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    layout: str = "bhsd",
    causal: bool = False,
    causal_alignment: str = "bottom_right",
    window: Sequence[int] = (-1, -1),
    block_size: Sequence[int] = (128, 128),
    scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    precision: str = "ieee",
    return_lse: bool = False,
    deterministic: bool = True,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, softmax(scale·q·kᵀ)·v, without the Sq × Sk matrix in memory (FlashAttention-2, Dao 2023).

    B batch, Sq and Sk query and key lengths, Hq query heads, Hk key/value heads (Hq a multiple of Hk), D and Dv the
    head dimensions of q, k and of v: at most 256 each, 576 in a forward on `triton` or `tiled`, any on `reference`.

    Args:
        q: (B, Hq, Sq, D) in layout `bhsd`, (B, Sq, Hq, D) in `bshd`, (Tq, Hq, D) in `thd`; (S, D) and (B, S, D) are one
            head. float16, bfloat16, float32; float64 on `reference`.
        k, v: likewise with Hk heads and Sk rows, of D and Dv; q's dtype, or both float8_e4m3fn or int8, with scales.
        attn_mask: bool (true = visible) or float (added to the scaled scores), broadcastable to (B, Hq, Sq, Sk).
        block_mask: bool (B or 1, Hq or 1, ceil(Sq/Mq), ceil(Sk/Mk)), for blocks of `block_size` that count from each
            sequence's first row: false blocks are skipped, in forward and backward. See `create_block_mask`.
        alibi_slopes: (Hq,) or (B, Hq); adds −slope·|i + offset − j| to the scores. Not differentiable.
        sinks: (Hq,); an additional logit for each head, only in the softmax's denominator.
        q_lengths, kv_lengths: (B,) int32 or int64, valid rows of padded sequences; later rows are never read, and their
            answers are 0 (`lse` −∞).
        cu_seqlens_q, cu_seqlens_k: (n+1,) int32 or int64, where each sequence of layout `thd` starts and ends.
        block_table: (B, pages) int32, with `kv_lengths`: k and v are pages, (n, Hk, page_size, D) in layout `bhsd`,
            (n, page_size, Hk, D) in `bshd` and `thd`. Key j of sequence b is key j % page_size of page
            block_table[b, j // page_size]. Any page size; a page may be in several sequences; pages may be strided.
            Entries after a sequence's ceil(length / page_size) pages are never read; the others must be below n,
            which is checked if `block_table` is on the CPU. Sk is pages·page_size. In `thd`, omit `cu_seqlens_k`.
        k_scale, v_scale: factors of 8-bit k and v: a number, a tensor (B, Hk) or (1, Hk), or a tensor of k's shape
            without D (in `thd`, (B, Hk) wins if the shapes are equal). Any float dtype, finite. See `quantize`.
        layout: `bhsd`, `bshd` or `thd`.
        causal: query i sees key j only if j <= i + offset.
        causal_alignment: `bottom_right`: offset = Sk − Sq; `top_left`: offset = 0. With each sequence's own lengths.
        window: [left, right], keys visible on each side of the diagonal j = i + offset; −1 = no bound.
        block_size: (Mq, Mk), numbers of queries and keys in a block of `block_mask`, multiples of 16.
        scale: factor of q·k; None = 1/sqrt(D).
        softcap: s = softcap·tanh(s/softcap) before mask and bias; 0 = off.
        dropout_p, dropout_seed: Philox dropout of the probabilities, 0 <= p < 1; the mask depends only on the
            seed, not on the backend. Without a seed, one is drawn from torch's generator.
        precision: float32 matrix products, `ieee` or `tf32`.
        return_lse: also return the natural log of the softmax's denominator.
        deterministic: gradients bitwise equal from run to run.
        backend: `auto`, or one of `triton`, `torch`, `tiled`, `reference`, which is then never replaced.

    Returns:
        o in q's dtype, layout and rank, with Dv columns; with `return_lse` (o, lse), lse float32 of (B, Hq, Sq),
        (Hq, Tq) in `thd`, (B, S) and (S,) for 3-D and 2-D q. A query that sees no key has o = 0 and lse = −∞ (with a
        sink, the sink), and zero gradients.

        Differentiable once in q, k, v, a float attn_mask and sinks, through o and lse; not with pages or 8-bit keys.

    Raises:
        ProblemError: a ValueError whose `errors` name each field that is invalid or not supported by the backend.
    """
    options = _options(
        window, layout, causal, causal_alignment, block_size, scale, softcap, dropout_p, dropout_seed, precision,
        return_lse, deterministic, backend,
    )  # fmt: skip
    if (
        attn_mask is None and block_mask is None and alibi_slopes is None and sinks is None and q_lengths is None
        and kv_lengths is None and cu_seqlens_q is None and cu_seqlens_k is None and block_table is None
        and k_scale is None and v_scale is None and (answers := plain.attention(q, k, v, options)) is not None
    ):  # fmt: skip
        return answers if return_lse else answers[0]
    tensors = {
        "q": q, "k": k, "v": v, "attn_mask": attn_mask, "block_mask": block_mask, "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "q_lengths": q_lengths, "kv_lengths": kv_lengths, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
        "block_table": block_table, "k_scale": _scale(k_scale), "v_scale": _scale(v_scale),
    }  # fmt: skip
    _check_tensors(tensors)
    o, lse = ops.attention(tensors, options)
    return (o, lse) if return_lse else o


def attention_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor | None = None,
    lse: Tensor | None = None,
    *,
    dlse: Tensor | None = None,
    grads: Sequence[str] = ("dq", "dk", "dv"),
    attn_mask: Tensor | None = None,
    block_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    q_lengths: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    layout: str = "bhsd",
    causal: bool = False,
    causal_alignment: str = "bottom_right",
    window: Sequence[int] = (-1, -1),
    block_size: Sequence[int] = (128, 128),
    scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    precision: str = "ieee",
    deterministic: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, ...]:
    """Return the gradients of `attention` for the gradient `do` of `o`, and optionally `dlse` of `lse`.

    Args:
        do: o's shape and dtype.
        q, k, v: as for the forward, with the same options; with dropout, `dropout_seed` is required.
        o, lse: the forward's answers. Both or neither: without them, the forward runs again.
        dlse: lse's shape, float32.
        grads: names of the gradients: dq, dk, dv, dattn_mask (float mask) and dsinks.
    Returns:
        One tensor for each name in `grads`, in that order, with the shape, layout and dtype of its input.
    Raises:
        ProblemError: as `attention`.
    """
    tensors = {
        "q": q, "k": k, "v": v, "do": do, "o": o, "lse": lse, "dlse": dlse,
        "attn_mask": attn_mask, "block_mask": block_mask, "alibi_slopes": alibi_slopes, "sinks": sinks,
        "q_lengths": q_lengths, "kv_lengths": kv_lengths, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
    }  # fmt: skip
    options = Options(
        layout=layout, causal=causal, causal_alignment=causal_alignment, window=window,  # type: ignore[arg-type]
        block_size=block_size, scale=scale, softcap=softcap,  # type: ignore[arg-type]
        dropout_p=dropout_p, dropout_seed=dropout_seed, precision=precision,
        grads=grads, deterministic=deterministic, backend=backend,  # type: ignore[arg-type]
    )  # fmt: skip
    _check_tensors(tensors)
    return tuple(ops.attention_backward(tensors, options))


def _options(window: Sequence[int], *given: Any) -> Options:
    """Return the cached options of a call: checking them takes as long as torch's operator on a short sequence."""
    if type(window) in (tuple, list) and len(window) == 2 and not torch.compiler.is_compiling():
        try:
            return _remembered(window[0], window[1], *given)
        except TypeError:  # an unhashable value is not a valid option; `_made` reports it
            pass
    return _made(window, *given)


@lru_cache(1024, typed=True)  # typed: True must differ from 1
def _remembered(left: int, right: int, *given: Any) -> Options:
    return _made((left, right), *given)


def _made(window: Sequence[int], *given: Any) -> Options:
    return Options(window=window, **dict(zip(_OTHERS, given, strict=True)))  # type: ignore[arg-type]


def _scale(value: Tensor | float | None) -> Tensor | None:
    """Return a number as a tensor, and anything else unchanged."""
    if isinstance(value, Real) and not isinstance(value, bool):
        return torch.tensor(float(value), dtype=torch.float64)
    return value  # type: ignore[return-value]  # the caller checks that it is a tensor


def _check_tensors(tensors: Mapping[str, Tensor | None]) -> None:
    """Raise ProblemError for values that are not tensors: the dispatcher's message would be about its schema."""
    for name, t in tensors.items():
        if t is not None and not isinstance(t, Tensor):
            raise ProblemError([(name, f"must be a torch tensor, not {type(t).__name__}")])
