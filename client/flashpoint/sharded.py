"""One attention over several servers, merged exactly: for what is longer than one device, or too long to wait for.

    clients = [flashpoint.Client(url) for url in urls]
    o = flashpoint.sharded.attention(clients, q, k, v, causal=True)
    dq, dk, dv = flashpoint.sharded.attention_grad(clients, do, q, k, v, causal=True)

Queries and keys are cut into pieces of equal work, one a server; the parts of a query's answer are merged by their
log-sum-exp. A piece whose server was full, stopping or gone goes to another, and is asked of another as well where its
server has said nothing for half of the time. There is a whole answer or an error, and an error, a deadline or a
cancellation ends every piece. `flashpoint.torch.attention` takes a list of clients too.

A KV cache over several servers, for a context that is larger than one of them holds:

    with flashpoint.sharded.cache(clients, layers=12, kv_heads=8, head_dim=64) as cache:
        o = cache.attention(q, k, v, layer=0, causal=True)
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Self, Unpack

from flashpoint import _calls
from flashpoint._arrays import Array
from flashpoint._calls import DEFAULT, Backward, Forward, OfLayer
from flashpoint._client import AsyncClient, Client, _seconds
from flashpoint._shards import merge
from flashpoint._shards.plan import plan
from flashpoint._shards.problem import problem
from flashpoint._shards.rounds import Deadline, Tasks, Threads
from flashpoint._shards.run import run, run_async
from flashpoint._shards.spread import Part, Spread, SpreadSizes
from flashpoint._shards.work import Item, Work
from flashpoint.errors import ConnectionFailedError, invalid
from flashpoint.options import AttentionOptions
from flashpoint_contract.tensors import INPUT_TENSORS

__all__ = [
    "AsyncShardedCache", "Part", "ShardedCache", "async_attention", "async_attention_grad", "async_cache", "attention",
    "attention_grad", "cache",
]  # fmt: skip


class ShardedForward(Forward, total=False):
    """Keywords of `attention`: those of `Client.attention`, and `parts` (of the queries, of the keys)."""

    parts: tuple[int, int] | None


class ShardedBackward(Backward, total=False):
    """Keywords of `attention_grad`: those of `Client.attention_grad`, and `parts` (of the queries, of the keys)."""

    parts: tuple[int, int] | None


def attention(clients: Sequence[Client], q: Array, k: Array, v: Array, **keywords: Unpack[ShardedForward]) -> Any:
    """softmax(scale·q·kᵀ + …)·v as `Client.attention` has it, computed by all of `clients`' servers.

    The same shapes, dtypes, options and answers: `o`, or (o, lse); `with_meta` adds a list of `Part`. Dropout is
    refused: its mask counts positions in the whole sequence. `parts` = (r, c) cuts every sequence's queries into r and
    its keys into c parts; without it there are as many parts as clients, cut so that the least is sent. Parts beyond
    the number of clients wait for the first that is free, so more parts need less memory of each server.

    `timeout` holds for the whole call; the first client's own if it is not given. Where q is float16 or bfloat16, so is
    each part's o: to be rounded once instead of twice, send float32. float64 is merged with float32's lse, and its keys
    are cut only if `parts` says so.

    Raises InvalidInputError, and the errors of `flashpoint.errors` that are not another server's to mend.
    """
    return _drive(_Job(clients, Client, "/attention", {"q": q, "k": k, "v": v, **keywords}))


def attention_grad(
    clients: Sequence[Client], do: Array, q: Array, k: Array, v: Array, **keywords: Unpack[ShardedBackward]
) -> Any:
    """The gradients of `attention`, as `Client.attention_grad` has them: (dq, dk, dv), or what `grads` names.

    Each server has the `o` and `lse` of the whole, which are computed first where they are not given. Keywords: as
    `attention`'s, and those of `Client.attention_grad`.
    """
    return _drive(_Job(clients, Client, "/attention/grad", {"do": do, "q": q, "k": k, "v": v, **keywords}))


async def async_attention(
    clients: Sequence[AsyncClient], q: Array, k: Array, v: Array, **keywords: Unpack[ShardedForward]
) -> Any:
    """`attention` with `AsyncClient`s."""
    return await _drive_async(_Job(clients, AsyncClient, "/attention", {"q": q, "k": k, "v": v, **keywords}))


async def async_attention_grad(
    clients: Sequence[AsyncClient], do: Array, q: Array, k: Array, v: Array, **keywords: Unpack[ShardedBackward]
) -> Any:
    """`attention_grad` with `AsyncClient`s."""
    tensors = {"do": do, "q": q, "k": k, "v": v}
    return await _drive_async(_Job(clients, AsyncClient, "/attention/grad", {**tensors, **keywords}))


def cache(clients: Sequence[Client], **shape: Unpack[SpreadSizes]) -> ShardedCache:
    """Make a KV cache of one sequence, whose tokens are spread over all of `clients`' servers.

    Tokens [p·span, (p + 1)·span) are at server p modulo their number, in a cache of its own that is made when the first
    of them comes: so the servers are filled in turn. `span` is 65,536 where it is not given. Each server reads its own
    tokens; the answers are merged by their log-sum-exp. Other keywords: as `Client.cache` has them, but for
    `max_length`, `keep` and `beside`.
    """
    spread = Spread([client.url for client in _checked(clients, Client)], shape)
    threads = Threads(clients)
    threads.run(spread.grow(0))
    return ShardedCache(spread, threads)


async def async_cache(clients: Sequence[AsyncClient], **shape: Unpack[SpreadSizes]) -> AsyncShardedCache:
    """`cache` with `AsyncClient`s: `async with await sharded.async_cache(…) as cache`."""
    spread = Spread([client.url for client in _checked(clients, AsyncClient)], shape)
    tasks = Tasks(clients)
    await tasks.run(spread.grow(0))
    return AsyncShardedCache(spread, tasks)


class _Lengths:
    """The lengths of both kinds of cache, known without a request."""

    _spread: Spread

    @property
    def length(self) -> int:
        """Tokens of its longest layer. `lengths` has every layer's."""
        return max(self._spread.lengths)

    @property
    def lengths(self) -> list[int]:
        return list(self._spread.lengths)


