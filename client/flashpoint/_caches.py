"""KV caches that a server holds: the calls, without I/O, and the objects that both clients give."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Protocol, Self, TypedDict, Unpack, overload

import numpy as np

from flashpoint import jsonwire
from flashpoint._arrays import Array, pack, unpack
from flashpoint._attending import A
from flashpoint._calls import DEFAULT, Affinity, Answer, Call, HeldCache, Layer, OfLayer, forward, idempotent
from flashpoint.errors import CacheError, ProtocolError, invalid
from flashpoint.meta import Meta
from flashpoint_contract import wire

_GONE = ("cache_not_found", "cache_lost")


class CacheSizes(TypedDict, total=False):
    """Keywords of `cache`. Sizes are one for all layers, or a list with one for each.

    `value_dim`: as `head_dim` where it is not given. `dtype`: float32, bfloat16 or float16, that of q, k and v; or
    float8_e4m3fn or int8, with a scale for each token and head, which takes and gives any of the others.
    `max_length`: most tokens, whose memory is taken at once. `keep`: tokens at the end of a layer that stay, those
    before may be freed. `ttl_s`: seconds after its last use that it is kept. `beside`: a cache on whose engine it is
    made, as a call over both needs.
    """

    layers: int
    kv_heads: int | Sequence[int]
    head_dim: int | Sequence[int]
    value_dim: int | Sequence[int] | None
    dtype: str
    max_length: int | None
    keep: int | Sequence[int | None] | None
    ttl_s: float | None
    beside: AnyCache | str | None


class Described(NamedTuple):
    """The description of a cache from an answer, and the replica that holds it."""

    document: Mapping[str, Any]
    affinity: Affinity


class AnyCache(HeldCache):
    """Base of both kinds of cache: the id, and the lengths from the latest answers."""

    def __init__(self, found: Described) -> None:
        described, self.affinity = found
        try:
            self.id: str = described["id"]
            self.layers: int = described["layers"]
            self.lengths: list[int] = list(described["lengths"])
            self.bytes: int = described["bytes"]
        except (KeyError, TypeError) as error:
            raise ProtocolError(f"the answer describes no cache: {error}") from None

    @property
    def length(self) -> int:
        """Tokens of its longest layer, as the last answers told. `lengths` has every layer's."""
        return max(self.lengths, default=0)

    @property
    def replica(self) -> str:
        """Return the X-Flashpoint-Replica value by which a balancer routes; another client needs it with the `id`."""
        return self.affinity.replica

    def _hear(self, described: Mapping[str, Any]) -> None:
        other = AnyCache(Described(described, self.affinity))
        self.lengths, self.bytes = other.lengths, other.bytes


class _Client(Protocol):
    def _call(self, call: Call, /) -> Any: ...


class _AsyncClient(Protocol):
    async def _call(self, call: Call, /) -> Any: ...


class Cache(AnyCache):
    """A KV cache at the client's server, deleted at the end of a `with`. Methods raise `flashpoint.errors`.

    A call that its engine no longer knows raises CacheError, whose `code` is cache_lost once it has expired or its
    engine has restarted: make it again, and send its tokens again.
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
        """Attention of q over `layer` of this cache; k and v of new tokens, where given, are written first.

        They are written at the end, or `at` a position, and later tokens of the layer are dropped. Keywords and result:
        as `Client.attention`.
        """
        return self._client._call(attend(self, q, k, v, at, keywords))

    def append(self, k: Array, v: Array, *, layer: int = 0, at: int | None = None, layout: str = "bhsd") -> int:
        """Write k and v of new tokens to a layer; return its length."""
        length: int = self._client._call(append(self, k, v, layer, at, layout))
        return length

    def fork(self, length: int | None = None) -> Cache:
        """Return a copy, of `length` tokens or of all, which shares memory until one of both is written."""
        return Cache(self._client, self._client._call(fork([self], None if length is None else [length], []))[0])

    def truncate(self, length: int) -> None:
        """Drop the tokens from `length` on, in every layer."""
        self._hear(self._client._call(change(self, "truncate", {"length": length})))

    def renew(self) -> None:
        """Let the time to live begin anew, as every call with the cache does."""
        self._hear(self._client._call(change(self, "renew", {})))

    def refresh(self) -> None:
        """Ask the server for `lengths` and `bytes`, which another client may have changed."""
        self._hear(self._client._call(look(self)))

    def tensors(self, layer: int = 0, like: Array | None = None) -> tuple[Any, Any]:
        """Return k (1,Hk,S,D) and v (1,Hk,S,Dv) of a layer, on `like`'s device where it is a torch tensor.

        They are in float32 for a cache in 8 bits.
        """
        found: tuple[Any, Any] = self._client._call(tensors(self, layer, like))
        return found

    def delete(self) -> None:
        """Free its memory. Nothing, where it is gone already."""
        with suppress(CacheError):
            self._client._call(delete(self))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.delete()


class AsyncCache(AnyCache):
    """The asyncio twin of `Cache`."""

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
        """See `Cache.attention`."""
        return await self._client._call(attend(self, q, k, v, at, keywords))

    async def append(self, k: Array, v: Array, *, layer: int = 0, at: int | None = None, layout: str = "bhsd") -> int:
        """See `Cache.append`."""
        length: int = await self._client._call(append(self, k, v, layer, at, layout))
        return length

    async def fork(self, length: int | None = None) -> AsyncCache:
        """See `Cache.fork`."""
        made = await self._client._call(fork([self], None if length is None else [length], []))
        return AsyncCache(self._client, made[0])

    async def truncate(self, length: int) -> None:
        """See `Cache.truncate`."""
        self._hear(await self._client._call(change(self, "truncate", {"length": length})))

    async def renew(self) -> None:
        """See `Cache.renew`."""
        self._hear(await self._client._call(change(self, "renew", {})))

    async def refresh(self) -> None:
        """See `Cache.refresh`."""
        self._hear(await self._client._call(look(self)))

    async def tensors(self, layer: int = 0, like: Array | None = None) -> tuple[Any, Any]:
        """See `Cache.tensors`."""
        found: tuple[Any, Any] = await self._client._call(tensors(self, layer, like))
        return found

    async def delete(self) -> None:
        """See `Cache.delete`."""
        with suppress(CacheError):
            await self._client._call(delete(self))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.delete()


def create(shape: Mapping[str, Any], count: int = 1) -> Call:
    """The call for the descriptions of new caches."""
    asked = {name: list(value) if isinstance(value, tuple) else value for name, value in shape.items()}
    if unknown := [name for name in asked if name not in CacheSizes.__annotations__]:
        raise invalid(unknown[0], "is not an option of a cache")
    affinity = Affinity()
    if isinstance(beside := asked.get("beside"), AnyCache):
        asked["beside"], affinity = beside.id, beside.affinity
    return _asks("POST", "/caches", {**asked, "count": count}, affinity, _made(affinity), success=201)


def attend(
    cache: AnyCache, q: Array, k: Array | None, v: Array | None, at: int | None, keywords: Mapping[str, Any]
) -> Call:
    """The call for attention over one cache."""
    if "caches" in keywords:
        raise invalid("caches", "is not taken by a cache's own method: call the client's")
    return forward(q, k, v, {**keywords, "caches": [cache], "at": None if at is None else [at]})


def append(cache: AnyCache, k: Array, v: Array, layer: int, at: int | None, layout: str) -> Call:
    """The call for a layer's length with new tokens."""
    packed = {"k": pack("k", k), "v": pack("v", v)}
    options = {"layer": layer, "layout": layout} | ({} if at is None else {"at": at})
    head = wire.build_head([(n, p.dtype, p.shape) for n, p in packed.items()], wire.encode_options(options))

    def read(document: Any) -> int:
        if type(length := document.get("length")) is not int:
            raise ProtocolError("the answer has no length")
        cache.lengths[layer] = length
        return length

    headers = {"Content-Type": wire.MEDIA_TYPE, "Accept": jsonwire.MEDIA_TYPE, **idempotent()}
    body = (memoryview(head), *(p.data for p in packed.values()))
    path = f"/caches/{cache.id}/append"
    return Call("POST", path, jsonwire.MEDIA_TYPE, headers, body, DEFAULT, read, affinity=cache.affinity)


