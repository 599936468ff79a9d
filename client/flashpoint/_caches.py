"""`Cache` and `AsyncCache`: KV caches that a server holds."""

from __future__ import annotations

from typing import Any, Literal, Protocol, Self, Unpack, overload

from flashpoint import _cache_calls
from flashpoint._arrays import Array
from flashpoint._attending import A
from flashpoint._cache_calls import AnyCache, Described
from flashpoint._calls import Call, unless_gone
from flashpoint._keywords import Layer, OfLayer
from flashpoint.meta import Meta


class _Client(Protocol):
    def _call(self, call: Call, /) -> Any: ...


class _AsyncClient(Protocol):
    async def _call(self, call: Call, /) -> Any: ...


class Cache(AnyCache):
    """A KV cache on the client's server: the keys and values of one sequence, for every layer of a model.

        with client.cache(layers=12, kv_heads=8, head_dim=64) as cache:  # the end of the `with` deletes it
            o = cache.attention(q, k, v, layer=0, causal=True)  # writes k and v, attends to all that is held

    `id` is the cache's name on the server, `layers` the number of its layers, `lengths` the number of tokens of each,
    and `bytes` its memory, from the latest answers. Methods raise the errors of `flashpoint.errors`. If the server does
    not have the cache any more, they raise CacheError with code `cache_lost`: it expired, or its engine restarted. Then
    make a new cache, and send the tokens again.
    """

    def __init__(self, client: _Client, found: Described) -> None:
        super().__init__(found)
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

    def attention(
        self, q: Array, k: Array | None = None, v: Array | None = None, *, at: int | None = None,
        **keywords: Unpack[OfLayer],
    ) -> Any:  # fmt: skip
        """Return attention of q over a layer of this cache. Keys and values of new tokens are written first.

        Args:
            q: Queries, (1, Hq, Sq, D) in layout `bhsd`; (S, D) is one head. The cache's dtype; for a cache in 8 bits
                float32, bfloat16 or float16.
            k: Keys of new tokens, (1, Hk, Sq, D). None only reads.
            v: Values of new tokens, (1, Hk, Sq, Dv). None only reads.
            at: Position where k and v are written. Later tokens of the layer are dropped. None is the layer's end.

        Keyword Args:
            return_lse: Return (o, lse) in place of o. Default: False.
            with_meta: Return (result, `Meta`): timings, the backend, the seed of dropout. Default: False.
            layer: Layer of the caches, from 0. Default: 0.
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
            As `Client.attention`: o (1, Hq, Sq, Dv), or (o, lse), or (that, `Meta`).

        Raises:
            FlashpointError: the errors of `flashpoint.errors`. InvalidInputError names each field that is not valid.
        """
        return self._client._call(_cache_calls.attend(self, q, k, v, at, keywords))

    def append(self, k: Array, v: Array, *, layer: int = 0, at: int | None = None, layout: str = "bhsd") -> int:
        """Write the keys and values of new tokens to a layer.

        Args:
            k: Keys, (Hk, S, D) in layout `bhsd`, (S, Hk, D) in `bshd`; (S, D) for one head.
            v: Values, likewise, with Dv columns.
            layer: Layer, from 0.
            at: Position where they are written. Later tokens of the layer are dropped. None is the layer's end.
            layout: `bhsd` or `bshd`.

        Returns:
            The number of tokens of the layer.

        Raises:
            FlashpointError: the errors of `flashpoint.errors`. InvalidInputError names each field that is not valid.
        """
        length: int = self._client._call(_cache_calls.append(self, k, v, layer, at, layout))
        return length

    def fork(self, length: int | None = None) -> Cache:
        """Return a copy. It shares memory with this cache until one of the two is written to.

        Args:
            length: Number of tokens of the copy. None copies all.
        """
        return Cache(
            self._client, self._client._call(_cache_calls.fork([self], None if length is None else [length], []))[0]
        )

    def truncate(self, length: int) -> None:
        """Drop the tokens from a position on, in every layer.

        Args:
            length: Number of tokens that stay.
        """
        self._hear(self._client._call(_cache_calls.change(self, "truncate", {"length": length})))

    def renew(self) -> None:
        """Start the time to live again, as every call with the cache does."""
        self._hear(self._client._call(_cache_calls.change(self, "renew", {})))

    def refresh(self) -> None:
        """Ask the server for `lengths` and `bytes`, which another client may have changed."""
        self._hear(self._client._call(_cache_calls.look(self)))

    def tensors(self, layer: int = 0, like: Array | None = None) -> tuple[Any, Any]:
        """Return the keys and values of a layer.

        Args:
            layer: Layer, from 0.
            like: A torch tensor, whose library and device the result has. None is numpy.

        Returns:
            k (1, Hk, S, D) and v (1, Hk, S, Dv) in the cache's dtype; in float32 for a cache in 8 bits.

        Raises:
            FlashpointError: the errors of `flashpoint.errors`. InvalidInputError names each field that is not valid.
        """
        found: tuple[Any, Any] = self._client._call(_cache_calls.tensors(self, layer, like))
        return found

    def delete(self) -> None:
        """Free its memory. Do nothing if it is gone already."""
        with unless_gone():
            self._client._call(_cache_calls.delete(self))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.delete()


