"""Differentiable attention for torch, computed by a server.

    o = flashpoint.torch.attention(q, k, v, client=client, causal=True)
    o.square().mean().backward()

The forward calls `/attention`, the backward calls `/attention/grad`. The backward sends the inputs, `o` and `lse` of
the forward, so the server does not store the forward, and does not compute it again. With `save=True` the server stores
the forward, and the backward sends only `do`. With a list of clients, their servers share both calls
(`flashpoint.sharded`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from flashpoint import sharded
from flashpoint._calls import SavedAttention
from flashpoint._client import Client
from flashpoint._keywords import Saving, Sending, TorchKeywords
from flashpoint._saved import Lease
from flashpoint.errors import CacheError, invalid
from flashpoint.meta import Meta
from flashpoint_contract.caches import CACHE_OPTIONS
from flashpoint_contract.options import GRADS
from flashpoint_contract.tensors import TENSORS

_FORWARD_ONLY = [name for name, row in TENSORS.items() if row.forward_only]
_INPUTS = tuple(name[1:] for name in GRADS)  # inputs with a gradient, in the order of autograd's arguments


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, client: Client | Sequence[Client],
    return_lse: Literal[False] = False, with_meta: Literal[False] = False, **keywords: Unpack[TorchKeywords],
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, client: Client | Sequence[Client],
    return_lse: Literal[True], with_meta: Literal[False] = False, **keywords: Unpack[TorchKeywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, client: Client | Sequence[Client], **keywords: Unpack[Saving]
) -> Any: ...


def attention(q: Tensor, k: Tensor, v: Tensor, *, client: Client | Sequence[Client], **keywords: Unpack[Saving]) -> Any:
    """Return attention as `Client.attention` does, differentiable: o, or (o, lse) with `return_lse`.

    q, k, v, a float `attn_mask` and `sinks` get gradients, through o and lse. `timeout` and `priority` hold for the
    backward's call too. With dropout the backward uses the forward's seed, even if the server chose it. A second
    derivative raises RuntimeError.

    Args:
        q: Queries, torch tensor (B, Hq, Sq, D) in layout `bhsd`; other layouts and ranks as `Client.attention`.
        k: Keys, (B, Hk, Sk, D).
        v: Values, (B, Hk, Sk, Dv).
        client: The client; or a list of clients, whose servers share the call as `flashpoint.sharded.attention`
            does.

    Keyword Args:
        return_lse: Return (o, lse) in place of o. Default: False.
        with_meta: Return (result, `Meta`): timings, the backend, the seed of dropout. Default: False.
        save: Let the server keep the forward until its backward has run: the backward then sends `do` alone. Where
            the server has no memory for it, or has lost it, the backward sends all. One client only. Default:
            False.
        parts: With a list of clients, (r, c): cut the queries into r parts and the keys into c. Default: None, as
            many parts as clients.
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
        dropout_seed: Seed of dropout, 0 to 2^64 − 1. The dropped weights are a function of the seed alone, whatever
            the backend (Philox, Salmon et al. 2011). None, the default, draws a seed.
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
        precision: float32 matrix products: `ieee` (full float32) or `tf32`. Default: "ieee".
        deterministic: Gradients are bitwise equal from run to run. Default: True.
        backend: `auto`, or one of `triton`, `torch`, `tiled` and `reference`. A backend that is named is never
            replaced by another. Default: "auto".
        timeout: Seconds for the whole call, retries included; the server knows it as the deadline. None waits
            without end. Default: the client's own.
        priority: 0 to 9; a higher priority runs sooner. Default: 0.
        request_id: Name of the call in the server's log, printable ASCII. Default: the server makes one.
        k_scale: Scale of an 8-bit k, which stands for k·k_scale: a number, a float tensor (B, Hk) or (1, Hk), or
            one of k's shape without D. Finite. `flashpoint_kernels.quantize` makes it. Forward only.
        v_scale: Scale of an 8-bit v, which stands for v·v_scale: as `k_scale`.

    Returns:
        o (B, Hq, Sq, Dv) on q's device, in its dtype. With `return_lse` (o, lse), lse float32 (B, Hq, Sq). With
        `with_meta` (that, `Meta`), or (that, list of `sharded.Part`) with a list of clients.

    Raises:
        FlashpointError: the errors of `flashpoint.errors`. InvalidInputError names each field that is not valid.
    """
    if of_caches := [name for name in CACHE_OPTIONS if name in keywords]:
        raise invalid(of_caches[0], "is not taken: caches have no gradients. Call the client's attention")
    tensors = {name: keywords.get(name) for name in _INPUTS} | {"q": q, "k": k, "v": v}
    for name, value in {**tensors, **keywords}.items():
        if isinstance(value, Tensor) and value.requires_grad and name not in _INPUTS and torch.is_grad_enabled():
            raise invalid(name, "has no gradient: detach it")
    inputs = [value if isinstance(value, Tensor) else None for value in tensors.values()]
    for name, value in zip("qkv", inputs, strict=False):
        if value is None:
            raise invalid(name, "must be a torch tensor")
    if type(save := keywords.pop("save", False)) is not bool:
        raise invalid("save", "must be True or False")
    if save and isinstance(client, Sequence):
        raise invalid("save", "is not taken with several servers: no one of them has the whole forward")
    if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in inputs):
        return _method(client, "attention")(q, k, v, **keywords)
    if alone := [name for name in _FORWARD_ONLY if keywords.get(name) is not None]:
        raise invalid(alone[0], "has no gradient: detach q, k and v")
    others: dict[str, Any] = {name: value for name, value in keywords.items() if name not in _FORWARD_ONLY}
    return_lse, with_meta = others.pop("return_lse", False), others.pop("with_meta", False)
    o, lse, meta = _RemoteAttention.apply(client, save, others, *inputs)  # type: ignore[no-untyped-call]
    result = (o, lse) if return_lse else o
    return (result, meta) if with_meta else result


def _method(client: Client | Sequence[Client], name: str) -> Any:
    return partial(getattr(sharded, name), client) if isinstance(client, Sequence) else getattr(client, name)


class _RemoteAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        client: Client | Sequence[Client],
        save: bool,
        keywords: dict[str, Any],
        *inputs: Tensor | None,
    ) -> tuple[Tensor, Tensor, Meta | list[sharded.Part]]:
        q, k, v, *_ = inputs
        assert q is not None and k is not None and v is not None  # noqa: PT018  # `attention` has checked it
        asked = {**keywords, "save": True} if save else keywords
        found, meta = _method(client, "attention")(q, k, v, **asked, return_lse=True, with_meta=True)
        lease = None
        if isinstance(found, SavedAttention):
            assert isinstance(client, Client)
            lease = None if found.saved is None else Lease(client, replace(found, o=None, lse=None))
            found = found.o, found.lse
        o, lse = found
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, o, lse)  # type: ignore[arg-type]  # torch accepts None
        saved = {name for name, t in zip(_INPUTS, inputs, strict=True) if t is not None}
        others = {name: value for name, value in keywords.items() if name not in saved and name != "request_id"}
        if isinstance(meta, Meta) and meta.seed is not None:  # a list of servers has no dropout
            others["dropout_seed"] = meta.seed
        ctx.client, ctx.keywords, ctx.lease = client, others, lease  # type: ignore[attr-defined]
        return o, lse, meta

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        *inputs, o, lse = ctx.saved_tensors
        named = {name: t for name, t in zip(_INPUTS, inputs, strict=True) if t is not None}
        wanted = [name for name, needed in zip(GRADS, ctx.needs_input_grad[3:], strict=True) if needed]
        asked = {"do": torch.zeros_like(o) if do is None else do, "dlse": dlse, "grads": wanted}
        found: Sequence[Tensor] | None = _of_saved(ctx, asked)
        if found is None:
            found = _method(ctx.client, "attention_grad")(**asked, **named, o=o, lse=lse, **ctx.keywords)
        if torch.is_grad_enabled():  # create_graph: a second derivative must raise, not be silently missing
            found = [_FirstOrder.apply(t, *named.values()) for t in found]  # type: ignore[no-untyped-call]
        grads = dict(zip(wanted, found, strict=True))
        return None, None, None, *(grads.get(name) for name in GRADS)


def _of_saved(ctx: Any, asked: dict[str, Any]) -> tuple[Tensor, ...] | None:
    """Return the gradients of a saved forward; None if the server has not saved it."""
    lease: Lease | None = ctx.lease
    if lease is None or lease.saved is None:
        return None
    sending = {name: value for name, value in ctx.keywords.items() if name in Sending.__annotations__}
    try:
        found: tuple[Tensor, ...] = ctx.client.attention_grad(**asked, saved=lease.saved, **sending)
    except CacheError:  # the saved forward expired, or its engine restarted
        ctx.lease = None
        return None
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        lease.release()  # no other backward follows
    return found


class _FirstOrder(torch.autograd.Function):
    """The identity of a gradient, which records that it depends on the inputs. Its derivative raises RuntimeError."""

    @staticmethod
    def forward(ctx: FunctionCtx, gradient: Tensor, *inputs: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, ...]:
        raise RuntimeError("second-order gradients of attention are not available")
