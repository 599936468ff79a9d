"""Build the requests of the calls on KV caches, and parse the answers. This module does no I/O."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from flashpoint._calls.arrays import Array, pack, unpack
from flashpoint._calls.keywords import CacheSizes
from flashpoint._calls.service import (
    DEFAULT,
    Affinity,
    Answer,
    Call,
    HeldCache,
    forward,
    idempotent,
    is_gone,
    lookup,
    plain,
)
from flashpoint.errors import ProtocolError, invalid
from flashpoint_contract import wire
from flashpoint_contract.schemas import jsonwire
from flashpoint_contract.wording.hints import did_you_mean


class Described(NamedTuple):
    document: Mapping[str, Any]  # the description of a cache, from an answer
    affinity: Affinity


class Page(NamedTuple):
    """A page of the list of caches. `after` is the argument for the next page; None after the last one."""

    caches: list[Described]
    after: str | None


class AnyCache(HeldCache):
    """Base class of `Cache` and `AsyncCache`: the id, and the state from the latest answers."""

    def __init__(self, description: Described) -> None:
        described, self.affinity = description
        try:
            self.id: str = described["id"]
            self.layers: int = described["layers"]
            self.lengths: list[int] = list(described["lengths"])
            self.bytes: int = described["bytes"]
        except (KeyError, TypeError) as error:
            raise ProtocolError(f"the answer describes no cache: {error}") from None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r}, layers={self.layers}, length={self.length})"

    @property
    def length(self) -> int:
        """Return the number of tokens of the longest layer, from the latest answers. `lengths` has each layer's."""
        return max(self.lengths, default=0)

    @property
    def replica(self) -> str:
        """Return the X-Flashpoint-Replica value, by which a balancer routes calls to the server of this cache.

        Another client can use the cache: make that client with this value as `replica`, and pass the `id` in `caches`.
        """
        return self.affinity.replica

    def _hear(self, described: Mapping[str, Any]) -> None:
        other = AnyCache(Described(described, self.affinity))
        self.lengths, self.bytes = other.lengths, other.bytes


def not_copied(cache: object) -> TypeError:
    """Return the error for `copy.deepcopy` of an asyncio cache: only the server can copy a cache, by `fork`."""
    return TypeError(f"{type(cache).__name__} cannot be deep-copied, because the server must be asked: await fork()")


def create(shape: Mapping[str, Any], count: int = 1) -> Call[list[Described]]:
    """Return the call that makes caches and returns their descriptions."""
    options = dict(shape)
    if unknown := [name for name in options if name not in CacheSizes.__annotations__]:
        known = CacheSizes.__annotations__
        raise invalid(unknown[0], f"is not an option of a cache{did_you_mean(unknown[0], known)}")
    affinity = Affinity()
    if isinstance(beside := options.get("beside"), AnyCache):
        options["beside"], affinity = beside.id, beside.affinity
    return _post("/caches", {**options, "count": count}, affinity, _made(affinity), success=201)


def attend(
    cache: AnyCache, q: Array, k: Array | None, v: Array | None, at: int | None, keywords: Mapping[str, Any]
) -> Call[Any]:
    if "caches" in keywords:
        raise invalid("caches", "is not taken by a cache's own method: call the client's")
    return forward(q, k, v, {**keywords, "caches": [cache], "at": None if at is None else [at]})


def append(cache: AnyCache, k: Array, v: Array, layer: int, at: int | None, layout: str) -> Call[int]:
    """Return the call that writes new tokens to a layer and returns the new length of the layer."""
    packed = {"k": pack("k", k), "v": pack("v", v)}
    options = {"layer": layer, "layout": layout} | ({} if at is None else {"at": at})
    head = wire.build_head([(n, p.dtype, p.shape) for n, p in packed.items()], wire.encode_options(plain(options)))

    def read(document: Any) -> int:
        if type(length := document.get("length")) is not int:
            raise ProtocolError("the answer has no length")
        cache.lengths[layer] = length
        return length

    headers = {"Content-Type": wire.MEDIA_TYPE, "Accept": jsonwire.MEDIA_TYPE, **idempotent()}
    body = (memoryview(head), *(p.data for p in packed.values()))
    path = f"/caches/{cache.id}/append"
    return Call("POST", path, jsonwire.MEDIA_TYPE, headers, body, DEFAULT, read, affinity=cache.affinity)


