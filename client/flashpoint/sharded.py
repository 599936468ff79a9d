"""Compute one attention on several servers, for sequences that are too long or too slow on one device.

    clients = [flashpoint.Client(url) for url in urls]
    o = flashpoint.sharded.attention(clients, q, k, v, causal=True)
    dq, dk, dv = flashpoint.sharded.attention_grad(clients, do, q, k, v, causal=True)

    with flashpoint.sharded.cache(clients, layers=12, kv_heads=8, head_dim=64) as cache:  # for a long context
        o = cache.attention(q, k, v, layer=0, causal=True)

Queries and keys are cut into pieces of nearly equal work, one for each server. The answers are merged exactly, by their
log-sum-exp. If a server is full, stopping, gone or late, another server gets its piece. The call returns the whole
answer or raises an error. An error, a deadline or a cancellation ends all pieces. `flashpoint.torch.attention` also
takes a list of clients.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

from flashpoint._calls import service
from flashpoint._calls.arrays import Array
from flashpoint._calls.keywords import ShardedBackward, ShardedForward, SpreadSizes, call
from flashpoint._client.async_client import AsyncClient
from flashpoint._client.client import Client
from flashpoint._client.settings import seconds
from flashpoint._shards import merge
from flashpoint._shards.caches import AsyncShardedCache, ShardedCache
from flashpoint._shards.plan import plan
from flashpoint._shards.problem import problem
from flashpoint._shards.rounds import Tasks, Threads
from flashpoint._shards.run import run, run_async
from flashpoint._shards.spread import Part, Spread
from flashpoint._shards.work import Item, Work
from flashpoint.errors import invalid
from flashpoint_contract.schemas.options import AttentionOptions
from flashpoint_contract.tensors import INPUT_TENSORS
from flashpoint_contract.wording.docstrings import documented, twin_of

__all__ = [
    "AsyncShardedCache", "Part", "ShardedCache", "async_attention", "async_attention_grad", "async_cache", "attention",
    "attention_grad", "cache",
]  # fmt: skip

_call = partial(
    documented,
    raises="FlashpointError: InvalidInputError, or an error of a server that no other server could make good.",
)


@_call
def attention(clients: Sequence[Client], q: Array, k: Array, v: Array, **keywords: Unpack[ShardedForward]) -> Any:
    """Return attention as `Client.attention` does, computed by the servers of all `clients`.

    The shapes, dtypes, options and answers are the same. Dropout and block masks are refused, because they count
    positions in the whole sequence. If q is float16 or bfloat16, each part's o is rounded to that dtype, and the merged
    o again: send float32 to round only once. For float64, keys are cut only if `parts` requests it: the merge uses each
    part's lse, which is float32.

    Args:
        clients: Clients of the servers, one or more. The first client's own timeout is the default for the whole call.

    Returns:
        As `Client.attention`: o (B, Hq, Sq, Dv), or (o, lse). With `with_meta` (that, list of `Part`).
    """
    return _drive(_Job(clients, Client, "/attention", {"q": q, "k": k, "v": v, **keywords}))


@_call
def attention_grad(
    clients: Sequence[Client], do: Array, q: Array, k: Array, v: Array, **keywords: Unpack[ShardedBackward]
) -> Any:
    """Return the gradients of `attention` as `Client.attention_grad` does, computed by the servers of all `clients`.

    If keys are cut, or there are sinks, each server gets o and lse of the whole problem. If you do not pass them, they
    are computed first.

    Args:
        clients: Clients of the servers, one or more. The first client's own timeout is the default for the whole call.

    Returns:
        (dq, dk, dv), or one tensor for each name in `grads`, in that order. With `with_meta` (that, list of `Part`).
    """
    return _drive(_Job(clients, Client, "/attention/grad", {"do": do, "q": q, "k": k, "v": v, **keywords}))


@twin_of(attention)
async def async_attention(
    clients: Sequence[AsyncClient], q: Array, k: Array, v: Array, **keywords: Unpack[ShardedForward]
) -> Any:
    """Return attention as `Client.attention` does, computed by the servers of all `clients`."""
    return await _drive_async(_Job(clients, AsyncClient, "/attention", {"q": q, "k": k, "v": v, **keywords}))


@twin_of(attention_grad)
async def async_attention_grad(
    clients: Sequence[AsyncClient], do: Array, q: Array, k: Array, v: Array, **keywords: Unpack[ShardedBackward]
) -> Any:
    """Return the gradients of `attention` as `Client.attention_grad` does, computed by the servers of all `clients`."""
    tensors = {"do": do, "q": q, "k": k, "v": v}
    return await _drive_async(_Job(clients, AsyncClient, "/attention/grad", {**tensors, **keywords}))


@call
def cache(clients: Sequence[Client], **shape: Unpack[SpreadSizes]) -> ShardedCache:
    """Make a KV cache of one sequence, whose tokens are spread over the servers of all `clients`.

    With n servers, tokens [p·span, (p + 1)·span), for p = 0, 1, …, are on server p modulo n. Each such span is a cache
    of its own, made when its first token is written. Each server attends to its own tokens, and the answers are merged
    by their log-sum-exp. The end of a `with` deletes the cache. `clients` has one client or more.
    """
    spread = Spread([client.url for client in _checked(clients, Client)], shape)
    threads = Threads(clients)
    threads.run(spread.grow(0))
    return ShardedCache(spread, threads)


@twin_of(cache)
async def async_cache(clients: Sequence[AsyncClient], **shape: Unpack[SpreadSizes]) -> AsyncShardedCache:
    """Make a KV cache of one sequence, whose tokens are spread over the servers of all `clients`."""
    spread = Spread([client.url for client in _checked(clients, AsyncClient)], shape)
    tasks = Tasks(clients)
    await tasks.run(spread.grow(0))
    return AsyncShardedCache(spread, tasks)


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
    """One call of `attention` or `attention_grad`. `rounds` yields its work for the servers, round by round."""

    def __init__(self, clients: Any, kind: type, path: str, keywords: dict[str, Any]) -> None:
        self.clients = _checked(clients, kind)
        forward = path == "/attention"
        service._refuse(keywords, service._BACKWARD_ONLY if forward else service._FORWARD_ONLY)
        timeout = keywords.pop("timeout", service.DEFAULT)
        timeout = clients[0]._timeout if timeout is service.DEFAULT else seconds(timeout)
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._with_meta = keywords.pop("with_meta", False)
        parts = keywords.pop("parts", None)
        self.sending: dict[str, Any] = {
            name: keywords.pop(name) for name in ("priority", "request_id") if name in keywords
        }
        given = {name: keywords.pop(name, None) for name in INPUT_TENSORS}
        options = service.checked(AttentionOptions, keywords)
        self._problem = problem(given, options, "forward" if forward else "backward")
        self._steps = (merge.forward if forward else merge.backward)(
            self._problem, plan(self._problem, len(clients), parts)
        )
        self._names = options.grads if not forward else ("o", "lse") if options.return_lse else ("o",)
        self._parts: list[Part] = []
        self._found: dict[str, Any] = {}

    def rounds(self) -> Iterator[Work]:
        """Yield the work of each round. Before it asks for the next round, the caller must finish this one (`run`)."""
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
