"""`scaled_dot_product_attention`, with the signature and the rules of torch's function of that name.

TorchScript cannot read the function's body, and calls the operator `flashpoint::scaled_dot_product_attention` instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashpoint_contract.options import ProblemError
from flashpoint_kernels.functional import attention
from flashpoint_kernels.operators.torch_rules import is_causal_bias, overridable, raises_as
from flashpoint_kernels.problems.memory import check_memory

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias  # imports torch._dynamo, which takes seconds


_library = torch.library.Library("flashpoint", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, float dropout_p, "
    "bool is_causal, float? scale, bool enable_gqa) -> Tensor",
    "CONSERVATIVE",  # else TorchScript merges two calls, which drop different weights
)


class SdpaError(ProblemError, RuntimeError):
    """An argument is not valid. Also a RuntimeError, because torch raises RuntimeError for most such arguments."""


@overridable
@raises_as(SdpaError, {"q": "query", "k": "key", "v": "value", "causal": "is_causal"})
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return exact attention with the arguments of `torch.nn.functional.scaled_dot_product_attention`.

    `F.scaled_dot_product_attention = flashpoint_kernels.scaled_dot_product_attention` runs a model on these kernels. L
    and S are the numbers of queries and keys, Hq and H the heads, E and Ev the columns of query and key, and of value.

    Args:
        query: Queries, (…, Hq, L, E): any number of batch dimensions, also none. float16, bfloat16, float32, or
            float64, which the backend `reference` computes. `torch.autocast` holds.
        key: Keys, (…, H, S, E), in query's dtype. Dimensions before the last two are broadcast with query's.
        value: Values, (…, H, S, Ev), in query's dtype, broadcast likewise.
        attn_mask: Mask, broadcastable to (…, Hq, L, S): bool (true: attend), float (added to the scaled scores, with a
            gradient), or a `torch.nn.attention.bias.CausalBias`.
        dropout_p: Probability with which each attention weight is dropped, 0 to 1, also in evaluation. The seed is
            drawn from torch's generator of the CPU; the dropped weights are not those of torch.
        is_causal: Query i sees key j only if j <= i, and with `attn_mask` only if that lets it, too.
        scale: Factor of query·key. None, the default, is 1/sqrt(E).
        enable_gqa: Hq may be a multiple of H: each key head has Hq/H query heads. Where key and value have no heads, o
            is 0; where query has none, o is empty.

    Returns:
        o, (…, Hq, L, Ev), in query's dtype. A query that sees no key has o = 0.

        Differentiable twice, in query, key, value and a float `attn_mask`, in reverse and forward mode.

    Raises:
        SdpaError: a ProblemError, whose `errors` name what is not valid: both a ValueError and a RuntimeError, since
            torch raises one or the other.
    """
    # TorchScript does not read the body of this `if`.
    if not torch.jit.is_scripting():  # type: ignore[attr-defined]
        return _computed(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    o: Tensor = torch.ops.flashpoint.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    )
    return o


