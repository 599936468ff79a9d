"""A stored cache, the caller of an operation on it (`Terms`), and the reasons why an operation fails."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from flashpoint_contract.caches import CHUNK
from flashpoint_server.engine.caches.chunks import Change, Chunk, Track
from flashpoint_server.engine.state.ledger import Owned
from flashpoint_server.ipc.bodies import CacheShape

KEYS = 64  # maximum number of recent idempotency keys that a cache stores

# Bytes by which a cache, and each of its layers, counts toward memory limits, in addition to its tokens.
CACHE_BYTES, LAYER_BYTES = 1024, 512

STALE = "its idempotency key is older than the cache's last write: this is a late copy of an earlier call"


class Terms(NamedTuple):
    """The caller of an operation. `quota` is the maximum number of bytes that `owner` may store; None means no limit.

    `most` is the maximum number of its caches and saved forwards. `key` is the idempotency key, "" for none, and
    `payload` the digest of the call that it names.
    """

    owner: str
    quota: int | None = None
    key: str = ""
    payload: bytes = b""
    most: int | None = None


@dataclass(eq=False, kw_only=True)
class StoredCache(Owned):
    """A cache: the keys and values of one sequence, with a track for each layer.

    `keep` is, for each layer, the number of last tokens that are not dropped; None keeps all. `last` is the idempotency
    key of the last write, or "". `keys` are the recent idempotency keys, each with the digest of its write.
    """

    kind: ClassVar[str] = "cache"
    word: ClassVar[str] = "cache"
    shape: CacheShape
    tracks: list[Track]
    keep: tuple[int | None, ...]
    max_length: int | None
    last: str = ""
    keys: OrderedDict[str, bytes] = field(default_factory=OrderedDict)

    def free(self) -> int:
        """Release all chunks, and return the number of freed bytes."""
        gone = base_bytes(len(self.tracks))
        for track in self.tracks:
            track.reserved = 0
            gone += released(track, [*track.cut(0), *track.spares])
        return gone

    def written(self, terms: Terms) -> None:
        """Record the last write, and its idempotency key if it has one."""
        self.last = terms.key
        if terms.key:
            self.keys[terms.key] = terms.payload
            self.keys.move_to_end(terms.key)
            if len(self.keys) > KEYS:
                self.keys.popitem(last=False)


class Write(NamedTuple):
    """A write: the new tokens get the positions from `at` on.

    `made` has the allocated chunk for each change that the write needs.
    """

    cache: StoredCache
    track: Track
    at: int
    made: list[tuple[Change, Chunk]]


def base_bytes(layers: int) -> int:
    """Return the bytes by which a cache of `layers` layers counts toward memory limits, in addition to its tokens."""
    return CACHE_BYTES + LAYER_BYTES * layers


def released(track: Track, chunks: Iterable[Chunk]) -> int:
    """Remove the holder `track` from `chunks`, free those without a holder, and return the freed bytes.

    Whole chunks are not freed but become spares of the track, until it has as many chunks as it has reserved.
    """
    gone = 0
    for chunk in chunks:
        chunk.holders -= 1
        if not chunk.holders:
            if chunk.capacity == CHUNK and track.spares_one:
                chunk.holders = 1
                track.spares.append(chunk)
            else:
                chunk.give_back()
                gone += chunk.nbytes
    return gone


def freeable(caches: Iterable[StoredCache]) -> int:
    """Return the bytes that the deletion of these caches frees. Chunks that other caches also use are not freed."""
    tracks = [track for cache in dict.fromkeys(caches) for track in cache.tracks]
    counts = Counter(chunk for track in tracks for chunk in (*track.chunks, *track.spares) if chunk is not None)
    chunks = sum(chunk.nbytes for chunk, holders in counts.items() if chunk.holders == holders)
    return chunks + sum(base_bytes(len(cache.tracks)) for cache in dict.fromkeys(caches))


def reserved_chunks(max_length: int, keep: int | None) -> int:
    """Return the number of chunks to reserve for a layer of `max_length` tokens that keeps its last `keep` tokens."""
    whole = -(-max_length // CHUNK)
    return whole if keep is None else min(whole, -(-keep // CHUNK) + 2)


def cut_problem(cache: StoredCache, end: int | None) -> tuple[str, str] | None:
    """Return (error code, message) if a cache cannot be cut at position `end`; None if it can."""
    if end is None:
        return None
    longest = max((track.length for track in cache.tracks), default=0)
    if end > longest:
        return "cache_position", f"position {end} is beyond the end, {longest}"
    first = max((track.first for track in cache.tracks), default=0)
    return dropped(first, end) if end < first else None


def dropped(first: int, position: int) -> tuple[str, str]:
    """Return (error code, message) for a position before `first`."""
    return "cache_dropped", f"position {position} is before {first}, the first position that `keep` retains"


def write_problem(
    cache: StoredCache, layer: int, at: int, count: int, lowest: Callable[[int, int], int]
) -> tuple[str, str] | None:
    """Return (error code, message) if `count` tokens cannot be written at position `at` of a layer; None if they can.

    `lowest(count, length)` is the first position that the call reads, if the layer then has `length` tokens.
    """
    track, keep = cache.tracks[layer], cache.keep[layer]
    if at > track.length:
        return "cache_position", f"position {at} is beyond the end, {track.length}"
    if at < track.first:
        return dropped(track.first, at)
    if cache.max_length is not None and at + count > cache.max_length:
        return "cache_full", f"{at + count} tokens exceed its max_length of {cache.max_length}"
    first = track.first if keep is None else max(track.first, max(at - keep, 0) // CHUNK * CHUNK)
    if count and (read := lowest(count, at + count)) < first:
        return dropped(first, read)
    return None
