"""The autograd functions of `flashpoint.torch`, and torch's rules for autocast, transforms and random seeds.

`save_for_backward` stores everything that a backward needs, including the seed of dropout and a ticket: a tensor that
stands for a forward saved on the server. So activation checkpointing, which computes the forward again, replaces all
of these tensors, and torch's hooks for saved tensors receive all of them.
"""

from __future__ import annotations

import copy
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashpoint import sharded
from flashpoint._calls.arrays import NESTED
from flashpoint._calls.keywords import Sending
from flashpoint._calls.service import SavedAttention, plain
from flashpoint._client.client import Client
from flashpoint._client.saved import Lease
from flashpoint.errors import CacheError, invalid
from flashpoint_contract.options import GRADS
from flashpoint_contract.tensors import INPUT_TENSORS, TENSORS

R = TypeVar("R")
LIBRARY = "flashpoint_kernels.attention, which computes them in this process"
_BATCHED = ("FuncTorchBatched", "Batched")  # dispatch keys under torch.vmap, and autograd.grad(is_grads_batched=True)


def without_compiling(function: Callable[..., R]) -> Callable[..., R]:
    """Return `function`, wrapped so that `torch.compile` calls it between two graphs and does not trace it."""

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> R:
        if (dynamo := sys.modules.get("torch._dynamo")) is None:  # importing it takes seconds
            return function(*args, **keywords)
        disabled: R = dynamo.disable(function, reason="served attention sends requests")(*args, **keywords)
        return disabled

    return call


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Convert q, k and v to autocast's dtype, as `torch.autocast` does for SDPA, except float64 and 8-bit tensors."""
    kind = tensors[0].device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        t.to(dtype) if t.is_floating_point() and t.device.type == kind and t.dtype.itemsize in (2, 4) else t
        for t in tensors
    )


def refuse_transforms(tensors: Iterable[tuple[str, object]]) -> None:
    """Raise an error for torch tensors that cannot be sent: nested, batched, or with derivatives that would be lost."""
    functorch, level = torch._C._functorch, forward_ad._current_level
    unpack: Any = forward_ad.unpack_dual
    for name, t in tensors:
        if not isinstance(t, Tensor):
            continue
        if t.is_nested:
            raise invalid(name, NESTED)
        keys = torch._C._dispatch_keys(t)
        if any(keys.has(key) for key in _BATCHED):
            raise RuntimeError(
                "vmap of served attention is not available: make the mapped axis part of the batch, or send sequences "
                'of different lengths in layout="thd"'
            )
        if level >= 0 and (functorch.is_gradtrackingtensor(t) or unpack(t).tangent is not None):
            raise RuntimeError(
                f"forward-mode derivatives of attention are not available over HTTP; use backward(), or {LIBRARY}"
            )
        if functorch.is_gradtrackingtensor(t):
            raise RuntimeError(f"torch.func does not differentiate attention over HTTP: use backward(), or {LIBRARY}")


def seed_for(keywords: dict[str, Any]) -> Tensor | None:
    """Remove and return the seed in `keywords`. If dropout needs a seed, draw it from torch's CPU generator."""
    # The client draws the seed, not the server, so that `torch.manual_seed`, `fork_rng` and checkpoints repeat it.
    seed, dropout_p = plain(keywords.pop("dropout_seed", None)), plain(keywords.get("dropout_p", 0))
    if seed is None and isinstance(dropout_p, (int, float)) and 0 < dropout_p < 1:
        return torch.randint(1 << 53, (), dtype=torch.int64, device="cpu")
    if type(seed) is int and 0 <= seed < 1 << 64:
        return torch.tensor(seed if seed < 1 << 63 else seed - (1 << 64), dtype=torch.int64, device="cpu")
    if seed is not None:
        keywords["dropout_seed"] = seed  # the seed is not valid: the client's check will name the problem
    return None


def seeded(seed: Tensor | None) -> dict[str, int]:
    """Return the keyword argument `dropout_seed` for a seed from `seed_for`."""
    return {} if seed is None else {"dropout_seed": int(seed) & (1 << 64) - 1}


