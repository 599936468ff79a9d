"""`attention` and `attention_grad` of both clients, with the type of the result for each way to call them.

numpy arrays give numpy arrays, torch tensors give torch tensors: `A` is the type of q.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload

from numpy.typing import NDArray

from flashpoint import _calls
from flashpoint._arrays import Array
from flashpoint._calls import Call, Gradients, Layers, OfSaved, OverCaches, SavedAttention
from flashpoint.meta import Meta

if TYPE_CHECKING:
    import torch

A = TypeVar("A", NDArray[Any], "torch.Tensor")


class Attending:
    """Calls that wait for their answer."""

    if TYPE_CHECKING:

        def _call(self, call: Call, /) -> Any: ...

    @overload
    def attention(
        self,
        q: A,
        k: A | None = None,
        v: A | None = None,
        *,
        return_lse: Literal[False] = False,
        with_meta: Literal[False] = False,
        **keywords: Unpack[Layers],
    ) -> A: ...

    @overload
    def attention(
        self,
        q: A,
        k: A | None = None,
        v: A | None = None,
        *,
        return_lse: Literal[True],
        with_meta: Literal[False] = False,
        **keywords: Unpack[Layers],
    ) -> tuple[A, A]: ...

    @overload
    def attention(
        self,
        q: A,
        k: A | None = None,
        v: A | None = None,
        *,
        return_lse: Literal[False] = False,
        with_meta: Literal[True],
        **keywords: Unpack[Layers],
    ) -> tuple[A, Meta]: ...

    @overload
    def attention(
        self,
        q: A,
        k: A | None = None,
        v: A | None = None,
        *,
        return_lse: Literal[True],
        with_meta: Literal[True],
        **keywords: Unpack[Layers],
    ) -> tuple[tuple[A, A], Meta]: ...

    @overload
    def attention(
        self,
        q: Array,
        k: Array | None = None,
        v: Array | None = None,
        *,
        save: Literal[True],
        return_lse: bool = False,
        with_meta: Literal[False] = False,
        **keywords: Unpack[Layers],
    ) -> SavedAttention: ...

    @overload
    def attention(
        self, q: Array, k: Array | None = None, v: Array | None = None, **keywords: Unpack[OverCaches]
    ) -> Any: ...

    def attention(
        self, q: Array, k: Array | None = None, v: Array | None = None, **keywords: Unpack[OverCaches]
    ) -> Any:
        """softmax(scale·q·kᵀ + …)·v: `o`, or (o, lse) with `return_lse`; (that, Meta) with `with_meta`.

        q (B,Hq,Sq,D), k (B,Hk,Sk,D), v (B,Hk,Sk,Dv) → o (B,Hq,Sq,Dv) in q's dtype, lse (B,Hq,Sq) float32; other layouts
        and ranks as the contract has them. numpy arrays give numpy arrays, torch tensors give torch tensors on q's
        device, outside autograd (see `flashpoint.torch`). Keywords: `OverCaches`. With `caches` (see `cache`) k and v
        are those of new tokens, or left out. With `save` the server keeps the forward: it gives a `SavedAttention`.
        """
        return self._call(_calls.forward(q, k, v, keywords))

    @overload
    def attention_grad(
        self,
        do: A,
        q: A | None = None,
        k: A | None = None,
        v: A | None = None,
        *,
        with_meta: Literal[False] = False,
        **keywords: Unpack[Gradients],
    ) -> tuple[A, ...]: ...

    @overload
    def attention_grad(
        self,
        do: A,
        q: A | None = None,
        k: A | None = None,
        v: A | None = None,
        *,
        with_meta: Literal[True],
        **keywords: Unpack[Gradients],
    ) -> tuple[tuple[A, ...], Meta]: ...

    @overload
    def attention_grad(
        self,
        do: Array,
        q: Array | None = None,
        k: Array | None = None,
        v: Array | None = None,
        **keywords: Unpack[OfSaved],
    ) -> Any: ...

    def attention_grad(
        self,
        do: Array,
        q: Array | None = None,
        k: Array | None = None,
        v: Array | None = None,
        **keywords: Unpack[OfSaved],
    ) -> Any:
        """The gradients of `attention`, given do, that of its o: (dq, dk, dv), or what `grads` names, in its order.

        With the forward's `o` and `lse` the server does not run it again. With dropout, `dropout_seed` must be the
        forward's. With `saved`, a forward that the server has saved, do is sent alone, with `dlse`, `grads`,
        `deterministic` and `backend` where they are given. Keywords: `OfSaved`.
        """
        return self._call(_calls.backward(do, q, k, v, keywords))


class AsyncAttending:
    """Calls that are awaited."""

    if TYPE_CHECKING:

        async def _call(self, call: Call, /) -> Any: ...

    @overload
    async def attention(
        self,
        q: A,
        k: A | None = None,
        v: A | None = None,
        *,
        return_lse: Literal[False] = False,
        with_meta: Literal[False] = False,
        **keywords: Unpack[Layers],
    ) -> A: ...

    @overload
    async def attention(
        self,
        q: A,
        k: A | None = None,
        v: A | None = None,
        *,
        return_lse: Literal[True],
        with_meta: Literal[False] = False,
        **keywords: Unpack[Layers],
    ) -> tuple[A, A]: ...

    @overload
    async def attention(
        self,
        q: A,
        k: A | None = None,
        v: A | None = None,
        *,
        return_lse: Literal[False] = False,
        with_meta: Literal[True],
        **keywords: Unpack[Layers],
    ) -> tuple[A, Meta]: ...

    @overload
    async def attention(
        self,
        q: A,
        k: A | None = None,
        v: A | None = None,
        *,
        return_lse: Literal[True],
        with_meta: Literal[True],
        **keywords: Unpack[Layers],
    ) -> tuple[tuple[A, A], Meta]: ...

    @overload
    async def attention(
        self,
        q: Array,
        k: Array | None = None,
        v: Array | None = None,
        *,
        save: Literal[True],
        return_lse: bool = False,
        with_meta: Literal[False] = False,
        **keywords: Unpack[Layers],
    ) -> SavedAttention: ...

    @overload
    async def attention(
        self, q: Array, k: Array | None = None, v: Array | None = None, **keywords: Unpack[OverCaches]
    ) -> Any: ...

    async def attention(
        self, q: Array, k: Array | None = None, v: Array | None = None, **keywords: Unpack[OverCaches]
    ) -> Any:
        """See `Client.attention`."""
        return await self._call(_calls.forward(q, k, v, keywords))

    @overload
    async def attention_grad(
        self,
        do: A,
        q: A | None = None,
        k: A | None = None,
        v: A | None = None,
        *,
        with_meta: Literal[False] = False,
        **keywords: Unpack[Gradients],
    ) -> tuple[A, ...]: ...

    @overload
    async def attention_grad(
        self,
        do: A,
        q: A | None = None,
        k: A | None = None,
        v: A | None = None,
        *,
        with_meta: Literal[True],
        **keywords: Unpack[Gradients],
    ) -> tuple[tuple[A, ...], Meta]: ...

    @overload
    async def attention_grad(
        self,
        do: Array,
        q: Array | None = None,
        k: Array | None = None,
        v: Array | None = None,
        **keywords: Unpack[OfSaved],
    ) -> Any: ...

    async def attention_grad(
        self,
        do: Array,
        q: Array | None = None,
        k: Array | None = None,
        v: Array | None = None,
        **keywords: Unpack[OfSaved],
    ) -> Any:
        """See `Client.attention_grad`."""
        return await self._call(_calls.backward(do, q, k, v, keywords))
