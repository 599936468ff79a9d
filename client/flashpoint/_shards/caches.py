"""`ShardedCache` and `AsyncShardedCache`: KV caches over several servers."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Self, Unpack

from flashpoint._calls.arrays import Array
from flashpoint._calls.caches import not_copied
from flashpoint._calls.keywords import OfLayer, call
from flashpoint._calls.service import DEFAULT, asynchronous
from flashpoint._client.caches import Cache
from flashpoint._shards.rounds import Deadline, Tasks, Threads
from flashpoint._shards.spread import Spread
from flashpoint.errors import ConnectionFailedError
from flashpoint_contract.wording.docstrings import twin_of


class _Lengths:
    """Base class of both sharded caches. It returns the layers' numbers of tokens without a request to a server."""

    _spread: Spread

    @property
    def length(self) -> int:
        """Return the number of tokens of the longest layer. `lengths` has each layer's."""
        return max(self._spread.lengths)

    @property
    def lengths(self) -> list[int]:
        return list(self._spread.lengths)


@twin_of(Cache)
class ShardedCache(_Lengths):
    """A KV cache over several servers, deleted at the end of a `with`. Calls on it run one after another.

    Each server holds parts of the cache; no other client may write to them. Errors name the server that they come from.
    After a failed write, the layer has only the tokens before the position of the write: write again.
    """

    def __init__(self, spread: Spread, threads: Threads) -> None:
        self._spread = spread
        self._rounds = threads

    @call
    def attention(
        self, q: Array, k: Array | None = None, v: Array | None = None, *, at: int | None = None,
        **keywords: Unpack[OfLayer],
    ) -> Any:  # fmt: skip
        """Return attention of q over a layer of this cache. Keys and values of new tokens are written first.

        It is the result of `Cache.attention` for one cache with all tokens: causality, the window, ALiBi and mask
        columns refer to positions in the whole cache. Dropout, block masks and `causal_alignment` `top_left` are
        refused.

        Args:
            q: Queries, (1, Hq, Sq, D) in layout `bhsd`.
            k: Keys of new tokens, (1, Hk, Sq, D). None only reads.
            v: Values of new tokens, (1, Hk, Sq, Dv). None only reads.
            at: Position where k and v are written. Later tokens of the layer are dropped. None is the layer's end.

        Returns:
            o (1, Hq, Sq, Dv), or (o, lse). With `with_meta` (that, list of `Part`).
        """
        deadline = Deadline(keywords.pop("timeout", DEFAULT))
        return self._rounds.run(self._spread.attention(q, k, v, at, {**keywords}), deadline)

    def append(self, k: Array, v: Array, *, layer: int = 0, at: int | None = None, layout: str = "bhsd") -> int:
        """Write the keys and values of new tokens to a layer. Return the number of tokens of the layer."""
        return self._rounds.run(self._spread.append(k, v, layer, at, layout))

    def fork(self, length: int | None = None) -> ShardedCache:
        """Return a copy of the first `length` tokens, or of all. Both share memory until one of them is written to."""
        return ShardedCache(self._rounds.run(self._spread.fork(length)), Threads(self._rounds.clients))

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedCache:
        return self.fork()

    def truncate(self, length: int) -> None:
        """Drop the tokens from position `length` on, in every layer."""
        return self._rounds.run(self._spread.truncate(length))

    def renew(self) -> None:
        """Start the time to live of all parts again. Attention does so for the parts that it reads."""
        return self._rounds.run(self._spread.renew())

    def delete(self) -> None:
        """Free its memory on all servers. Do nothing if it is gone already."""
        return self._rounds.run(self._spread.delete())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with suppress(ConnectionFailedError):  # a server that does not run any more holds no memory
                self.delete()
        finally:
            self._rounds.close()


@twin_of(ShardedCache)
class AsyncShardedCache(_Lengths):
    """The asyncio twin of `ShardedCache`: the same methods, awaited."""

    def __init__(self, spread: Spread, tasks: Tasks) -> None:
        self._spread = spread
        self._rounds = tasks

    attention = asynchronous(ShardedCache.attention)
    """Return attention of q over a layer of this cache. Keys and values of new tokens are written first."""

    append = asynchronous(ShardedCache.append)
    """Write the keys and values of new tokens to a layer. Return the number of tokens of the layer."""

    async def fork(self, length: int | None = None) -> AsyncShardedCache:
        """Return a copy of the first `length` tokens, or of all. Both share memory until one of them is written to."""
        return AsyncShardedCache(await self._rounds.run(self._spread.fork(length)), Tasks(self._rounds.clients))

    def __deepcopy__(self, memo: dict[int, Any]) -> AsyncShardedCache:
        raise not_copied(self)

    truncate = asynchronous(ShardedCache.truncate)
    """Drop the tokens from position `length` on, in every layer."""

    renew = asynchronous(ShardedCache.renew)
    """Start the time to live of all parts again. Attention does so for the parts that it reads."""

    delete = asynchronous(ShardedCache.delete)
    """Free its memory on all servers. Do nothing if it is gone already."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        with suppress(ConnectionFailedError):
            await self.delete()
