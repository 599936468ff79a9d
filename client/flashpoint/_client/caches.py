"""`Cache` and `AsyncCache`: KV caches that a server holds."""

from __future__ import annotations

from typing import Any, Literal, Self, Unpack, overload

from flashpoint._calls import caches as cache_calls
from flashpoint._calls.arrays import Array
from flashpoint._calls.caches import AnyCache, Described, not_copied
from flashpoint._calls.keywords import Layer, OfLayer, call
from flashpoint._calls.service import AsyncCallSender, CallSender, asynchronous
from flashpoint._client.attending import A
from flashpoint.meta import Meta
from flashpoint_contract.wording.docstrings import twin_of


class Cache(AnyCache):
    """A KV cache on the client's server: the keys and values of one sequence, for every layer of a model.

        with client.cache(layers=12, kv_heads=8, head_dim=64) as cache:  # the end of the `with` deletes it
            o = cache.attention(q, k, v, layer=0, causal=True)  # writes k and v, then attends to the whole layer

    `id` is the cache's name on the server, `layers` the number of its layers, `lengths` the number of tokens of each,
    and `bytes` its memory, from the latest answers. Methods raise the errors of `flashpoint.errors`. If the server does
    not have the cache any more, they raise CacheError with code `cache_lost`: it expired, or its engine restarted. Then
    make a new cache, and send the tokens again.
    """

    def __init__(self, client: CallSender, description: Described) -> None:
        super().__init__(description)
        self._client = client

    @overload
    def attention(
        self, q: A, k: A | None = None, v: A | None = None, *, at: int | None = None,
        return_lse: Literal[False] = False, with_meta: Literal[False] = False, **keywords: Unpack[Layer],
    ) -> A: ...  # fmt: skip

    @overload
    def attention(
        self, q: A, k: A | None = None, v: A | None = None, *, at: int | None = None,
        return_lse: Literal[True], with_meta: Literal[False] = False, **keywords: Unpack[Layer],
    ) -> tuple[A, A]: ...  # fmt: skip

    @overload
    def attention(
        self, q: A, k: A | None = None, v: A | None = None, *, at: int | None = None,
        return_lse: Literal[False] = False, with_meta: Literal[True], **keywords: Unpack[Layer],
    ) -> tuple[A, Meta]: ...  # fmt: skip

    @overload
    def attention(
        self, q: A, k: A | None = None, v: A | None = None, *, at: int | None = None,
        return_lse: Literal[True], with_meta: Literal[True], **keywords: Unpack[Layer],
    ) -> tuple[tuple[A, A], Meta]: ...  # fmt: skip

    @overload
    def attention(
        self, q: Array, k: Array | None = None, v: Array | None = None, *, at: int | None = None,
        **keywords: Unpack[OfLayer],
    ) -> Any: ...  # fmt: skip

    @call
    def attention(
        self, q: Array, k: Array | None = None, v: Array | None = None, *, at: int | None = None,
        **keywords: Unpack[OfLayer],
    ) -> Any:  # fmt: skip
        """Return attention of q over a layer of this cache. Keys and values of new tokens are written first.

        Args:
            q: Queries, (1, Hq, Sq, D) in layout `bhsd`; (S, D) is one head. The cache's dtype; for an 8-bit cache
                float32, bfloat16 or float16.
            k: Keys of new tokens, (1, Hk, Sq, D). None only reads.
            v: Values of new tokens, (1, Hk, Sq, Dv). None only reads.
            at: Position where k and v are written. Later tokens of the layer are dropped. None is the layer's end.

        Returns:
            As `Client.attention`: o (1, Hq, Sq, Dv), or (o, lse), or (that, `Meta`). With `return_key_weights`
            key_weights last, float32 (1, Hq, n): one number for each of the layer's n positions, 0 for freed ones.
        """
        return self._client._call(cache_calls.attend(self, q, k, v, at, keywords))

    @call
    def append(self, k: Array, v: Array, *, layer: int = 0, at: int | None = None, layout: str = "bhsd") -> int:
        """Write the keys and values of new tokens to a layer. Return the number of tokens of the layer.

        Args:
            k: Keys, (Hk, S, D) in layout `bhsd`, (S, Hk, D) in `bshd`; (S, D) for one head.
            v: Values, likewise, with Dv columns.
            layer: Layer, from 0.
            at: Position where they are written. Later tokens of the layer are dropped. None is the layer's end.
            layout: `bhsd` or `bshd`.
        """
        return self._client._call(cache_calls.append(self, k, v, layer, at, layout))

    def fork(self, length: int | None = None) -> Cache:
        """Return a copy of the first `length` tokens, or of all. Both share memory until one of them is written to."""
        return Cache(self._client, self._client._call(cache_calls.fork_one(self, length)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache:
        return self.fork()

    def truncate(self, length: int) -> None:
        """Drop the tokens from position `length` on, in every layer."""
        return self._client._call(cache_calls.change(self, "truncate", {"length": length}))

    def renew(self) -> None:
        """Start the time to live again, as every call with the cache does."""
        return self._client._call(cache_calls.change(self, "renew", {}))

    def refresh(self) -> None:
        """Ask the server for `lengths` and `bytes`, which another client may have changed."""
        return self._client._call(cache_calls.look(self))

    @call
    def tensors(self, layer: int = 0, like: Array | None = None) -> tuple[Any, Any]:
        """Return k (1, Hk, S, D) and v (1, Hk, S, Dv) of a layer.

        They have the cache's dtype; for an 8-bit cache they are float32.

        Args:
            layer: Layer, from 0.
            like: Array or tensor whose library (numpy or torch) and device the result has. None is numpy.
        """
        return self._client._call(cache_calls.tensors(self, layer, like))

    def delete(self) -> None:
        """Free its memory. Do nothing if it is gone already."""
        return self._client._call(cache_calls.delete(self))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.delete()


@twin_of(Cache)
class AsyncCache(AnyCache):
    """The asyncio twin of `Cache`: the same methods, awaited.

    async with await client.cache(layers=12, kv_heads=8, head_dim=64) as cache:
        o = await cache.attention(q, k, v, layer=0, causal=True)
    """

    def __init__(self, client: AsyncCallSender, description: Described) -> None:
        super().__init__(description)
        self._client = client

    attention = asynchronous(Cache.attention)
    """Return attention of q over a layer of this cache. Keys and values of new tokens are written first."""

    append = asynchronous(Cache.append)
    """Write the keys and values of new tokens to a layer. Return the number of tokens of the layer."""

    async def fork(self, length: int | None = None) -> AsyncCache:
        """Return a copy of the first `length` tokens, or of all. Both share memory until one of them is written to."""
        return AsyncCache(self._client, await self._client._call(cache_calls.fork_one(self, length)))

    def __deepcopy__(self, memo: dict[int, Any]) -> AsyncCache:
        raise not_copied(self)

    truncate = asynchronous(Cache.truncate)
    """Drop the tokens from position `length` on, in every layer."""

    renew = asynchronous(Cache.renew)
    """Start the time to live again, as every call with the cache does."""

    refresh = asynchronous(Cache.refresh)
    """Ask the server for `lengths` and `bytes`, which another client may have changed."""

    tensors = asynchronous(Cache.tensors)
    """Return k (1, Hk, S, D) and v (1, Hk, S, Dv) of a layer."""

    delete = asynchronous(Cache.delete)
    """Free its memory. Do nothing if it is gone already."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.delete()
