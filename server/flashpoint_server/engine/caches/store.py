"""Create, write, fork, truncate and read the caches of an engine. The ledger stores their owners (ledger.py).

Every operation checks everything before it changes anything. Calls on one cache run one after the other
(cache_order.py); calls on different caches may run at the same time. This module uses no sockets, and torch only for
memory.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from flashpoint_contract.caches import CHUNK
from flashpoint_server.engine.caches.cache import (
    STALE,
    StoredCache,
    Terms,
    Write,
    base_bytes,
    cut_problem,
    dropped,
    freeable,
    released,
    reserved_chunks,
    write_problem,
)
from flashpoint_server.engine.caches.chunks import Change, Chunk, TokenSize, Track
from flashpoint_server.engine.caches.idempotency import REUSED, IdempotencyKeys
from flashpoint_server.engine.caches.pages import Block, PagePool
from flashpoint_server.engine.state.ledger import Ledger
from flashpoint_server.ipc.bodies import CacheShape
from flashpoint_server.ipc.messages import CacheRecord
from flashpoint_server.refusal import Refusal

SPARE = 16  # a block of pages is larger by a 16th than the limit, because free pieces between chunks may be too small


class CacheStore:
    """All caches of an engine. `ttl` is in seconds of the ledger's clock.

    `paged`: chunks are pages of one block of the device's memory, where Triton's kernels read them (pages.py).
    """

    def __init__(self, ledger: Ledger, ttl: float, device: str = "cpu", paged: bool = False) -> None:
        self.ledger = ledger
        self._lock = ledger.lock
        self._ttl = ttl
        self._device = device
        self._paged = paged
        self._block: Block | None = None  # the block of all pages; allocated at the first cache
        self._pools: WeakValueDictionary[TokenSize, PagePool] = WeakValueDictionary()  # pools of the token sizes in use
        self._keys = IdempotencyKeys()

    # Create and delete caches

    def create(
        self, terms: Terms, shape: CacheShape, count: int, max_length: int | None, keep: Sequence[int | None],
        ttl: float | None,
    ) -> list[CacheRecord]:  # fmt: skip
        """Create empty caches; with `max_length`, allocate their memory now. Raises Refusal 404, 410, 413 and 429."""
        with self._lock:
            self.ledger.sweep()
            if (again := self._answered(terms)) is not None:
                return again
            sizes = self._sizes(shape)
            chunks = [reserved_chunks(max_length, keep_last) for keep_last in keep] if max_length else [0] * len(sizes)
            base = base_bytes(len(sizes))
            each = base + sum(size.nbytes * CHUNK * n for size, n in zip(sizes, chunks, strict=True))
            self.ledger.check_number(terms.owner, terms.most, count)
            self._check(terms, each * count, each * count, each * count)
            made: list[StoredCache] = []
            for _ in range(count):
                tracks = [Track(size, reserved=n) for size, n in zip(sizes, chunks, strict=True)]
                try:
                    for track, n in zip(tracks, chunks, strict=True):
                        for place in range(n):
                            before = track.spares[-1] if track.spares else None
                            track.spares.append(track.new_chunk(place, CHUNK, before, n - 1 - place))
                except (MemoryError, RuntimeError, Refusal):
                    for track in tracks:
                        track.reserved = 0
                        released(track, track.spares)
                    for cache in made:
                        self.ledger.end(cache)
                    raise
                made.append(self._new(terms.owner, shape, ttl or self._ttl, tracks, tuple(keep), max_length))
                self.ledger.add(made[-1], each, each)
            return self._answer(terms, made)

    def fork(
        self, terms: Terms, serials: Sequence[int], lengths: Sequence[int] | None, free: Sequence[int]
    ) -> list[CacheRecord]:
        """Copy the caches `serials`, each up to its length in `lengths`, and delete the caches `free`.

        The copies share memory with their sources. Raises Refusal 404, 409, 410, 413 and 429.
        """
        with self._lock:
            self.ledger.sweep()
            if (again := self._answered(terms)) is not None:
                return again
            fields = [f"{name}.{n}" for name, some in (("caches", serials), ("free", free)) for n in range(len(some))]
            caches = self._find(terms.owner, [*serials, *free], fields)
            sources, freed = caches[: len(serials)], caches[len(serials) :]
            ends = [None] * len(sources) if lengths is None else lengths
            self._refuse([cut_problem(c, end) for c, end in zip(sources, ends, strict=True)])
            tracks = [[t.fork(t.length if end is None else min(end, t.length)) for t in c.tracks]
                      for c, end in zip(sources, ends, strict=True)]  # fmt: skip
            base = [base_bytes(len(c.tracks)) for c in sources]
            full = [unshared + sum(t.nbytes for t in some) for unshared, some in zip(base, tracks, strict=True)]
            try:
                self.ledger.check_number(terms.owner, terms.most, len(sources), len(dict.fromkeys(freed)))
                gone = sum(c.nbytes for c in dict.fromkeys(freed))
                self._check(terms, sum(base) - freeable(freed), sum(full) - gone, max(base, default=0))
            except Refusal:
                for track in itertools.chain(*tracks):
                    released(track, track.cut(0))  # this frees no memory: the sources use these chunks
                raise
            made = []
            for source, unshared, nbytes, some in zip(sources, base, full, tracks, strict=True):
                made.append(self._new(terms.owner, source.shape, source.ttl, some, source.keep, source.max_length))
                self.ledger.add(made[-1], nbytes, unshared)
            answer = self._answer(terms, made)
            for cache in dict.fromkeys(freed):
                self.ledger.end(cache)
            return answer

    def delete(self, terms: Terms, serials: Sequence[int]) -> None:
        """Delete all of the caches, or none of them. Raises Refusal 404 and 410."""
        with self._lock:
            self._keys.check(terms)
            for cache in dict.fromkeys(self._find(terms.owner, serials)):
                self.ledger.end(cache)
            self._keys.done(terms)

    def renew(self, terms: Terms, serials: Sequence[int]) -> list[CacheRecord]:
        """Return descriptions of caches, whose time to live restarts when the call ends. Raises Refusal 404 and 410."""
        with self._lock:
            self._keys.check(terms)
            records = self.look(terms, serials)
            self._keys.done(terms)
            return records

    def _new(
        self, owner: str, shape: CacheShape, ttl: float, tracks: list[Track], keep: tuple[int | None, ...],
        max_length: int | None,
    ) -> StoredCache:  # fmt: skip
        return StoredCache(
            serial=self.ledger.serial(), owner=owner, ttl=ttl, expires=self.ledger.clock() + ttl, shape=shape,
            tracks=tracks, keep=keep, max_length=max_length,
        )  # fmt: skip

    def _answered(self, terms: Terms) -> list[CacheRecord] | None:
        """Return the stored answer to an earlier creation or fork with the same idempotency key.

        Raises Refusal 404 and 410 if its caches are gone, and 422 if the key belongs to another call.
        """
        serials = self._keys.check(terms)
        return None if serials is None else [self.record(cache) for cache in self._find(terms.owner, serials)]

    def _answer(self, terms: Terms, made: Sequence[StoredCache]) -> list[CacheRecord]:
        self._keys.done(terms, [cache.serial for cache in made])
        return [self.record(cache) for cache in made]

    # Reading

    def look(self, terms: Terms, serials: Sequence[int]) -> list[CacheRecord]:
        """Return descriptions of caches. Raises Refusal 404 and 410."""
        with self._lock:
            return [self.record(cache) for cache in self._find(terms.owner, serials)]

    def listed(self, terms: Terms, after: int = 0, limit: int | None = None) -> list[CacheRecord]:
        """Return descriptions of the owner's caches with serials above `after`, at most `limit`."""
        with self._lock:
            return [self.record(cache) for cache in self.ledger.listed(StoredCache, terms.owner, after, limit)]

    def shared_chunk(self, owner: str, serials: Sequence[int], layer: int) -> Chunk | None:
        """Return the first stored chunk of the cache `serials[0]`, if it is full and another cache uses it, or None."""
        with self._lock:
            cache = self.ledger.find(StoredCache, owner, serials[0])
            if isinstance(cache, tuple):
                return None
            track = cache.tracks[layer]
            if track.length < CHUNK + track.first:
                return None
            chunk = track.chunks[track.first // CHUNK]
            return chunk if chunk is not None and chunk.holders > 1 else None

    @staticmethod
    def reads(caches: Sequence[StoredCache], layer: int) -> list[int] | None:
        """Return the number of keys that a call over `caches` reads for each of them; None if no two share a chunk.

        The keys of a shared chunk are divided among those of the caches that share it.
        """
        if len(caches) < 2:
            return None
        tracks = [cache.tracks[layer] for cache in caches]
        whole = [[c for c in track.chunks[: track.length // CHUNK] if c and c.holders > 1] for track in tracks]
        readers = Counter(itertools.chain(*whole))
        if readers.total() == len(readers):
            return None
        return [
            track.length - sum(CHUNK - CHUNK // readers[chunk] for chunk in chunks)
            for track, chunks in zip(tracks, whole, strict=True)
        ]

    def record(self, cache: StoredCache) -> CacheRecord:
        """Return a description of a cache in its present state."""
        return CacheRecord(
            serial=cache.serial,
            shape=cache.shape,
            max_length=cache.max_length,
            keep=list(cache.keep),
            ttl=cache.ttl,
            lengths=[track.length for track in cache.tracks],
            firsts=[track.first for track in cache.tracks],
            nbytes=cache.nbytes,
            expires_in=max(0.0, cache.expires - self.ledger.clock()),
        )

    def find(self, terms: Terms, serials: Sequence[int]) -> list[StoredCache]:
        """Return the owner's caches. Raises Refusal 404 and 410."""
        with self._lock:
            return self._find(terms.owner, serials)

    def _find(self, owner: str, serials: Sequence[int], fields: Sequence[str] = ()) -> list[StoredCache]:
        found: list[StoredCache] = []
        problems: list[tuple[str, str] | None] = []
        for serial in serials:
            one = self.ledger.find(StoredCache, owner, serial)
            if isinstance(one, StoredCache):
                found.append(one)
            problems.append(one if isinstance(one, tuple) else None)
        if len(found) < len(problems):
            self._refuse(problems, fields)
        return found

    @staticmethod
    def _refuse(problems: Sequence[tuple[str, str] | None], fields: Sequence[str] = ()) -> None:
        """Raise a Refusal if `problems` has any (code, message). It has the code of the first, and lists all as errors.

        Each error names the request's field in `fields` at the same index; by default `caches.0`, `caches.1`, ….
        """
        if any(problems):
            fields = fields or [f"caches.{i}" for i in range(len(problems))]
            errors = [(field, f"{p[0]}: {p[1]}") for field, p in zip(fields, problems, strict=True) if p is not None]
            code, detail = next(p for p in problems if p is not None)
            raise Refusal(code, detail, errors=errors)

    # Tokens

    def truncate(self, terms: Terms, serial: int, length: int) -> CacheRecord:
        """Drop the tokens from `length` on, in every layer. Raises Refusal 404, 409 and 410."""
        with self._lock:
            self._keys.check(terms)
            (cache,) = self._find(terms.owner, [serial])
            if not self._repeats(terms, [cache]):
                self._refuse([cut_problem(cache, length)])
                for track in cache.tracks:
                    if track.length > length:
                        self._let_go(cache, track, track.cut(length))
                self._written(terms, [cache])
            return self.record(cache)

    def write(
        self,
        terms: Terms,
        serials: Sequence[int],
        layer: int,
        at: Sequence[int] | None,
        tokens: Sequence[tuple[Tensor, Tensor]],
        lowest: Callable[[int, int], int] = lambda queries, length: length,
    ) -> list[StoredCache]:
        """Write k (Hk, n, D) and v (Hk, n, Dv) of each cache's new tokens, at its end or at positions `at`.

        `lowest(queries, length)` returns the first position that a call reads from a cache of this length, after the
        write. Return the caches. Raises Refusal 404, 409, 410, 413, 422, 429, and MemoryError; then nothing has
        changed.
        """
        with self._lock:
            self._keys.check(terms)
            caches = self._find(terms.owner, serials)
            if len(set(serials)) < len(serials):
                raise Refusal("invalid_request", "caches: contains a cache twice, but the call writes to it",
                              errors=[("caches", "contains a cache twice, but the call writes to it")])  # fmt: skip
            if self._repeats(terms, caches):
                return caches
            writes = self._prepared(terms, caches, layer, at, tokens, lowest)
            self._written(terms, caches)
            for cache in caches:
                cache.expires = self.ledger.clock() + cache.ttl  # also if the call's attention fails later
        for write, (k, v) in zip(writes, tokens, strict=True):
            if (keep_last := write.cache.keep[layer]) is not None:
                with self._lock:
                    self._let_go(write.cache, write.track, write.track.drop_before(write.at - keep_last))
            if released := write.track.write(write.at, k, v, write.made):
                self._wait_for_copies()
                with self._lock:
                    self._let_go(write.cache, write.track, released)
        return caches

    def readable(self, caches: Sequence[StoredCache], layer: int, first: Sequence[int]) -> None:
        """Check that each cache still holds the tokens from `first` on. Raises Refusal 409."""
        there = [cache.tracks[layer].first for cache in caches]
        self._refuse([dropped(n, p) if p < n else None for n, p in zip(there, first, strict=True)])

    def _prepared(
        self, terms: Terms, caches: Sequence[StoredCache], layer: int, at: Sequence[int] | None,
        tokens: Sequence[tuple[Tensor, Tensor]], lowest: Callable[[int, int], int],
    ) -> list[Write]:  # fmt: skip
        """Check a write, and allocate its memory. No later step of the write can fail.

        Raises Refusal 409, 413, 422 and 429, and MemoryError.
        """
        writes: list[Write] = []
        needs: list[list[Change]] = []
        problems = []
        for n, (cache, (k, _)) in enumerate(zip(caches, tokens, strict=True)):
            track, count = cache.tracks[layer], k.shape[1]
            place = track.length if at is None else at[n]
            problems.append(write_problem(cache, layer, place, count, lowest))
            needs.append(track.needs(place, count))
            writes.append(Write(cache, track, place, []))
        self._refuse(problems)
        if not any(needs):
            return writes
        new = net = largest = 0
        for (cache, track, _, _), changes in zip(writes, needs, strict=True):
            spared = len(track.spares)
            fresh = sum(track.size.nbytes * change.capacity for change in changes[spared:])
            old = (track.chunks[change.place] for change in changes if change.place < len(track.chunks))
            gone = sum(chunk.nbytes for chunk in old if chunk is not None)
            new, net, largest = new + fresh, net + fresh - gone, max(largest, cache.nbytes + fresh - gone)
        self._check(terms, new, net, largest)
        try:
            for (cache, track, _, made), changes in zip(writes, needs, strict=True):
                for number, change in enumerate(changes, 1):
                    if track.spares:
                        chunk = track.spares.pop(0)
                    else:
                        before = made[-1][1] if made else track.chunks[change.place - 1] if change.place else None
                        chunk = track.new_chunk(change.place, change.capacity, before, len(changes) - number)
                        self.ledger.count(cache, chunk.nbytes, chunk.nbytes)
                    made.append((change, chunk))
        except (MemoryError, RuntimeError, Refusal):
            for write in writes:
                self._let_go(write.cache, write.track, [chunk for _, chunk in write.made])
            raise
        return writes

    def _written(self, terms: Terms, caches: Sequence[StoredCache]) -> None:
        """Record the idempotency key of a write that takes effect now."""
        for cache in caches:
            cache.written(terms)
        self._keys.done(terms)

    def _repeats(self, terms: Terms, caches: Sequence[StoredCache]) -> bool:
        """Return whether the call repeats the last write of all these caches.

        Raises Refusal 409 if the call has the idempotency key of an older write, and 422 if it has that of another
        call. The caches know their keys for longer than `IdempotencyKeys`.
        """
        if not terms.key:
            return False
        known = [cache.keys.get(terms.key) for cache in caches]
        if known.count(None) == len(known):
            return False
        self._refuse([REUSED if one not in (None, terms.payload) else None for one in known])
        if all(cache.last == terms.key for cache in caches):
            return True
        self._refuse([None if one is None else ("cache_stale", STALE) for one in known])
        return False

    # Memory

    def _sizes(self, shape: CacheShape) -> list[TokenSize]:
        dtype = getattr(torch, shape.dtype)
        dims = zip(shape.kv_heads, shape.head_dim, shape.value_dim, strict=True)
        sizes = [TokenSize(*each, dtype, self._device) for each in dims]
        return [replace(size, pool=self._pool(size)) for size in sizes]

    def _pool(self, size: TokenSize) -> PagePool | None:
        """Return the pool of pages for tokens of this size; None if chunks are not pages. Raises MemoryError."""
        if not self._paged:
            return None
        if self._block is None:
            self._block = Block.largest(self.ledger.limit + self.ledger.limit // SPARE, self._device)
        if (pool := self._pools.get(size)) is None:
            shape = size.heads, size.head_dim, size.value_dim
            pool = self._pools[size] = PagePool(self._block, *shape, size.dtype, scaled=size.quantized)
        return pool

    def _check(self, terms: Terms, new: int, net: int, largest: int) -> None:
        self.ledger.check(terms.owner, terms.quota, new, net, largest, StoredCache.kind)

    def _wait_for_copies(self) -> None:
        """Wait until a GPU has copied the tokens out of released chunks: then another CUDA stream may write to them."""
        if self._device != "cpu":
            torch.cuda.current_stream(self._device).synchronize()

    def _let_go(self, cache: StoredCache, track: Track, chunks: Sequence[Chunk]) -> None:
        """Release chunks of a track, and subtract their bytes in the ledger, except those that remain reserved."""
        if not chunks:
            return
        spares = len(track.spares)
        gone = released(track, chunks)
        spare_bytes = sum(chunk.nbytes for chunk in track.spares[spares:])
        self.ledger.uncount(cache, sum(chunk.nbytes for chunk in chunks) - spare_bytes, gone)