class ShardedCache(_Lengths):
    """A KV cache over several servers, deleted at the end of a `with`. Calls on it come one after the other.

    Errors name the server that they come from. After a write that failed, the layer has the tokens before its place:
    write again. No other client may write to the parts.
    """

    def __init__(self, spread: Spread, threads: Threads) -> None:
        self._spread = spread
        self._threads = threads

    def attention(
        self, q: Array, k: Array | None = None, v: Array | None = None, *, at: int | None = None,
        **keywords: Unpack[OfLayer],
    ) -> Any:  # fmt: skip
        """Attention of q (1,Hq,n,D) over a layer; k and v of new tokens, where given, are written first.

        As `Cache.attention`, with options and `attn_mask`, `alibi_slopes` and `sinks`; causality, the window, ALiBi and
        mask columns count positions in the whole cache. `with_meta` adds a list of `Part`. Dropout and
        causal_alignment top_left are refused. `timeout` holds for the whole call.
        """
        deadline = Deadline(keywords.pop("timeout", DEFAULT))
        return self._threads.run(self._spread.attention(q, k, v, at, {**keywords}), deadline)

    def append(self, k: Array, v: Array, *, layer: int = 0, at: int | None = None, layout: str = "bhsd") -> int:
        """Write k (Hk,n,D) and v of new tokens to a layer; return its length."""
        return self._threads.run(self._spread.append(k, v, layer, at, layout))

    def fork(self, length: int | None = None) -> ShardedCache:
        """Return a copy, of `length` tokens or of all, which shares memory until one of both is written."""
        return ShardedCache(self._threads.run(self._spread.fork(length)), Threads(self._threads.clients))

    def truncate(self, length: int) -> None:
        """Drop the tokens from `length` on, in every layer."""
        self._threads.run(self._spread.truncate(length))

    def renew(self) -> None:
        """Let the time to live of all parts begin anew; attention does so for the parts that it reads."""
        self._threads.run(self._spread.renew())

    def delete(self) -> None:
        """Free its memory at all servers. Nothing, where it is gone already."""
        self._threads.run(self._spread.delete())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with suppress(ConnectionFailedError):  # what a server that is gone has held is gone with it
                self.delete()
        finally:
            self._threads.close()