def _computed(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool,
) -> Tensor:  # fmt: skip
    for name, t in (("query", query), ("key", key), ("value", value)):
        if not isinstance(t, Tensor) or t.ndim < 2:
            raise ProblemError([(name, "must be a tensor of at least 2 dimensions")])
        if t.is_nested:
            raise ProblemError([(name, "is a NestedTensor: use flashpoint_kernels.attention with layout='thd'")])
    alignment = "top_left"
    if is_causal_bias(attn_mask):
        alignment, attn_mask, is_causal = _alignment(attn_mask, is_causal, query.shape[-2], key.shape[-2]), None, True
    if not 0 <= dropout_p <= 1:
        raise ProblemError([("dropout_p", f"must be 0 to 1, not {dropout_p}")])
    q, k, v = _with_heads(*(t[(None,) * (3 - t.ndim)] for t in (query, key, value)), grouped=enable_gqa)
    lead = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])  # type: ignore[no-untyped-call]
    if len(lead) != 1 or not q.shape[:-3] == k.shape[:-3] == v.shape[:-3]:
        check_memory(query=query, key=key, value=value, attn_mask=attn_mask)
        q, k, v = (_in_one_batch(t, lead) for t in (q, k, v))
        if attn_mask is not None and attn_mask.ndim > 3:
            attn_mask = _in_one_batch(attn_mask, () if math.prod(attn_mask.shape[:-3]) == 1 else lead)
    if attn_mask is not None and not k.shape[-2]:
        attn_mask = attn_mask[..., :0]  # `_with_heads` may have left out all keys
    if not q.shape[-3]:  # without heads o is empty; these products give its shape and autograd graph
        o = q @ k.mT @ v
    else:
        o = attention(
            q, k, v, attn_mask=attn_mask, causal=bool(is_causal), causal_alignment=alignment, scale=scale,
            dropout_p=0.0 if dropout_p == 1 else float(dropout_p),
        )  # fmt: skip
    if dropout_p == 1:
        o = o * 0
    heads = o.shape[1:2] if max(query.ndim, key.ndim, value.ndim) > 2 else ()
    shape = (*lead, *heads, *o.shape[2:])
    return o if o.shape == shape else o.reshape(shape)


def _in_one_batch(t: Tensor, lead: Sequence[int]) -> Tensor:
    """Return (…, H, L, E) with the batch dimensions `lead` flattened to one; copy only if some are broadcast."""
    shape = t.shape[-3:]
    return t.reshape(1, *shape) if not lead else t.expand(*lead, *shape).reshape(math.prod(lead), *shape)


def _alignment(bias: CausalBias, is_causal: bool, queries: int, keys: int) -> str:
    """Return the `causal_alignment` of a `CausalBias`. Raises ProblemError if it is not for this call."""
    if is_causal:
        raise ProblemError([("is_causal", "must be False with a CausalBias")])
    if (bias.seq_len_q, bias.seq_len_kv) != (queries, keys):
        sizes = f"{bias.seq_len_q} queries and {bias.seq_len_kv} keys, not for {queries} and {keys}"
        raise ProblemError([("attn_mask", f"is a CausalBias for {sizes}")])
    return "top_left" if bias.variant.name == "UPPER_LEFT" else "bottom_right"


def _with_heads(q: Tensor, k: Tensor, v: Tensor, *, grouped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v as `attention` needs them: k and v with an equal number of heads, which divides q's number."""
    heads, of_k, of_v = q.shape[-3], k.shape[-3], v.shape[-3]
    if heads == of_k == of_v:
        return q, k, v
    if not heads and (grouped or max(of_k, of_v) <= 1):
        return q, k[..., :0, :, :], v[..., :0, :, :]
    if not (of_k or of_v):  # torch answers 0, as for heads without keys
        k, v = (t[..., :0, :].reshape(*t.shape[:-3], heads, 0, t.shape[-1]) for t in (k, v))
        return q, k, v
    if grouped and not (of_k and of_v and heads % of_k == 0 and heads % of_v == 0):
        raise ProblemError([("key", f"has {of_k} heads and value {of_v}, which must divide query's {heads}")])
    if not grouped:
        heads = max(heads, of_k, of_v)
        if {q.shape[-3], of_k, of_v} - {1, heads}:
            shown = f"query has {q.shape[-3]} heads, key {of_k} and value {of_v}"
            raise ProblemError([("key", f"{shown}: they must be equal or 1; enable_gqa=True shares key heads")])
        q = q.expand(*q.shape[:-3], heads, -1, -1)
    if of_k != of_v:
        check_memory(key=k, value=v)
        k, v = (t.repeat_interleave(heads // t.shape[-3], -3) for t in (k, v))
    return q, k, v


_library.impl(  # type: ignore[no-untyped-call]
    "scaled_dot_product_attention", scaled_dot_product_attention, "CompositeImplicitAutograd"
)