@dataclass
class Served:
    """A differentiable call: the data that its forward and its backward share, without the tensors."""

    client: Client | Sequence[Client]
    save: bool
    names: tuple[str, ...]  # of the tensors that autograd receives, in order
    keywords: dict[str, Any]  # a private copy of all other keyword arguments
    weighs: Any = False  # whether the forward also returns key weights
    meta: Any = None  # the `Meta` of the forward, after it has run

    @classmethod
    def of(
        cls, client: Client | Sequence[Client], save: bool, keywords: dict[str, Any], weighs: Any = False
    ) -> tuple[Served, list[Tensor]]:
        keywords = {n: value for n, value in keywords.items() if value is not None or n not in INPUT_TENSORS}
        tensors = {n: t for n, t in keywords.items() if isinstance(t, Tensor) and n in INPUT_TENSORS}
        others = {n: copy.deepcopy(t) if n in INPUT_TENSORS else t for n, t in keywords.items() if n not in tensors}
        return cls(client, save, tuple(tensors), others, weighs), list(tensors.values())

    def method(self, name: str) -> Any:
        """Return a method of the client; for a list of clients, the function of `flashpoint.sharded`."""
        if isinstance(self.client, Sequence):
            return functools.partial(getattr(sharded, name), self.client)
        return getattr(self.client, name)

    def forward(
        self, seed: Tensor | None, tensors: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, list[Tensor], Tensor | None]:
        """Return o, lse, a list with the key weights if they are asked for, and the ticket of the saved forward.

        The ticket is None if the forward was not saved.
        """
        named = dict(zip(self.names, tensors, strict=True))
        save = {"save": True} if self.save else {}
        weights = {"return_key_weights": self.weighs} if self.weighs else {}
        answer, self.meta = self.method("attention")(
            **named, **self.keywords, **seeded(seed), **save, **weights, return_lse=True, with_meta=True
        )  # fmt: skip
        if not isinstance(answer, SavedAttention):
            o, lse, *others = answer
            return o, lse, others, None
        assert isinstance(self.client, Client)
        ticket = None if answer.saved is None else _ticket(Lease(self.client, replace(answer, o=None, lse=None)))
        return answer.o, answer.lse, [], ticket

    def backward(
        self, request: dict[str, Any], named: dict[str, Any], seed: Tensor | None, ticket: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return the gradients named in `request`: from the saved forward, or if it is gone, from all tensors."""
        sending = {n: value for n, value in self.keywords.items() if n in Sending.__annotations__ and n != "request_id"}
        lease = None if ticket is None else _leases.get(int(ticket))
        if lease is not None and lease.saved is not None:
            try:
                gradients: tuple[Tensor, ...] = self.method("attention_grad")(**request, saved=lease.saved, **sending)
            except CacheError:  # the saved forward expired, or its engine restarted
                pass
            else:
                if not torch._C._autograd._get_current_graph_task_keep_graph():
                    lease.release()  # the graph is not retained, so no other backward follows
                return gradients
        others = {n: value for n, value in self.keywords.items() if n != "request_id"}
        return tuple(self.method("attention_grad")(**request, **named, **others, **seeded(seed)))


class _Lending(np.ndarray):
    """The storage of a ticket tensor. It holds the lease of a saved forward as long as torch keeps the tensor."""

    lease: Lease


_numbers = itertools.count()
_leases: WeakValueDictionary[int, Lease] = WeakValueDictionary()


def _ticket(lease: Lease) -> Tensor:
    """Return a tensor that stands for a saved forward. The server frees the forward after torch frees the tensor."""
    number = next(_numbers)
    memory: Any = np.array([number], np.int64).view(_Lending)
    memory.lease = _leases[number] = lease
    return torch.from_numpy(memory)


class Attention(torch.autograd.Function):
    """Return (o, lse) from the server, differentiable once, and key weights, if asked for, which have no gradient."""

    @staticmethod
    def forward(ctx: Any, call: Served, seed: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        o, lse, weights, ticket = call.forward(seed, tensors)
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.save_for_backward(*tensors, o, lse, seed, ticket)
        return o, lse, *weights

    @staticmethod
    def backward(
        ctx: Any, do: Tensor | None, dlse: Tensor | None, *dweights: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        call: Served = ctx.call
        if any(t is not None for t in dweights):
            raise RuntimeError("key weights have no gradient: detach() them")
        for name in call.names + tuple(call.keywords):
            if name in TENSORS and TENSORS[name].forward_only:
                raise invalid(name, "is only for the forward: 8-bit keys have no gradients")
        refuse_transforms((("do", do), ("dlse", dlse)))
        *tensors, o, lse, seed, ticket = ctx.saved_tensors
        needed = dict(zip(call.names, ctx.needs_input_grad[2:], strict=True))
        wanted = tuple(grad for grad in GRADS if needed.get(grad[1:]))
        do = torch.zeros_like(o) if do is None else do
        gradients = Gradient.apply(call, wanted, ticket, seed, do, dlse, o, lse, *tensors)  # type: ignore[no-untyped-call]
        grads = dict(zip(wanted, gradients, strict=True))
        return None, None, *(grads.get(f"d{name}") for name in call.names)


class Gradient(torch.autograd.Function):
    """Return the gradients `wanted` of a call. Differentiating these gradients raises RuntimeError."""

    @staticmethod
    def forward(
        ctx: Any, call: Served, wanted: tuple[str, ...], ticket: Tensor | None, seed: Tensor | None,
        do: Tensor, dlse: Tensor | None, o: Tensor, lse: Tensor, *tensors: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        request = {"do": do, "dlse": dlse, "grads": wanted}
        named = dict(zip(call.names, tensors, strict=True)) | {"o": o, "lse": lse}
        return call.backward(request, named, seed, ticket)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(f"second-order gradients of attention are not available over HTTP: use {LIBRARY}")
