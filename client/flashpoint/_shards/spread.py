"""A cache over several servers: where its tokens are, and the calls of each operation. This module does no I/O.

Part p, a cache on server p modulo the number of servers, holds the tokens [p·span, (p + 1)·span) of every layer. An
operation is a generator: it yields rounds of calls, and receives their results. Every write contains its position
(`at`), so that it can be repeated. If a write was not answered, the part may hold wrong tokens from that position on:
the next operation on the layer first cuts them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from flashpoint._calls import caches as cache_calls
from flashpoint._calls import service
from flashpoint._calls.arrays import Array, to_like, to_numpy
from flashpoint._calls.caches import AnyCache
from flashpoint._calls.keywords import CacheSizes
from flashpoint._calls.service import Call
from flashpoint._shards.problem import Numbers
from flashpoint._shards.spans import Queries, SpanQuestion, merged
from flashpoint.errors import FlashpointError, ProtocolError, invalid
from flashpoint.meta import Meta

SPAN = 1 << 16  # default number of tokens of a part
NOT_SPREAD = {
    "max_length": "its memory is taken as tokens come",
    "keep": "the tokens of a window need no second server",
    "beside": "its parts are where they are",
}
T = TypeVar("T")


class Part(NamedTuple):
    """One server's part of a call.

    Args:
        url: Address of the server.
        path: `/attention` or `/attention/grad`.
        queries: Rows of q, (first, end); in `thd` the packed rows.
        keys: Rows of k, (first, end), likewise; positions in a cache.
        pairs: Number of (query, key) pairs over all heads and sequences: the work.
        meta: Metadata of the server's answer.
    """

    url: str
    path: str
    queries: tuple[int, int]
    keys: tuple[int, int]
    pairs: int
    meta: Meta


class PartCall(NamedTuple):
    """A call, and the number of the server that gets it."""

    server: int
    call: Call[Any]


@dataclass(frozen=True)
class Round:
    """Calls to make concurrently. The first error ends all calls and is raised. With `whole`, all calls finish, and the
    result of a call that failed is its error.
    """

    asks: Sequence[PartCall]
    whole: bool = False


Steps: TypeAlias = Generator[Round, list[Any], T]


class Spread:
    """A cache that is spread over servers: its parts, one for each `span` tokens, and the length of each layer."""

    def __init__(self, urls: Sequence[str], options: Mapping[str, Any]) -> None:
        shape = service.plain(dict(options))
        span = shape.pop("span", SPAN)
        if type(span) is not int or span < 1:
            raise invalid("span", "must be a number of tokens, 1 or more")
        for name in shape:
            if name in NOT_SPREAD:
                raise invalid(name, f"{NOT_SPREAD[name]}: not for a cache of several servers")
            if name not in CacheSizes.__annotations__:
                raise invalid(name, "is not an option of a cache")
        layers = shape.get("layers", 1)
        if type(layers) is not int or layers < 1:
            raise invalid("layers", "must be a number of layers, 1 or more")
        self.urls, self.span, self._shape = urls, span, shape
        self.parts: list[AnyCache] = []
        self.lengths = [0] * layers
        self._unsure: set[tuple[int, int]] = set()  # (part, layer) of each write that was not answered
        self._dtype = np.dtype(np.float32)  # dtype of the tokens written last

    def _to(self, part: int, call: Call[Any]) -> PartCall:
        return PartCall(part % len(self.urls), call)

    def grow(self, tokens: int) -> Steps[None]:
        """Make the parts that are missing for a length of `tokens`. The cache then has at least one part."""
        missing = range(len(self.parts), max(1, -(-tokens // self.span)))
        if missing:
            self.parts += yield from self._make({part: cache_calls.create(self._shape) for part in missing})

    def _make(self, calls: Mapping[int, Call[Any]]) -> Steps[list[AnyCache]]:
        """Make the caches of parts. After an error, delete the caches that were made, and raise the error."""
        results = yield Round([self._to(part, call) for part, call in calls.items()], whole=True)
        by_part = dict(zip(calls, results, strict=True))
        made = {part: AnyCache(result[0]) for part, result in by_part.items() if not _is_error(result)}
        if len(made) < len(results):
            yield from self._free(made.items())
            raise next(filter(_is_error, results))
        return list(made.values())

    def _tokens_of(self, part: int, layer: int) -> int:
        return min(max(0, self.lengths[layer] - part * self.span), self.span)

    def _mend(self, layer: int) -> Steps[None]:
        """Remove the tokens that unanswered writes may have left in a layer."""
        torn = [part for part, of in self._unsure if of == layer]
        if torn:
            yield Round([self._cut(part, layer, self._tokens_of(part, layer)) for part in torn])
            self._unsure -= {(part, layer) for part in torn}

    def _cut(self, part: int, layer: int, length: int) -> PartCall:
        k, v = (np.zeros((heads, 0, dim), self._dtype) for heads, dim in self._sizes(layer))
        return self._to(part, cache_calls.append(self.parts[part], k, v, layer, length, "bhsd"))

    def _sizes(self, layer: int) -> list[tuple[int, int]]:
        """Return (heads, dimension) of k, and of v."""

        def of(name: str, default: Any) -> int:
            value = default if self._shape.get(name) is None else self._shape[name]
            return int(value if isinstance(value, int) else value[layer])

        heads, dim = of("kv_heads", 8), of("head_dim", 64)
        return [(heads, dim), (heads, of("value_dim", dim))]

    def _places(self, layer: int, at: int | None) -> int:
        if type(layer) is not int or not 0 <= layer < len(self.lengths):
            raise invalid("layer", f"must be an integer from 0 to {len(self.lengths) - 1}")
        length = self.lengths[layer]
        if at is None:
            return length
        if type(at) is not int or not 0 <= at <= length:
            raise invalid("at", f"must be a position from 0 to {length}, the layer's length")
        return at

    def append(self, k: Array, v: Array, layer: int, at: int | None, layout: str) -> Steps[int]:
        """Write the keys and values of new tokens. Return the layer's length."""
        place = self._places(layer, at)
        tokens = _Tokens.of(k, v, layout)
        yield from self._mend(layer)
        self._dtype = tokens.k.dtype
        yield from self._write(tokens, layer, place)
        return self.lengths[layer]

    def _write(self, tokens: _Tokens, layer: int, place: int) -> Steps[None]:
        """Write tokens from position `place` on to their parts, and remove all later tokens."""
        behind, span = place + tokens.count, self.span
        yield from self.grow(behind)
        asks = {}
        for part, cache in enumerate(self.parts):
            first = part * span
            start, stop = max(place, first), min(behind, first + span)
            if start < stop:
                k, v = (t[:, start - place : stop - place] for t in (tokens.k, tokens.v))
                asks[part] = self._to(part, cache_calls.append(cache, k, v, layer, start - first, "bhsd"))
            elif self._tokens_of(part, layer) > max(0, behind - first):
                asks[part] = self._cut(part, layer, max(0, behind - first))
        yield from self._writing(layer, place, asks)
        self.lengths[layer] = behind

    def _writing(
        self, layer: int, place: int, asks: Mapping[int, PartCall], reading: Sequence[PartCall] = ()
    ) -> Steps[list[Any]]:
        """Make the calls `asks`, which write from `place` on, and `reading`, which only read. Return all results."""
        torn = {(part, layer) for part in asks}
        self._unsure |= torn
        self.lengths[layer] = place
        results = yield Round([*asks.values(), *reading])
        self._unsure -= torn
        return results

    def attention(
        self, q: Array, k: Array | None, v: Array | None, at: int | None, keywords: dict[str, Any]
    ) -> Steps[Any]:
        """Return what `Cache.attention` returns: o or (o, lse). With `with_meta`, return (that, list of `Part`)."""
        service._refuse(keywords, service._BACKWARD_ONLY)
        with_meta, layer = keywords.pop("with_meta", False), keywords.pop("layer", 0)
        sending: dict[str, Any] = {name: keywords.pop(name) for name in ("priority", "request_id") if name in keywords}
        call = Queries.of(q, keywords)
        place, tokens = self._places(layer, at), _Tokens.beside(call, k, v)
        if tokens is None and at is not None:
            raise invalid("at", "needs k and v: it says where they are written")
        yield from self._mend(layer)
        self._dtype = self._dtype if tokens is None else tokens.k.dtype
        total = self.lengths[layer] if tokens is None else place + tokens.count
        alone = tokens is not None and self._fits(layer, place, total)
        if tokens is not None and not alone:
            yield from self._write(tokens, layer, place)
        questions = list(call.questions(total, self._spans(total)))
        asks = [self._ask(question, layer, sending) for question in questions]
        if tokens is not None and alone:
            last = questions[-1].place
            writing = {last: self._ask(questions[-1], layer, sending, tokens, place - last * self.span)}
            first, *rest = yield from self._writing(layer, place, writing, asks[:-1])
            self.lengths[layer] = total
            results = [*rest, first]
        else:
            results = (yield Round(asks)) if asks else []
        answered = [(question, *answer) for question, (answer, _) in zip(questions, results, strict=True)]
        o, lse = merged(call, answered, self._sizes(layer)[1][1])
        parts = [self._part(question, meta) for question, (_, meta) in zip(questions, results, strict=True)]
        answers = (to_like(o, q), to_like(lse, q)) if call.options.return_lse else to_like(o, q)
        return (answers, parts) if with_meta else answers

    def _fits(self, layer: int, place: int, behind: int) -> bool:
        """Return whether tokens [place, behind) fit in one existing part, and no later part has tokens to remove."""
        first = place // self.span * self.span
        return place < behind <= first + self.span >= self.lengths[layer] and first < len(self.parts) * self.span

    def _spans(self, total: int) -> list[tuple[int, int]]:
        return [(first, min(first + self.span, total)) for first in range(0, total, self.span)]

    def _ask(
        self, question: SpanQuestion, layer: int, sending: Mapping[str, Any], tokens: _Tokens | None = None, at: int = 0
    ) -> PartCall:
        caches = [self.parts[question.place]]
        given = {**question.keywords, **sending, "caches": caches, "layer": layer, "with_meta": True}
        k = v = None
        if tokens is not None:
            k, v = tokens.in_layout(question.call.options.layout)
            given["at"] = [at]
        return self._to(question.place, service.forward(question.q, k, v, given))

    def _part(self, question: SpanQuestion, meta: Meta) -> Part:
        """Return the `Part` of an answer. Raises ProtocolError if the part's length is wrong."""
        url, (first, behind) = self.urls[question.place % len(self.urls)], question.keys
        if meta.lengths != (behind - first,):
            tokens = f"{meta.lengths} tokens, not {behind - first}"
            raise ProtocolError(f"{url}: the cache has {tokens}: another client wrote")
        return Part(url, "/attention", (0, question.rows), question.keys, question.pairs, meta)

    def truncate(self, length: int) -> Steps[None]:
        """Drop the tokens from `length` on, in every layer."""
        parts = self._parts_for(length)
        place = length - (parts - 1) * self.span
        if any(self._tokens_of(parts - 1, layer) > place for layer in range(len(self.lengths))):
            cut = cache_calls.change(self.parts[parts - 1], "truncate", {"length": place})
            yield Round([self._to(parts - 1, cut)])
        self.lengths = [min(before, length) for before in self.lengths]
        self._unsure = {(part, layer) for part, layer in self._unsure if part < parts}
        gone, self.parts = self.parts[parts:], self.parts[:parts]
        if gone:
            yield from self._free(enumerate(gone, parts))

    def _parts_for(self, length: int) -> int:
        """Return the number of parts for `length` tokens, at least one. Raises InvalidInputError."""
        if type(length) is not int or not 0 <= length <= max(self.lengths):
            raise invalid("length", f"must be from 0 to {max(self.lengths)}, the length of the longest layer")
        return max(1, -(-length // self.span))

    def fork(self, length: int | None) -> Steps[Spread]:
        """Return a copy of the first `length` tokens; None copies all."""
        longest = max(self.lengths)
        end = longest if length is None else length
        sources = self.parts[: self._parts_for(end)]
        for layer in {layer for _, layer in self._unsure}:
            yield from self._mend(layer)
        ends = [min(self.span, end - part * self.span) for part in range(len(sources))]
        calls = [cache_calls.fork([cache], [tokens], []) for cache, tokens in zip(sources, ends, strict=True)]
        copy = Spread(self.urls, {**self._shape, "span": self.span})
        copy.parts = yield from self._make(dict(enumerate(calls)))
        copy.lengths = [min(tokens, end) for tokens in self.lengths]
        return copy

    def renew(self) -> Steps[None]:
        """Start the time to live of every part again."""
        yield Round([self._to(n, cache_calls.change(cache, "renew", {})) for n, cache in enumerate(self.parts)])

    def delete(self) -> Steps[None]:
        """Delete every part. Raises the error of a server that could not be reached."""
        yield from self._free(enumerate(self.parts))

    def _free(self, parts: Iterable[tuple[int, AnyCache]]) -> Steps[None]:
        """Delete caches on all servers. Afterwards raise the first error; a cache that is gone already is no error."""
        calls = [self._to(part, cache_calls.delete(cache)) for part, cache in parts]
        for error in filter(_is_error, (yield Round(calls, whole=True))):
            raise error


@dataclass(frozen=True)
class _Tokens:
    """The keys (Hk,S,D) and values (Hk,S,Dv) of new tokens."""

    k: Numbers
    v: Numbers

    @classmethod
    def of(cls, k: Array, v: Array, layout: str) -> _Tokens:
        if layout not in ("bhsd", "bshd"):
            raise invalid("layout", "must be bhsd or bshd")
        tensors = []
        for name, given in (("k", k), ("v", v)):
            t = to_numpy(name, given)
            t = t[0] if t.ndim == 4 and t.shape[0] == 1 else t
            if t.ndim != 3:
                raise invalid(name, f"has shape {list(t.shape)}, and must be (1,H,S,D) or (H,S,D) of one sequence")
            tensors.append(t if layout == "bhsd" else t.swapaxes(0, 1))
        if tensors[0].shape[:2] != tensors[1].shape[:2]:
            raise invalid("v", f"has {list(tensors[1].shape)}, and k has {list(tensors[0].shape)}")
        return cls(*tensors)

    @classmethod
    def beside(cls, call: Queries, k: Array | None, v: Array | None) -> _Tokens | None:
        if k is None and v is None:
            return None
        if k is None or v is None:
            raise invalid("k" if k is None else "v", "missing: send k and v of new tokens together")
        tokens = cls.of(k, v, call.options.layout)
        if tokens.count != call.count:
            raise invalid("k", f"has {tokens.count} tokens, and q has {call.count}")
        return tokens

    @property
    def count(self) -> int:
        return int(self.k.shape[1])

    def in_layout(self, layout: str) -> tuple[Numbers, Numbers]:
        """Return k and v with four dimensions, in `layout`."""
        k, v = (t[None] if layout == "bhsd" else t[None].swapaxes(1, 2) for t in (self.k, self.v))
        return k, v


def _is_error(result: object) -> bool:
    return isinstance(result, FlashpointError)
