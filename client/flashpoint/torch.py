"""Differentiable attention for torch, computed by a server.

    o = flashpoint.torch.attention(q, k, v, client=client, causal=True)
    o.square().mean().backward()

The forward calls `/attention`. The backward sends the forward's inputs, `o` and `lse` to `/attention/grad`, so the
server does not compute the forward again. Without `save=True`, the server stores nothing between the two calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from flashpoint._calls.keywords import Saving, TorchKeywords, call
from flashpoint._client.client import Client
from flashpoint._derivatives.autograd import (
    Attention,
    Served,
    autocast,
    refuse_transforms,
    seed_for,
    seeded,
    without_compiling,
)
from flashpoint.errors import all_invalid, invalid
from flashpoint_contract.caches import CACHE_OPTIONS
from flashpoint_contract.options import GRADS, OPTIONS
from flashpoint_contract.tensors import refusals

_DIFFERENTIABLE = {name[1:] for name in GRADS}


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


@without_compiling
@call
def attention(q: Tensor, k: Tensor, v: Tensor, *, client: Client | Sequence[Client], **keywords: Unpack[Saving]) -> Any:
    """Return attention as `Client.attention` does, differentiable: o, or (o, lse) with `return_lse`.

    q, k, v, a float `attn_mask` and `sinks` get gradients, through o and lse. `timeout` and `priority` also apply to
    the backward's call. Dropout without `dropout_seed` draws a seed from torch's CPU generator; forward and backward
    use the same seed. A second derivative raises RuntimeError.

    Args:
        q: Queries, torch tensor (B, Hq, Sq, D) in layout `bhsd`; other layouts and ranks as `Client.attention`.
        client: The client; or a list of clients, whose servers share the call as `flashpoint.sharded.attention` does.

    Returns:
        o (B, Hq, Sq, Dv) on q's device, in its dtype. With `return_lse` (o, lse), lse float32 (B, Hq, Sq). With
        `return_key_weights` key_weights last, float32 (B, Hq, Sk), which has no gradient. With
        `with_meta` (that, `Meta`), or (that, list of `sharded.Part`) with a list of clients.
    """
    if of_caches := [name for name in CACHE_OPTIONS if name in keywords]:
        raise invalid(of_caches[0], "is not taken: caches have no gradients. Call the client's attention")
    for name, value in zip("qkv", (q, k, v), strict=True):
        if not isinstance(value, Tensor):
            raise invalid(name, "must be a torch tensor")
    given: dict[str, Any] = {"q": q, "k": k, "v": v, **keywords}
    refuse_transforms(given.items())
    if refused := refusals("torch", (name for name, t in given.items() if name in OPTIONS or t is not None)):
        raise all_invalid(refused)
    given |= zip("qkv", autocast(q, k, v), strict=True)
    if type(save := given.pop("save", False)) is not bool:
        raise invalid("save", "must be True or False")
    several = isinstance(client, Sequence)
    if not several and not isinstance(client, Client):
        raise invalid("client", "must be a Client, or a list of Clients")
    if save and several:
        raise invalid("save", "is not taken with several servers: no one of them has the whole forward")
    seed = None if several else seed_for(given)  # calls to several servers cannot have dropout: no seed
    requiring = {name for name, t in given.items() if isinstance(t, Tensor) and t.requires_grad}
    if not torch.is_grad_enabled() or not requiring:
        return Served(client, save, (), {}).method("attention")(**given, **seeded(seed))
    if without := sorted(requiring - _DIFFERENTIABLE):
        raise invalid(without[0], "has no gradient: detach it")
    return_lse, with_meta = given.pop("return_lse", False), given.pop("with_meta", False)
    weighs = given.pop("return_key_weights", False)
    call, tensors = Served.of(client, save, given, weighs)
    o, lse, *weights = Attention.apply(call, seed, *tensors)  # type: ignore[no-untyped-call]
    result = (o, *((lse,) if return_lse else ()), *weights) if return_lse or weights else o
    return (result, call.meta) if with_meta else result