class AsyncShardedCache(_Lengths):
    """The asyncio twin of `ShardedCache`."""

    def __init__(self, spread: Spread, tasks: Tasks) -> None:
        self._spread = spread
        self._tasks = tasks

    async def attention(
        self, q: Array, k: Array | None = None, v: Array | None = None, *, at: int | None = None,
        **keywords: Unpack[OfLayer],
    ) -> Any:  # fmt: skip
        """See `ShardedCache.attention`."""
        deadline = Deadline(keywords.pop("timeout", DEFAULT))
        return await self._tasks.run(self._spread.attention(q, k, v, at, {**keywords}), deadline)

    async def append(self, k: Array, v: Array, *, layer: int = 0, at: int | None = None, layout: str = "bhsd") -> int:
        """See `ShardedCache.append`."""
        return await self._tasks.run(self._spread.append(k, v, layer, at, layout))

    async def fork(self, length: int | None = None) -> AsyncShardedCache:
        """See `ShardedCache.fork`."""
        return AsyncShardedCache(await self._tasks.run(self._spread.fork(length)), Tasks(self._tasks.clients))

    async def truncate(self, length: int) -> None:
        """See `ShardedCache.truncate`."""
        await self._tasks.run(self._spread.truncate(length))

    async def renew(self) -> None:
        """See `ShardedCache.renew`."""
        await self._tasks.run(self._spread.renew())

    async def delete(self) -> None:
        """See `ShardedCache.delete`."""
        await self._tasks.run(self._spread.delete())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        with suppress(ConnectionFailedError):
            await self.delete()


def _checked(clients: Any, kind: type) -> Any:
    if not isinstance(clients, Sequence) or not clients or not all(isinstance(c, kind) for c in clients):
        raise invalid("clients", f"must be a list of {kind.__name__}, one or more")
    return clients


def _drive(job: _Job) -> Any:
    for work in job.rounds():
        run(work, job.clients, job.sending)
    return job.result()


async def _drive_async(job: _Job) -> Any:
    for work in job.rounds():
        await run_async(work, job.clients, job.sending)
    return job.result()


class _Job:
    """One call of this module, as rounds of work to be done by the servers, one after the other."""

    def __init__(self, clients: Any, kind: type, path: str, keywords: dict[str, Any]) -> None:
        self.clients = _checked(clients, kind)
        forward = path == "/attention"
        _calls._refuse(keywords, _calls._BACKWARD_ONLY if forward else _calls._FORWARD_ONLY)
        timeout = keywords.pop("timeout", _calls.DEFAULT)
        timeout = clients[0]._timeout if timeout is _calls.DEFAULT else _seconds(timeout)
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._with_meta = keywords.pop("with_meta", False)
        parts = keywords.pop("parts", None)
        self.sending: dict[str, Any] = {
            name: keywords.pop(name) for name in ("priority", "request_id") if name in keywords
        }
        given = {name: keywords.pop(name, None) for name in INPUT_TENSORS}
        options = _calls.checked(AttentionOptions, keywords)
        self._problem = problem(given, options, "forward" if forward else "backward")
        self._steps = (merge.forward if forward else merge.backward)(
            self._problem, plan(self._problem, len(clients), parts)
        )
        self._names = options.grads if not forward else ("o", "lse") if options.return_lse else ("o",)
        self._parts: list[Part] = []
        self._found: dict[str, Any] = {}

    def rounds(self) -> Iterator[Work]:
        """The work of each round, when that of the one before is done."""
        retries = max(client._retries for client in self.clients)
        try:
            questions = next(self._steps)
            while True:
                work = Work(questions, len(self.clients), retries, self._deadline)
                yield work
                self._parts += [self._part(item) for item in work.items]
                questions = self._steps.send([item.question.answers(item.answer[0]) for item in work.items])
        except StopIteration as end:
            self._found = end.value

    def result(self) -> Any:
        answer = tuple(self._problem.answer(name, self._found[name]) for name in self._names)
        result = answer[0] if self._names == ("o",) else answer
        return (result, self._parts) if self._with_meta else result

    def _part(self, item: Item) -> Part:
        shard, meta = item.question.shard, replace(item.answer[1], retries=item.failures)
        queries, keys = ((at.start, at.stop) for at in (shard.queries, shard.keys))
        return Part(self.clients[item.server].url, item.question.path, queries, keys, shard.pairs, meta)
