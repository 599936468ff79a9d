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
    """Keywords of `attention` that do not change the type of its result."""

    attn_mask: Tensor | None
    """Mask, broadcastable to (B, Hq, Sq, Sk): bool (true: attend) or float (added to the scaled scores). Not in layout
    `thd`.
    """
    block_mask: Tensor | None
    """Mask of blocks, bool, (B or 1, Hq or 1, ceil(Sq/Mq), ceil(Sk/Mk)): blocks of `block_size` that are false are
    skipped. Blocks count from each sequence's first row. Not in layout `thd`. `flashpoint_kernels.create_block_mask`
    makes one.
    """
    alibi_slopes: Tensor | None
    """Slopes, float, (Hq,) or (B, Hq): slope·|i + offset − j| is subtracted from the score of query i and key j (ALiBi,
    Press et al. 2022). Not differentiable.
    """
    sinks: Tensor | None
    """Logits, float, (Hq,): one more per head in the softmax's denominator, without a value (gpt-oss)."""
    q_lengths: Tensor | None
    """Number of valid queries of each padded sequence, int32 or int64, (B,). Rows beyond are not read; their o is 0 and
    their lse −∞. Not in layout `thd`.
    """
    kv_lengths: Tensor | None
    """Number of valid keys of each padded sequence, int32 or int64, (B,). Rows beyond are not read. Not in layout
    `thd`.
    """
    cu_seqlens_q: Tensor | None
    """Rows of q where the n sequences of layout `thd` start, and then Tq: int32 or int64, (n + 1,)."""
    cu_seqlens_k: Tensor | None
    """Rows of k where the n sequences of layout `thd` start, and then Tk: int32 or int64, (n + 1,)."""
    block_table: Tensor | None
    """Page numbers, int32, (B, pages), with `kv_lengths`: k and v are pages, (n, Hk, page_size, D) in layout `bhsd`,
    (n, page_size, Hk, D) in `bshd` and `thd`. Key j of sequence b is key j % page_size of page block_table[b, j //
    page_size]. Any page size; a page may be in several sequences; pages may be strided. Numbers beyond a sequence's
    ceil(length / page_size) pages are not read; those before must be below n, which is checked where `block_table`
    is on the CPU. Sk is pages·page_size. In `thd` without `cu_seqlens_k`. Forward only (PagedAttention, Kwon et al.
    2023).
    """
    k_scale: Tensor | float | None
    """Scale of an 8-bit k, which stands for k·k_scale: a number, a float tensor (B, Hk) or (1, Hk), or one of k's shape
    without D. Finite. `flashpoint_kernels.quantize` makes it. Forward only.
    """
    v_scale: Tensor | float | None
    """Scale of an 8-bit v, which stands for v·v_scale: as `k_scale`."""
    layout: str
    """`bhsd`: (B, H, S, D); `bshd`: (B, S, H, D); `thd`: (T, H, D), sequences one after another. Default: "bhsd"."""
    causal: bool
    """Query i sees key j only if j <= i + offset. Default: False."""
    causal_alignment: str
    """Offset of the diagonal, also for `window` and `alibi_slopes`. `bottom_right`: Sk − Sq; `top_left`: 0. Each
    sequence's own lengths count. Default: "bottom_right".
    """
    window: Sequence[int]
    """[left, right]: query i sees key j only if i + offset − left <= j <= i + offset + right. −1 is no bound. Default:
    (-1, -1).
    """
    block_size: Sequence[int]
    """(Mq, Mk): queries and keys of a block of `block_mask`, multiples of 16. Default: (128, 128)."""
    scale: float | None
    """Factor of q·k. None, the default, is 1/sqrt(D)."""
    softcap: float
    """Each scaled score s becomes softcap·tanh(s/softcap), before mask and bias (Gemma 2). 0 is off. Default: 0.0."""
    dropout_p: float
    """Probability with which each attention weight is dropped, 0 <= p < 1. Default: 0.0."""
    dropout_seed: int | None
    """Seed of dropout, 0 to 2^64 − 1. The dropped weights are a function of the seed alone, whatever the backend
    (Philox, Salmon et al. 2011). None, the default, draws a seed.
    """
    precision: str
    """float32 matrix products: `ieee` (full float32) or `tf32`. Default: "ieee"."""
    deterministic: bool
    """Gradients are bitwise equal from run to run. Default: True."""
    backend: str
    """`auto`, or one of `triton`, `torch`, `tiled` and `reference`. A backend that is named is never replaced by
    another. Default: "auto".
    """


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
    """Return exact attention, softmax(scale·q·kᵀ + mask)·v, without the Sq × Sk matrix in memory.

    The algorithm is FlashAttention-2's (Dao 2023, Algorithm 1). B is the batch, Sq and Sk are the numbers of queries
    and keys, Hq and Hk the heads of q and of k and v (Hq is a multiple of Hk: grouped-query attention, Ainslie et al.
    2023), D and Dv the columns of q and k, and of v. D and Dv are at most 256; at most 576 in a forward on `triton` or
    `tiled`; any number on `reference`.

    Args:
        q: Queries, (B, Hq, Sq, D) in layout `bhsd`, (B, Sq, Hq, D) in `bshd`, (Tq, Hq, D) in `thd`; (B, S, D) and
            (S, D) are one head. float16, bfloat16 or float32; float64 on `reference`.
        k: Keys, as q with Hk heads and Sk rows. q's dtype; or float8_e4m3fn or int8, with `k_scale`.
        v: Values, as k with Dv columns. q's dtype; or k's 8-bit dtype, with `v_scale`.
        attn_mask: Mask, broadcastable to (B, Hq, Sq, Sk): bool (true: attend) or float (added to the scaled scores).
            Not in layout `thd`.
        block_mask: Mask of blocks, bool, (B or 1, Hq or 1, ceil(Sq/Mq), ceil(Sk/Mk)): blocks of `block_size` that are
            false are skipped. Blocks count from each sequence's first row. Not in layout `thd`.
            `flashpoint_kernels.create_block_mask` makes one.
        alibi_slopes: Slopes, float, (Hq,) or (B, Hq): slope·|i + offset − j| is subtracted from the score of query i
            and key j (ALiBi, Press et al. 2022). Not differentiable.
        sinks: Logits, float, (Hq,): one more per head in the softmax's denominator, without a value (gpt-oss).
        q_lengths: Number of valid queries of each padded sequence, int32 or int64, (B,). Rows beyond are not read;
            their o is 0 and their lse −∞. Not in layout `thd`.
        kv_lengths: Number of valid keys of each padded sequence, int32 or int64, (B,). Rows beyond are not read. Not in
            layout `thd`.
        cu_seqlens_q: Rows of q where the n sequences of layout `thd` start, and then Tq: int32 or int64, (n + 1,).
        cu_seqlens_k: Rows of k where the n sequences of layout `thd` start, and then Tk: int32 or int64, (n + 1,).
        block_table: Page numbers, int32, (B, pages), with `kv_lengths`: k and v are pages, (n, Hk, page_size, D) in
            layout `bhsd`, (n, page_size, Hk, D) in `bshd` and `thd`. Key j of sequence b is key j % page_size of page
            block_table[b, j // page_size]. Any page size; a page may be in several sequences; pages may be strided.
            Numbers beyond a sequence's ceil(length / page_size) pages are not read; those before must be below n, which
            is checked where `block_table` is on the CPU. Sk is pages·page_size. In `thd` without `cu_seqlens_k`.
            Forward only (PagedAttention, Kwon et al. 2023).
        k_scale: Scale of an 8-bit k, which stands for k·k_scale: a number, a float tensor (B, Hk) or (1, Hk), or one of
            k's shape without D. Finite. `flashpoint_kernels.quantize` makes it. Forward only.
        v_scale: Scale of an 8-bit v, which stands for v·v_scale: as `k_scale`.
        layout: `bhsd`: (B, H, S, D); `bshd`: (B, S, H, D); `thd`: (T, H, D), sequences one after another.
        causal: Query i sees key j only if j <= i + offset.
        causal_alignment: Offset of the diagonal, also for `window` and `alibi_slopes`. `bottom_right`: Sk − Sq;
            `top_left`: 0. Each sequence's own lengths count.
        window: [left, right]: query i sees key j only if i + offset − left <= j <= i + offset + right. −1 is no bound.
        block_size: (Mq, Mk): queries and keys of a block of `block_mask`, multiples of 16.
        scale: Factor of q·k. None, the default, is 1/sqrt(D).
        softcap: Each scaled score s becomes softcap·tanh(s/softcap), before mask and bias (Gemma 2). 0 is off.
        dropout_p: Probability with which each attention weight is dropped, 0 <= p < 1.
        dropout_seed: Seed of dropout, 0 to 2^64 − 1. The dropped weights are a function of the seed alone, whatever the
            backend (Philox, Salmon et al. 2011). None, the default, draws a seed.
        precision: float32 matrix products: `ieee` (full float32) or `tf32`.
        return_lse: Also return lse, the natural logarithm of the softmax's denominator.
        deterministic: Gradients are bitwise equal from run to run.
        backend: `auto`, or one of `triton`, `torch`, `tiled` and `reference`. A backend that is named is never replaced
            by another.

    Returns:
        o in q's dtype, layout and rank, with Dv columns. With `return_lse` (o, lse); lse is float32, (B, Hq, Sq), or
        (Hq, Tq) in `thd`, (B, S) and (S,) for q of 3 and 2 dimensions. A query that sees no key has o = 0 and lse = −∞
        (with a sink: lse is the sink), and gradients of 0.

        Differentiable once in q, k, v, a float `attn_mask` and `sinks`, through o and lse; not with pages or 8-bit k.

    Raises:
        ProblemError: a ValueError whose `errors` name each field that is not valid or that the backend cannot do.
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
    """Return the gradients of `attention` for `do`, the gradient of its o (FlashAttention-2, Dao 2023, Algorithm 2).

    The options and other tensors are those of the forward.

    Args:
        do: Gradient of o, of its shape and dtype.
        q: Queries, as the forward took them: (B, Hq, Sq, D) in layout `bhsd`.
        k: Keys, as the forward took them: (B, Hk, Sk, D).
        v: Values, as the forward took them: (B, Hk, Sk, Dv).
        o: Output of the forward, (B, Hq, Sq, Dv). Give o and lse, or neither: without them the forward runs again.
        lse: Log-sum-exp of the forward, float32, (B, Hq, Sq).
        dlse: Gradient of lse, of its shape, float32. None is 0.
        grads: Gradients to return: some of `dq`, `dk`, `dv`, `dattn_mask` (of a float mask) and `dsinks`.
        attn_mask: Mask, broadcastable to (B, Hq, Sq, Sk): bool (true: attend) or float (added to the scaled
            scores). Not in layout `thd`.
        block_mask: Mask of blocks, bool, (B or 1, Hq or 1, ceil(Sq/Mq), ceil(Sk/Mk)): blocks of `block_size` that
            are false are skipped. Blocks count from each sequence's first row. Not in layout `thd`.
            `flashpoint_kernels.create_block_mask` makes one.
        alibi_slopes: Slopes, float, (Hq,) or (B, Hq): slope·|i + offset − j| is subtracted from the score of query
            i and key j (ALiBi, Press et al. 2022). Not differentiable.
        sinks: Logits, float, (Hq,): one more per head in the softmax's denominator, without a value (gpt-oss).
        q_lengths: Number of valid queries of each padded sequence, int32 or int64, (B,). Rows beyond are not read;
            their o is 0 and their lse −∞. Not in layout `thd`.
        kv_lengths: Number of valid keys of each padded sequence, int32 or int64, (B,). Rows beyond are not read.
            Not in layout `thd`.
        cu_seqlens_q: Rows of q where the n sequences of layout `thd` start, and then Tq: int32 or int64, (n + 1,).
        cu_seqlens_k: Rows of k where the n sequences of layout `thd` start, and then Tk: int32 or int64, (n + 1,).
        layout: `bhsd`: (B, H, S, D); `bshd`: (B, S, H, D); `thd`: (T, H, D), sequences one after another. Default:
            "bhsd".
        causal: Query i sees key j only if j <= i + offset. Default: False.
        causal_alignment: Offset of the diagonal, also for `window` and `alibi_slopes`. `bottom_right`: Sk − Sq;
            `top_left`: 0. Each sequence's own lengths count. Default: "bottom_right".
        window: [left, right]: query i sees key j only if i + offset − left <= j <= i + offset + right. −1 is no
            bound. Default: (-1, -1).
        block_size: (Mq, Mk): queries and keys of a block of `block_mask`, multiples of 16. Default: (128, 128).
        scale: Factor of q·k. None, the default, is 1/sqrt(D).
        softcap: Each scaled score s becomes softcap·tanh(s/softcap), before mask and bias (Gemma 2). 0 is off.
            Default: 0.0.
        dropout_p: Probability with which each attention weight is dropped, 0 <= p < 1. Default: 0.0.
        dropout_seed: Seed of dropout, 0 to 2^64 − 1. The dropped weights are a function of the seed alone, whatever
            the backend (Philox, Salmon et al. 2011). None, the default, draws a seed.
        precision: float32 matrix products: `ieee` (full float32) or `tf32`. Default: "ieee".
        deterministic: Gradients are bitwise equal from run to run. Default: True.
        backend: `auto`, or one of `triton`, `torch`, `tiled` and `reference`. A backend that is named is never
            replaced by another. Default: "auto".

    Returns:
        One tensor for each name in `grads`, in that order, with the shape, layout and dtype of its input.
    Raises:
        ProblemError: a ValueError whose `errors` name each field that is not valid or that the backend cannot do. With
            dropout `dropout_seed` is needed: the forward's.
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
