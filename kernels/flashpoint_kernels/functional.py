"""The functions `attention`, which is differentiable, and `attention_backward`, which returns its gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from numbers import Real
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from flashpoint_contract.options import Options, ProblemError, is_integer, number_of
from flashpoint_contract.tensors import INDEX_TENSORS, TENSORS
from flashpoint_contract.wording.docstrings import documented
from flashpoint_kernels.operators import ops, plain, weights
from flashpoint_kernels.operators.torch_rules import autocast, overridable
from flashpoint_kernels.problems.memory import check_memory

# all options except `window`, in the order in which `attention` passes them
_OTHERS = (
    "layout", "causal", "causal_alignment", "block_size", "scale", "softcap", "dropout_p", "dropout_seed", "precision",
    "return_lse", "deterministic", "backend",
)  # fmt: skip

_PYTHONS = {bool, int, float, str, type(None), tuple, list}
_INTEGERS = (*INDEX_TENSORS, "block_table")


class OfKeys(TypedDict, total=False):
    """Keywords of calls that read queries and keys.

    Args:
        block_table: Page numbers, int32, (B, pages), with `kv_lengths`: k is pages, as `attention` takes them.
    """

    attn_mask: Tensor | None
    block_mask: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    q_lengths: Tensor | Sequence[Any] | None
    kv_lengths: Tensor | Sequence[Any] | None
    offset: Tensor | Sequence[Any] | int | None
    cu_seqlens_q: Tensor | Sequence[Any] | None
    cu_seqlens_k: Tensor | Sequence[Any] | None
    block_table: Tensor | Sequence[Any] | None
    k_scale: Tensor | float | None
    layout: str
    causal: bool
    causal_alignment: str
    window: Sequence[int] | None
    block_size: Sequence[int]
    scale: float | None
    softcap: float
    dropout_p: float
    dropout_seed: int | None
    precision: str
    deterministic: bool
    backend: str


class Keywords(OfKeys, total=False):
    """Keywords of `attention` that do not change the type of its result."""

    v_scale: Tensor | float | None


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, return_key_weights: Literal[False] = False,
    **keywords: Unpack[Keywords],
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], return_key_weights: Literal[False] = False,
    **keywords: Unpack[Keywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, return_key_weights: Literal[False] = False,
    **keywords: Unpack[Keywords],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, return_key_weights: bool,
    **keywords: Unpack[Keywords],
) -> Any: ...  # fmt: skip


@overridable
@documented
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    block_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    q_lengths: Tensor | Sequence[Any] | None = None,
    kv_lengths: Tensor | Sequence[Any] | None = None,
    offset: Tensor | Sequence[Any] | int | None = None,
    cu_seqlens_q: Tensor | Sequence[Any] | None = None,
    cu_seqlens_k: Tensor | Sequence[Any] | None = None,
    block_table: Tensor | Sequence[Any] | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    layout: str = "bhsd",
    causal: bool = False,
    causal_alignment: str = "bottom_right",
    window: Sequence[int] | None = (-1, -1),
    block_size: Sequence[int] = (128, 128),
    scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    precision: str = "ieee",
    return_lse: bool = False,
    return_key_weights: bool = False,
    deterministic: bool = True,
    backend: str = "auto",
) -> Any:
    """Return exact attention, softmax(scale·q·kᵀ + mask)·v, without the Sq × Sk matrix in memory.

    The algorithm is FlashAttention-2's (Dao 2023, Algorithm 1). B is the batch, Sq and Sk are the numbers of queries
    and keys, Hq and Hk the heads of q and of k and v (Hq is a multiple of Hk: grouped-query attention, Ainslie et al.
    2023), D and Dv the columns of q and k, and of v. D and Dv are at most 576; at most 256 on `torch`; any number on
    `reference`.

    Args:
        q: Queries, (B, Hq, Sq, D) in layout `bhsd`, (B, Sq, Hq, D) in `bshd`, (Tq, Hq, D) in `thd`; (B, S, D) and
            (S, D) are one head. float16, bfloat16 or float32; float64 on `reference`.
        k: Keys, as q with Hk heads and Sk rows. q's dtype; or float8_e4m3fn or int8, with `k_scale`.
        v: Values, as k with Dv columns. q's dtype; or k's 8-bit dtype, with `v_scale`.
        block_table: Page numbers, int32, (B, pages), with `kv_lengths`: k and v are pages, (n, Hk, page_size, D) in
            layout `bhsd`, (n, page_size, Hk, D) in `bshd` and `thd`. Key j of sequence b is key j % page_size of
            page block_table[b, j // page_size]. Any page size; a page may be in several sequences; pages may be
            strided. Numbers beyond a sequence's ceil(length / page_size) pages are not read; those before must be
            below n, which is checked where `block_table` is on the CPU. Sk is pages·page_size. In `thd` without
            `cu_seqlens_k`. Forward only (PagedAttention, Kwon et al. 2023).

    Returns:
        o in q's dtype, layout and rank, with Dv columns. With `return_lse` (o, lse); lse is float32, (B, Hq, Sq), or
        (Hq, Tq) in `thd`, (B, S) and (S,) for q of 3 and 2 dimensions. A query that sees no key has o = 0 and lse = −∞
        (with a sink: lse is the sink), and gradients of 0.

        With `return_key_weights` (o, key_weights) or (o, lse, key_weights); key_weights is float32, (B, Hq, Sk), or
        (Hq, Tk) in `thd`; with `block_table` a list with (Hq, length) for each sequence.

        Differentiable twice in q, k, v, a float `attn_mask` and `sinks`, through o and lse, in reverse and forward
        mode; not with pages or 8-bit k. Derivatives of derivatives run on `tiled`.

    Raises:
        ProblemError: a ValueError whose `errors` name each field that is not valid or that the backend cannot do.
    """
    options = _options(
        window, layout, causal, causal_alignment, block_size, scale, softcap, dropout_p, dropout_seed, precision,
        return_lse, deterministic, backend,
    )  # fmt: skip
    if (torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled()) and isinstance(q, Tensor):
        q, k, v = autocast(q, k, v)
    if return_key_weights is not False:
        Options(return_key_weights=return_key_weights)  # refuses a value that is not a bool
    elif (
        attn_mask is None and block_mask is None and alibi_slopes is None and sinks is None and q_lengths is None
        and kv_lengths is None and offset is None and cu_seqlens_q is None and cu_seqlens_k is None
        and block_table is None and k_scale is None and v_scale is None
        and (answers := plain.attention(q, k, v, options)) is not None
    ):  # fmt: skip
        return answers
    tensors = {
        "q": q, "k": k, "v": v, "attn_mask": attn_mask, "block_mask": block_mask, "alibi_slopes": alibi_slopes,
        "sinks": sinks, "q_lengths": q_lengths, "kv_lengths": kv_lengths, "offset": offset,
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
        "block_table": block_table, "k_scale": scale_tensor(k_scale), "v_scale": scale_tensor(v_scale),
    }  # fmt: skip
    given = checked(tensors)
    o, lse = ops.attention(given, options)
    if not return_key_weights:
        return (o, lse) if return_lse else o
    found: Any = weights.key_weights(given, options, lse.detach())
    if block_table is not None:
        found = of_sequences(found, given)
    return (o, lse, found) if return_lse else (o, found)


@overridable
@documented
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
    q_lengths: Tensor | Sequence[Any] | None = None,
    kv_lengths: Tensor | Sequence[Any] | None = None,
    offset: Tensor | Sequence[Any] | int | None = None,
    cu_seqlens_q: Tensor | Sequence[Any] | None = None,
    cu_seqlens_k: Tensor | Sequence[Any] | None = None,
    layout: str = "bhsd",
    causal: bool = False,
    causal_alignment: str = "bottom_right",
    window: Sequence[int] | None = (-1, -1),
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

    Returns:
        One tensor for each name in `grads`, in that order, with the shape, layout and dtype of its input.
    Raises:
        ProblemError: a ValueError whose `errors` name each field that is not valid or that the backend cannot do. With
            dropout `dropout_seed` is needed: the forward's.
    """
    tensors = {
        "q": q, "k": k, "v": v, "do": do, "o": o, "lse": lse, "dlse": dlse,
        "attn_mask": attn_mask, "block_mask": block_mask, "alibi_slopes": alibi_slopes, "sinks": sinks,
        "q_lengths": q_lengths, "kv_lengths": kv_lengths, "offset": offset,
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
    }  # fmt: skip
    options = Options(
        layout=layout, causal=causal, causal_alignment=causal_alignment, window=window,  # type: ignore[arg-type]
        block_size=block_size, scale=scale, softcap=softcap,  # type: ignore[arg-type]
        dropout_p=dropout_p, dropout_seed=dropout_seed, precision=precision,
        grads=grads, deterministic=deterministic, backend=backend,  # type: ignore[arg-type]
    )  # fmt: skip
    return tuple(ops.attention_backward(checked(tensors), options))


def _options(window: Sequence[int] | None, *given: Any) -> Options:
    """Return the checked options of a call, from a cache if possible: a check takes as long as a small forward."""
    if (type(window) is tuple or type(window) is list) and not torch.compiler.is_compiling():
        try:
            left, right = window
            return _remembered(left, right, *given)
        except (TypeError, ValueError):  # an unhashable value such as a list, or one that `_remembered` does not keep
            pass
    for name, value in zip(("window", *_OTHERS), (window, *given), strict=True):
        if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
            raise ProblemError([(name, "has no gradient: detach it")])
    return _made(window, *given)


@lru_cache(1024, typed=True)  # typed: True must differ from 1
def _remembered(left: int, right: int, *given: Any) -> Options:
    """Return the options; raise TypeError, so that nothing is cached, for values that may change, such as tensors."""
    if not _PYTHONS.issuperset(map(type, (left, right, *given))):
        raise TypeError
    return _made((left, right), *given)


def _made(window: Sequence[int] | None, *given: Any) -> Options:
    return Options(window=window, **dict(zip(_OTHERS, given, strict=True)))  # type: ignore[arg-type]


def scale_tensor(value: Tensor | float | None) -> Tensor | None:
    """Return a scale that is a number as a tensor; return any other value unchanged."""
    if isinstance(value, Real) and not isinstance(value, bool):
        return torch.tensor(float(value), dtype=torch.float64, device="cpu")
    return value  # type: ignore[return-value]  # the caller checks that it is a tensor


def checked(tensors: Mapping[str, Any]) -> dict[str, Tensor | None]:
    """Return the tensors of a call; convert lengths, offsets and page numbers from numbers, lists and arrays.

    Raises ProblemError for other values that are not tensors: torch's dispatcher would raise an error about its schema,
    which does not tell the caller what to pass.
    """
    checked = dict(tensors)
    for name, t in tensors.items():
        if t is None or (isinstance(t, Tensor) and name != "block_table"):
            continue
        number = name in _INTEGERS and TENSORS[name].may_be_number
        listed = isinstance(t, (list, tuple)) or hasattr(t, "tolist") or (number and is_integer(t))
        if not isinstance(t, Tensor) and name in _INTEGERS and listed:
            t = checked[name] = _integers(name, t)
        if not isinstance(t, Tensor):
            kinds = f"{'an integer, ' if number else ''}a list, an array or " if name in _INTEGERS else ""
            raise ProblemError([(name, f"must be {kinds}a torch tensor, not {type(t).__name__}")])
        if name == "block_table" and t.dtype == torch.int64:
            check_memory(block_table=t)
            checked[name] = t.clamp(-1, 2**31 - 1).int()  # a page number outside int32 must stay invalid
    return checked


def of_sequences(found: Tensor, tensors: Mapping[str, Tensor | None]) -> list[Tensor]:
    """Return the part (Hq, …, length) of each sequence of padded weights over keys in pages."""
    lengths = tensors["kv_lengths"]
    assert lengths is not None  # calls with pages have it
    return [found[n, ..., :length] for n, length in enumerate(lengths.tolist())]


def _integers(name: str, value: Any) -> Tensor:
    """Return a number, a list or an array as a tensor on the CPU.

    Raises ProblemError unless all its numbers are integers that fit 64 bits.
    """
    given = number_of(value)
    try:
        empty = isinstance(given, (list, tuple)) and not given
        integers = torch.tensor(given, dtype=torch.int64 if empty else None, device="cpu")
    except (TypeError, ValueError, OverflowError, RuntimeError):
        integers = None
    if integers is None or integers.dtype != torch.int64:
        raise ProblemError([(name, f"must be integers of 64 bits, not {value!r}")])
    return integers
