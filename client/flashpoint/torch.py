"""Attention that is differentiable through the service: its forward is `/attention`, its backward `/attention/grad`.

    o = flashpoint.torch.attention(q, k, v, client=client, causal=True)
    o.square().mean().backward()

The backward sends what the forward had, with its `o` and `lse`, so the server keeps nothing between the two and does
not run the forward again. With a list of clients, all their servers share each of the two (`flashpoint.sharded`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from flashpoint import sharded
from flashpoint._client import Client
from flashpoint.errors import invalid
from flashpoint.meta import Meta
from flashpoint_contract.caches import CACHE_OPTIONS
from flashpoint_contract.options import GRADS
from flashpoint_contract.tensors import TENSORS

_FORWARD_ONLY = [name for name, row in TENSORS.items() if row.forward_only]
_INPUTS = tuple(name[1:] for name in GRADS)  # those with a gradient, in the order in which autograd is given them


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, client: Client | Sequence[Client], **keywords: Unpack[sharded.ShardedForward]
) -> Any:
    """`client.attention`, with gradients for q, k, v and every other input that has one, through o and lse.

    The same shapes, keywords, answers and errors; `timeout` and `priority` hold for the backward's call too. With
    dropout, the backward uses the seed of the forward, whoever picked it. A second derivative raises RuntimeError.
    A list of clients is `sharded.attention` of them, with its keywords, answers and errors.
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
    if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in inputs):
        return _method(client, "attention")(q, k, v, **keywords)
    if alone := [name for name in _FORWARD_ONLY if keywords.get(name) is not None]:
        raise invalid(alone[0], "is for the forward alone: detach q, k and v")
    others: dict[str, Any] = dict(keywords)
    return_lse, with_meta = others.pop("return_lse", False), others.pop("with_meta", False)
    o, lse, meta = _RemoteAttention.apply(client, others, *inputs)  # type: ignore[no-untyped-call]
    result = (o, lse) if return_lse else o
    return (result, meta) if with_meta else result


def _method(client: Client | Sequence[Client], name: str) -> Any:
    return partial(getattr(sharded, name), client) if isinstance(client, Sequence) else getattr(client, name)


class _RemoteAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, client: Client | Sequence[Client], keywords: dict[str, Any], *inputs: Tensor | None
    ) -> tuple[Tensor, Tensor, Meta | list[sharded.Part]]:
        q, k, v, *_ = inputs
        assert q is not None and k is not None and v is not None  # noqa: PT018  # `attention` has looked
        (o, lse), meta = _method(client, "attention")(q, k, v, **keywords, return_lse=True, with_meta=True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, o, lse)  # type: ignore[arg-type]  # None is taken
        saved = {name for name, t in zip(_INPUTS, inputs, strict=True) if t is not None}
        others = {name: value for name, value in keywords.items() if name not in saved and name != "request_id"}
        if isinstance(meta, Meta) and meta.seed is not None:  # dropout is not sharded
            others["dropout_seed"] = meta.seed
        ctx.client, ctx.keywords = client, others  # type: ignore[attr-defined]
        return o, lse, meta

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        *inputs, o, lse = ctx.saved_tensors
        named = {name: t for name, t in zip(_INPUTS, inputs, strict=True) if t is not None}
        wanted = [name for name, needed in zip(GRADS, ctx.needs_input_grad[2:], strict=True) if needed]
        found = _method(ctx.client, "attention_grad")(
            torch.zeros_like(o) if do is None else do,
            **named,
            o=o,
            lse=lse,
            dlse=dlse,
            grads=wanted,
            **ctx.keywords,
        )
        if torch.is_grad_enabled():  # create_graph: the gradients depend on the inputs, and must not seem not to
            found = [_FirstOrder.apply(t, *named.values()) for t in found]  # type: ignore[no-untyped-call]
        grads = dict(zip(wanted, found, strict=True))
        return None, None, *(grads.get(name) for name in GRADS)


class _FirstOrder(torch.autograd.Function):
    """A gradient as it is, known to depend on the inputs; its own derivative is not there, and says so."""

    @staticmethod
    def forward(ctx: FunctionCtx, gradient: Tensor, *inputs: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, ...]:
        raise RuntimeError("second-order gradients of attention are not available")
