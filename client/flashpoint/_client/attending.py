"""The methods `attention` and `attention_grad` of both clients, with an overload for each type of result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload

from numpy.typing import NDArray

from flashpoint._calls import service
from flashpoint._calls.arrays import Array
from flashpoint._calls.keywords import Gradients, Layers, OfSaved, OverCaches, call
from flashpoint._calls.service import Call, SavedAttention, asynchronous
from flashpoint.meta import Meta

if TYPE_CHECKING:
    import torch

A = TypeVar("A", NDArray[Any], "torch.Tensor")  # results have the type of q


class Attending:
    """The methods `attention` and `attention_grad` of `Client`."""

    if TYPE_CHECKING:

        def _call(self, call: Call[Any], /) -> Any: ...

    @overload
    def attention(
        self, q: A, k: A | None = None, v: A | None = None, *,
        return_lse: Literal[False] = False, with_meta: Literal[False] = False, **keywords: Unpack[Layers],
    ) -> A: ...  # fmt: skip

    @overload
    def attention(
        self, q: A, k: A | None = None, v: A | None = None, *,
        return_lse: Literal[True], with_meta: Literal[False] = False, **keywords: Unpack[Layers],
    ) -> tuple[A, A]: ...  # fmt: skip

    @overload
    def attention(
        self, q: A, k: A | None = None, v: A | None = None, *,
        return_lse: Literal[False] = False, with_meta: Literal[True], **keywords: Unpack[Layers],
    ) -> tuple[A, Meta]: ...  # fmt: skip

    @overload
    def attention(
        self, q: A, k: A | None = None, v: A | None = None, *,
        return_lse: Literal[True], with_meta: Literal[True], **keywords: Unpack[Layers],
    ) -> tuple[tuple[A, A], Meta]: ...  # fmt: skip

    @overload
    def attention(
        self, q: Array, k: Array | None = None, v: Array | None = None, *,
        save: Literal[True], return_lse: bool = False, with_meta: Literal[False] = False, **keywords: Unpack[Layers],
    ) -> SavedAttention: ...  # fmt: skip

    @overload
    def attention(
        self, q: Array, k: Array | None = None, v: Array | None = None, **keywords: Unpack[OverCaches]
    ) -> Any: ...

    @call
    def attention(
        self, q: Array, k: Array | None = None, v: Array | None = None, **keywords: Unpack[OverCaches]
    ) -> Any:
        """Return attention, softmax(scale·q·kᵀ + mask)·v (FlashAttention-2, Dao 2023), computed by the server.

        B is the batch size. Sq and Sk are the numbers of queries and keys. Hq is the number of heads of q; Hk is that
        of k and v. D is the number of columns of q and k; Dv is that of v. For numpy arrays the results are numpy
        arrays; for torch tensors they are torch tensors on q's device, without autograd (`flashpoint.torch.attention`
        has gradients).

        Args:
            q: Queries, (B, Hq, Sq, D) in layout `bhsd`; (B, S, D) and (S, D) are one head. float16, bfloat16, float32
                or float64.
            k: Keys, (B, Hk, Sk, D), of q's rank; Hq is a multiple of Hk. q's dtype; or float8_e4m3fn or int8, with
                `k_scale`. With `caches`: the keys of new tokens, which are written first; None only reads.
            v: Values, (B, Hk, Sk, Dv), likewise.

        Returns:
            o (B, Hq, Sq, Dv), in q's dtype, layout and rank. With `return_lse` (o, lse), lse float32 (B, Hq, Sq), the
            natural logarithm of the softmax's denominator. With `return_key_weights` key_weights last, float32 (B, Hq,
            Sk), padded with zeros over `caches`. With `with_meta` (result, `Meta`). With `save` a
            `SavedAttention`. A query that sees no key has o = 0 and lse = −∞.
        """
        return self._call(service.forward(q, k, v, keywords))

    @overload
    def attention_grad(
        self, do: A, q: A | None = None, k: A | None = None, v: A | None = None, *,
        with_meta: Literal[False] = False, **keywords: Unpack[Gradients],
    ) -> tuple[A, ...]: ...  # fmt: skip

    @overload
    def attention_grad(
        self, do: A, q: A | None = None, k: A | None = None, v: A | None = None, *,
        with_meta: Literal[True], **keywords: Unpack[Gradients],
    ) -> tuple[tuple[A, ...], Meta]: ...  # fmt: skip

    @overload
    def attention_grad(
        self, do: Array, q: Array | None = None, k: Array | None = None, v: Array | None = None,
        **keywords: Unpack[OfSaved],
    ) -> Any: ...  # fmt: skip

    @call
    def attention_grad(
        self, do: Array, q: Array | None = None, k: Array | None = None, v: Array | None = None,
        **keywords: Unpack[OfSaved],
    ) -> Any:  # fmt: skip
        """Return the gradients of `attention` for `do`, the gradient of its o.

        The algorithm is FlashAttention-2's (Dao 2023, Algorithm 2). Options and other tensors are those of the forward;
        with dropout `dropout_seed` is needed.

        Args:
            do: Gradient of o, (B, Hq, Sq, Dv), q's dtype.
            q: Queries, as `attention` took them. None beside `saved`.
            k: Keys, as `attention` took them. None beside `saved`.
            v: Values, as `attention` took them. None beside `saved`.

        Returns:
            (dq, dk, dv), or one tensor for each name in `grads`, in that order, of the shape and dtype of its input.
            With `with_meta` (that, `Meta`).
        """
        return self._call(service.backward(do, q, k, v, keywords))


class AsyncAttending:
    """The methods `attention` and `attention_grad` of `AsyncClient`."""

    attention = asynchronous(Attending.attention)
    """Return attention, softmax(scale·q·kᵀ + mask)·v (FlashAttention-2, Dao 2023), computed by the server."""

    attention_grad = asynchronous(Attending.attention_grad)
    """Return the gradients of `attention` for `do`, the gradient of its o."""
