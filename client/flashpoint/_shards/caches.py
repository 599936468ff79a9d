"""`ShardedCache` and `AsyncShardedCache`: KV caches over several servers."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Self, Unpack

from flashpoint._arrays import Array
from flashpoint._calls import DEFAULT
from flashpoint._keywords import OfLayer
from flashpoint._shards.rounds import Deadline, Tasks, Threads
from flashpoint._shards.spread import Spread
from flashpoint.errors import ConnectionFailedError


class _Lengths:
    """Base class of both sharded caches: the lengths, known without a request."""

    _spread: Spread

    @property
    def length(self) -> int:
        """Return the number of tokens of the longest layer. `lengths` has each layer's."""
        return max(self._spread.lengths)

    @property
    def lengths(self) -> list[int]:
        return list(self._spread.lengths)


class ShardedCache(_Lengths):
    """A KV cache over several servers, deleted at the end of a `with`. Calls on it run one after another.

    Errors name the server that they come from. After a failed write, the layer has only the tokens before the position
    of the write: write again. No other client may write to the parts.
    """

    def __init__(self, spread: Spread, threads: Threads) -> None:
        self._spread = spread
        self._threads = threads

    def attention(
        self, q: Array, k: Array | None = None, v: Array | None = None, *, at: int | None = None,
        **keywords: Unpack[OfLayer],
    ) -> Any:  # fmt: skip
        """Return attention of q over a layer of this cache. Keys and values of new tokens are written first.

        As `Cache.attention`: causality, the window, ALiBi and mask columns count positions in the whole cache. Dropout,
        block masks and `causal_alignment` `top_left` are refused.

        Args:
            q: Queries, (1, Hq, Sq, D) in layout `bhsd`.
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
            o (1, Hq, Sq, Dv), or (o, lse). With `with_meta` (that, list of `Part`).

        Raises:
            FlashpointError: the errors of `flashpoint.errors`. InvalidInputError names each field that is not valid.
        """
        deadline = Deadline(keywords.pop("timeout", DEFAULT))
        return self._threads.run(self._spread.attention(q, k, v, at, {**keywords}), deadline)

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
        return self._threads.run(self._spread.append(k, v, layer, at, layout))

    def fork(self, length: int | None = None) -> ShardedCache:
        """Return a copy. It shares memory with this cache until one of the two is written to.

        Args:
            length: Number of tokens of the copy. None copies all.
        """
        return ShardedCache(self._threads.run(self._spread.fork(length)), Threads(self._threads.clients))

    def truncate(self, length: int) -> None:
        """Drop the tokens from a position on, in every layer.

        Args:
            length: Number of tokens that stay.
        """
        self._threads.run(self._spread.truncate(length))

    def renew(self) -> None:
        """Start the time to live of all parts again. Attention does so for the parts that it reads."""
        self._threads.run(self._spread.renew())

    def delete(self) -> None:
        """Free its memory on all servers. Do nothing if it is gone already."""
        self._threads.run(self._spread.delete())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with suppress(ConnectionFailedError):  # a server that is gone holds no memory
                self.delete()
        finally:
            self._threads.close()


class AsyncShardedCache(_Lengths):
    """The asyncio twin of `ShardedCache`: the same methods, awaited."""

    def __init__(self, spread: Spread, tasks: Tasks) -> None:
        self._spread = spread
        self._tasks = tasks

    async def attention(
        self, q: Array, k: Array | None = None, v: Array | None = None, *, at: int | None = None,
        **keywords: Unpack[OfLayer],
    ) -> Any:  # fmt: skip
        """Return attention of q over a layer of this cache. Keys and values of new tokens are written first.

        As `Cache.attention`: causality, the window, ALiBi and mask columns count positions in the whole cache. Dropout,
        block masks and `causal_alignment` `top_left` are refused.

        Args:
            q: Queries, (1, Hq, Sq, D) in layout `bhsd`.
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
            o (1, Hq, Sq, Dv), or (o, lse). With `with_meta` (that, list of `Part`).

        Raises:
            FlashpointError: the errors of `flashpoint.errors`. InvalidInputError names each field that is not valid.
        """
        deadline = Deadline(keywords.pop("timeout", DEFAULT))
        return await self._tasks.run(self._spread.attention(q, k, v, at, {**keywords}), deadline)

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
        return await self._tasks.run(self._spread.append(k, v, layer, at, layout))

    async def fork(self, length: int | None = None) -> AsyncShardedCache:
        """Return a copy. It shares memory with this cache until one of the two is written to.

        Args:
            length: Number of tokens of the copy. None copies all.
        """
        return AsyncShardedCache(await self._tasks.run(self._spread.fork(length)), Tasks(self._tasks.clients))

    async def truncate(self, length: int) -> None:
        """Drop the tokens from a position on, in every layer.

        Args:
            length: Number of tokens that stay.
        """
        await self._tasks.run(self._spread.truncate(length))

    async def renew(self) -> None:
        """Start the time to live of all parts again. Attention does so for the parts that it reads."""
        await self._tasks.run(self._spread.renew())

    async def delete(self) -> None:
        """Free its memory on all servers. Do nothing if it is gone already."""
        await self._tasks.run(self._spread.delete())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        with suppress(ConnectionFailedError):
            await self.delete()
