"""One attention over several servers, merged exactly: for what is longer than one device, or too long to wait for.

    clients = [flashpoint.Client(url) for url in urls]
    o = flashpoint.sharded.attention(clients, q, k, v, causal=True)
    dq, dk, dv = flashpoint.sharded.attention_grad(clients, do, q, k, v, causal=True)

Queries and keys are cut into pieces of equal work, one a server; the parts of a query's answer are merged by their
log-sum-exp. A piece whose server was full, stopping or gone goes to another, and is asked of another as well where its
server has said nothing for half of the time. There is a whole answer or an error, and an error, a deadline or a
cancellation ends every piece. `flashpoint.torch.attention` takes a list of clients too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

from flashpoint import _calls
from flashpoint._arrays import Array
from flashpoint._calls import Backward, Forward
from flashpoint._client import AsyncClient, Client, _seconds
from flashpoint._shards import merge
from flashpoint._shards.plan import plan
from flashpoint._shards.problem import problem
from flashpoint._shards.run import run, run_async
from flashpoint._shards.work import Item, Work
from flashpoint.errors import invalid
from flashpoint.meta import Meta
from flashpoint.options import AttentionOptions
from flashpoint_contract.tensors import BACKWARD_TENSORS

__all__ = ["Part", "async_attention", "async_attention_grad", "attention", "attention_grad"]


@dataclass(frozen=True)
class Part:
    """What one server answered: its URL, the queries and keys [first, behind the last), and how it went.

    `path` is `/attention` or `/attention/grad`, `pairs` the (query, key) pairs over all heads and sequences: the work.
    Queries and keys are counted in the tensors' own rows (`thd`: in the packed ones).
    """

    url: str
    path: str
    queries: tuple[int, int]
    keys: tuple[int, int]
    pairs: int
    meta: Meta


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
        if not isinstance(clients, Sequence) or not clients or not all(isinstance(c, kind) for c in clients):
            raise invalid("clients", f"must be a list of {kind.__name__}, one or more")
        self.clients = clients
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
        given = {name: keywords.pop(name, None) for name in BACKWARD_TENSORS}
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