class AsyncCache(AnyCache):
    """The asyncio twin of `Cache`: the same methods, awaited.

    async with await client.cache(layers=12, kv_heads=8, head_dim=64) as cache:
        o = await cache.attention(q, k, v, layer=0, causal=True)
    """

    def __init__(self, client: _AsyncClient, found: Described) -> None:
        super().__init__(found)
        self._client = client

    @overload
    async def attention(
        self, q: A, k: A | None = None, v: A | None = None, *, at: int | None = None,
        return_lse: Literal[False] = False, with_meta: Literal[False] = False, **keywords: Unpack[Layer],
    ) -> A: ...  # fmt: skip

    @overload
    async def attention(
        self, q: A, k: A | None = None, v: A | None = None, *, at: int | None = None,
        return_lse: Literal[True], with_meta: Literal[False] = False, **keywords: Unpack[Layer],
    ) -> tuple[A, A]: ...  # fmt: skip

    @overload
    async def attention(
        self, q: A, k: A | None = None, v: A | None = None, *, at: int | None = None,
        return_lse: Literal[False] = False, with_meta: Literal[True], **keywords: Unpack[Layer],
    ) -> tuple[A, Meta]: ...  # fmt: skip

    @overload
    async def attention(
        self, q: A, k: A | None = None, v: A | None = None, *, at: int | None = None,
        return_lse: Literal[True], with_meta: Literal[True], **keywords: Unpack[Layer],
    ) -> tuple[tuple[A, A], Meta]: ...  # fmt: skip

    @overload
    async def attention(
        self, q: Array, k: Array | None = None, v: Array | None = None, *, at: int | None = None,
        **keywords: Unpack[OfLayer],
    ) -> Any: ...  # fmt: skip

    async def attention(
        self, q: Array, k: Array | None = None, v: Array | None = None, *, at: int | None = None,
        **keywords: Unpack[OfLayer],
    ) -> Any:  # fmt: skip
        """Return attention of q over a layer of this cache. Keys and values of new tokens are written first.

        Args:
            q: Queries, (1, Hq, Sq, D) in layout `bhsd`; (S, D) is one head. The cache's dtype; for a cache in 8 bits
                float32, bfloat16 or float16.
            k: Keys of new tokens, (1, Hk, Sq, D). None only reads.
            v: Values of new tokens, (1, Hk, Sq, Dv). None only reads.
            at: Position where k and v are written. Later tokens of the layer are dropped. None is the layer's end.

        Keyword Args:
            return_lse: Return (o, lse) in place of o. Default: False.
            with_meta: Return (result, `Meta`): timings, the backend, the seed of dropout. Default: False.
            layer: Layer of the caches, from 0. Default: 0.
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
            As `Client.attention`: o (1, Hq, Sq, Dv), or (o, lse), or (that, `Meta`).

        Raises:
            FlashpointError: the errors of `flashpoint.errors`. InvalidInputError names each field that is not valid.
        """
        return await self._client._call(_cache_calls.attend(self, q, k, v, at, keywords))

    async def append(self, k: Array, v: Array, *, layer: int = 0, at: int | None = None, layout: str = "bhsd") -> int:
        """Write the keys and values of new tokens to a layer.

        Args:
            k: Keys, (Hk, S, D) in layout `bhsd`, (S, Hk, D) in `bshd`; (S, D) for one head.
            v: Values, likewise, with Dv columns.
            layer: Layer, from 0.
            at: Position where they are written. Later tokens of the layer are dropped. None is the layer's end.
            layout: `bhsd` or `bshd`.

        Returns:
            The number of tokens of the layer.

        Raises:
            FlashpointError: the errors of `flashpoint.errors`. InvalidInputError names each field that is not valid.
        """
        length: int = await self._client._call(_cache_calls.append(self, k, v, layer, at, layout))
        return length

    async def fork(self, length: int | None = None) -> AsyncCache:
        """Return a copy. It shares memory with this cache until one of the two is written to.

        Args:
            length: Number of tokens of the copy. None copies all.
        """
        made = await self._client._call(_cache_calls.fork([self], None if length is None else [length], []))
        return AsyncCache(self._client, made[0])

    async def truncate(self, length: int) -> None:
        """Drop the tokens from a position on, in every layer.

        Args:
            length: Number of tokens that stay.
        """
        self._hear(await self._client._call(_cache_calls.change(self, "truncate", {"length": length})))

    async def renew(self) -> None:
        """Start the time to live again, as every call with the cache does."""
        self._hear(await self._client._call(_cache_calls.change(self, "renew", {})))

    async def refresh(self) -> None:
        """Ask the server for `lengths` and `bytes`, which another client may have changed."""
        self._hear(await self._client._call(_cache_calls.look(self)))

    async def tensors(self, layer: int = 0, like: Array | None = None) -> tuple[Any, Any]:
        """Return the keys and values of a layer.

        Args:
            layer: Layer, from 0.
            like: A torch tensor, whose library and device the result has. None is numpy.

        Returns:
            k (1, Hk, S, D) and v (1, Hk, S, Dv) in the cache's dtype; in float32 for a cache in 8 bits.

        Raises:
            FlashpointError: the errors of `flashpoint.errors`. InvalidInputError names each field that is not valid.
        """
        found: tuple[Any, Any] = await self._client._call(_cache_calls.tensors(self, layer, like))
        return found

    async def delete(self) -> None:
        """Free its memory. Do nothing if it is gone already."""
        with unless_gone():
            await self._client._call(_cache_calls.delete(self))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.delete()