def fork(caches: Sequence[AnyCache], lengths: Sequence[int] | None, free: Sequence[AnyCache]) -> Call[list[Described]]:
    """Return the call that copies `caches`, deletes `free` and returns the descriptions of the copies."""
    fields: dict[str, Any] = {"caches": [c.id for c in caches], "lengths": None if lengths is None else list(lengths)}
    affinity = caches[0].affinity if caches else Affinity()
    fields["free"] = [c.id for c in free]
    return _post("/caches/fork", fields, affinity, _made(affinity), success=201)


def fork_one(cache: AnyCache, length: int | None) -> Call[Described]:
    """Return the call that copies one cache and returns the description of the copy."""
    call: Call[Any] = fork([cache], None if length is None else [length], [])
    return replace(call, read=lambda document: call.read(document)[0])


def change(cache: AnyCache, what: str, fields: Mapping[str, Any]) -> Call[None]:
    """Return the call that truncates or renews a cache (`what`). The answer updates `lengths` and `bytes`."""
    return _post(f"/caches/{cache.id}/{what}", fields, cache.affinity, cache._hear)


def listed(after: str | None) -> Call[Page]:
    """Return the call for a page of the caller's caches; None asks for the first page."""
    affinity = Affinity()

    def read(document: Any) -> Page:
        made, following = document.get("caches"), document.get("next")
        if not isinstance(made, list) or not (following is None or isinstance(following, str)):
            raise ProtocolError("the answer is no list of caches")
        return Page([Described(one, affinity) for one in made], following)

    path = "/caches" if after is None else f"/caches?after={quote(after, safe='')}"
    return lookup(path, read, affinity=affinity)


def look(cache: AnyCache) -> Call[None]:
    return lookup(f"/caches/{cache.id}", cache._hear, affinity=cache.affinity)


def delete(cache: AnyCache) -> Call[None]:
    """Return the call that deletes a cache. It does nothing if the cache is gone already."""
    call = lookup(f"/caches/{cache.id}", _nothing, "DELETE", affinity=cache.affinity)
    return replace(call, expected="", success=204, ignored=is_gone)  # the answer has no body


def delete_many(caches: Sequence[AnyCache]) -> Call[None]:
    """Return the call that deletes all of several caches, or none of them."""
    fields = {"caches": [cache.id for cache in caches]}
    affinity = caches[0].affinity if caches else Affinity()
    return replace(_post("/caches/delete", fields, affinity, _nothing, success=204), expected="")


def tensors(cache: AnyCache, layer: int, like: Array | None) -> Call[tuple[Any, Any]]:
    kind = np.empty(0) if like is None else like

    def read(answer: Answer) -> tuple[Any, Any]:
        arrays = unpack(answer.buffer, {spec.name: spec for spec in answer.head.tensors}, kind)
        return arrays["k"], arrays["v"]

    headers = {"Accept": wire.MEDIA_TYPE}
    path = f"/caches/{cache.id}/tensors?layer={layer}"
    return Call("GET", path, wire.MEDIA_TYPE, headers, (), DEFAULT, read, affinity=cache.affinity)


def _made(affinity: Affinity) -> Callable[[Any], list[Described]]:
    def read(document: Any) -> list[Described]:
        descriptions = document.get("caches")
        if not isinstance(descriptions, list) or not descriptions:
            raise ProtocolError("the answer describes no caches")
        return [Described(one, affinity) for one in descriptions]

    return read


def _nothing(document: Any) -> None:
    """Ignore an answer without a body."""


def _post(
    path: str, fields: Mapping[str, Any], affinity: Affinity, read: Callable[[Any], Any], success: int = 200
) -> Call[Any]:
    media = jsonwire.MEDIA_TYPE
    headers = {"Accept": media, "Content-Type": media, **idempotent()}
    return Call("POST", path, media, headers, (memoryview(_document(fields)),), DEFAULT, read, success, True, affinity)


def _document(fields: Mapping[str, Any]) -> bytes:
    document = plain(dict(fields))
    for name, value in document.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise invalid(name, f"must be text, finite numbers or lists of them, not {value!r}") from None
    return json.dumps(document).encode()