def fork(caches: Sequence[AnyCache], lengths: Sequence[int] | None, free: Sequence[AnyCache]) -> Call:
    """The call for the descriptions of copies."""
    asked: dict[str, Any] = {"caches": [c.id for c in caches], "lengths": None if lengths is None else list(lengths)}
    affinity = caches[0].affinity if caches else Affinity()
    asked["free"] = [c.id for c in free]
    return _asks("POST", "/caches/fork", asked, affinity, _made(affinity), success=201)


def change(cache: AnyCache, what: str, asked: Mapping[str, Any]) -> Call:
    """The call for the description of a cache that is truncated or renewed."""
    return _asks("POST", f"/caches/{cache.id}/{what}", asked, cache.affinity, lambda document: document)


def look(cache: AnyCache) -> Call:
    """The call for the description of a cache."""
    return _asks("GET", f"/caches/{cache.id}", None, cache.affinity, lambda document: document)


def delete(cache: AnyCache) -> Call:
    """The call that frees a cache."""
    call = _asks("DELETE", f"/caches/{cache.id}", None, cache.affinity, lambda document: None, success=204)
    return replace(call, expected="")  # there is no body


def delete_many(caches: Sequence[AnyCache]) -> Call:
    """The call that frees several caches, all or none."""
    asked = {"caches": [cache.id for cache in caches]}
    affinity = caches[0].affinity if caches else Affinity()
    call = _asks("POST", "/caches/delete", asked, affinity, lambda document: None, success=204)
    return replace(call, expected="")


def tensors(cache: AnyCache, layer: int, like: Array | None) -> Call:
    """The call for k and v of a layer."""
    kind = np.empty(0) if like is None else like

    def read(answer: Answer) -> tuple[Any, Any]:
        found = unpack(answer.buffer, {spec.name: spec for spec in answer.head.tensors}, kind)
        return found["k"], found["v"]

    headers = {"Accept": wire.MEDIA_TYPE}
    path = f"/caches/{cache.id}/tensors?layer={layer}"
    return Call("GET", path, wire.MEDIA_TYPE, headers, (), DEFAULT, read, affinity=cache.affinity)


def _made(affinity: Affinity) -> Callable[[Any], list[Described]]:
    def read(document: Any) -> list[Described]:
        found = document.get("caches")
        if not isinstance(found, list) or not found:
            raise ProtocolError("the answer describes no caches")
        return [Described(one, affinity) for one in found]

    return read


def _asks(
    method: str, path: str, asked: Mapping[str, Any] | None, affinity: Affinity, read: Callable[[Any], Any],
    success: int = 200,
) -> Call:  # fmt: skip
    headers, body = {"Accept": jsonwire.MEDIA_TYPE}, b"" if asked is None else json.dumps(asked).encode()
    if asked is not None:
        headers |= {"Content-Type": jsonwire.MEDIA_TYPE, **idempotent()}
    parts = (memoryview(body),) if body else ()
    return Call(method, path, jsonwire.MEDIA_TYPE, headers, parts, DEFAULT, read, success=success, affinity=affinity)
