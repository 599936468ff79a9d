"""Callers with caches: each changes and reads its own caches in sequential calls, and updates a model of them.

If an answer is lost, the caller sends the call again with its idempotency key until an answer comes. Other outcomes:

refused     the service has no memory or capacity for the call; the model does not change
410         the cache expired, or its engine ended: `HeldCache.life` and `earliest` show whether that is possible
404         the cache was deleted, belongs to another key, or the service was restarted
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np

from chaos import held
from chaos.callers import AFTER_NOTHING, HANG, Answer, Caller, WrongError, refused
from chaos.held import DIM, KV_HEADS, LAYERS, Q_HEADS, SHAPE, HeldCache, Request
from chaos.keys import OWNERS
from chaos.service import Life

MOST = 4  # a caller with this many caches creates no more
LONG = 1030  # tokens of a long write; a layer allocates memory in chunks of 1024 tokens, so this needs two
TTL = 600.0  # default time to live of a cache in seconds, as in the service
SHORT = (0.2, 3.0)  # range of the time to live, in seconds, of caches that expire
GONE = 5.0  # timeout in seconds for an engine to end after it has closed its sockets
NOT_BEGUN = {"queue_full", "key_limit", "cache_memory", "not_ready", "draining", "body_timeout"}
OPTIONS = ({}, {"causal": True}, {"causal": True, "window": [7, 0]})
CALLS = {
    "attend": 9, "append": 5, "read": 4, "export": 4, "again": 3, "late": 2, "fork": 3, "truncate": 2, "renew": 1,
    "look": 1, "trespass": 2, "revisit": 2, "delete": 1,
}  # fmt: skip


class Holder(Caller):
    """A caller that makes a few caches, and writes, reads and deletes them."""

    owner = OWNERS[0]

    def __init__(self, name, load, rng):
        super().__init__(name, load, rng)
        self.caches: list[HeldCache] = []
        self.ended: deque[tuple[HeldCache, str]] = deque(maxlen=20)  # each with the error code of later calls
        self.request: Request | None = None
        self.later: Request | None = None  # the request to repeat after a deletion that frees memory for it
        self.resting = False

    # Make one call

    def turn(self) -> str:
        if self.request is None:
            self.request, self.later = self.later or self.choose(), None
        return self.call(self.ask)

    def ask(self) -> str:
        """Send the request. Return the status and code of a refusal, such as "429 queue_full".

        Return "" if the request is complete and its answer is right, or is the expected refusal.
        """
        request = self.request
        assert request is not None
        connection = self.connected()
        request.first = request.first or time.monotonic()
        request.tries += 1
        try:
            answer = request.send(connection, self.owner)
            code = self.hear(request, answer)
        except WrongError:
            self.give_up(request)
            raise
        except BaseException:
            request.unsure = True
            raise
        return f"{answer.status} {code}" if code else ""

    def hear(self, request: Request, answer: Answer) -> str:
        if answer.status == request.success:
            self.request = None
            if request.refused:
                raise WrongError(f"{request.method} {request.path} was answered, and not refused")
            request.heard(answer)
            self.used(request)
            return ""
        code = answer.code
        if request.refused and request.refused(code):
            self.request = None
            return ""
        if code == "cache_lost" and request.unsure and request.ttl and time.monotonic() >= request.first + request.ttl:
            self.request = None  # the caches that the first attempt made or named have expired
            self.caches = [cache for cache in self.caches if cache not in request.caches]
            return code
        if code in ("cache_lost", "cache_not_found"):
            self.request = None
            self.lose(request, code, answer)
            return "" if request.frees else code
        refusal = refused(answer, request.path)
        if code == "key_limit":
            raise WrongError("a key without a quota got key_limit")
        request.unsure |= code not in NOT_BEGUN
        if not request.unsure and (request.tries > 2 or code == "cache_memory"):
            self.request = None  # the request had no effect, and is not repeated
        if code == "cache_memory" and self.rng.integers(2):
            self.make_room(request)
        return refusal.partition(" ")[2]

    def used(self, request: Request) -> None:
        for cache in request.caches:
            if request.uses:
                cache.earliest = max(cache.earliest, request.first + cache.ttl)
            if request.frees and cache in self.caches:
                self.end(cache, "cache_not_found")

    def make_room(self, request: Request) -> None:
        """Make the next request delete another cache of this caller.

        If there is none and `request` may have taken effect, delete its caches, whose state is not known.
        """
        others = [cache for cache in self.caches if cache not in request.caches]
        if others:
            self.request, self.later = held.delete([others[int(self.rng.integers(len(others)))]]), self.request
        elif request.unsure and request.uses:
            self.request = held.delete(list(request.caches))

    def give_up(self, request: Request) -> None:
        """Make the next request delete the caches of `request`: after a wrong answer their model is invalid."""
        self.request = held.delete(list(request.caches)) if request.caches and not request.frees else None

    def lose(self, request: Request, code: str, answer: Answer) -> None:
        """Forget the caches that an error reports as lost. Raises WrongError if they must still exist."""
        for cache, own_code in self.named(request, code, answer):
            if own_code == "cache_not_found":
                right = (request.frees and request.unsure) or cache.life.starts != self.load.service.starts
            else:
                right = time.monotonic() >= cache.earliest or is_over(cache.life)
            if cache in self.caches:
                self.end(cache, own_code)
            if not right:
                raise WrongError(f"{request.method} {request.path} got {own_code}, and the cache should be there")

    @staticmethod
    def named(request: Request, code: str, answer: Answer) -> list[tuple[HeldCache, str]]:
        """Return the caches that an error names, each with its code; if it names none, all caches of the request."""
        caches = []
        for error in answer.json.get("errors", ()):
            number, own_code = int(error["loc"][0].rpartition(".")[2]), error["msg"].partition(":")[0]
            caches += [(request.caches[number], own_code)] if number < len(request.caches) else []
        if not request.caches or any(own_code not in ("cache_lost", "cache_not_found") for _, own_code in caches):
            raise WrongError(f"{request.method} {request.path} got {code}: {answer.body[:200]!r}")
        return caches or [(cache, code) for cache in request.caches]

    def end(self, cache: HeldCache, code: str) -> None:
        self.caches.remove(cache)
        self.ended.append((cache, code))

    # End a round

    def rest(self) -> None:
        """Delete the caller's caches after the last call."""
        self.resting, end = True, time.monotonic() + HANG
        while (self.request or self.caches) and time.monotonic() < end:
            if self.turn() == "refused":
                time.sleep(AFTER_NOTHING)
        self.resting = False
        self.leave()

    def probe(self) -> str:
        """Create a cache, use it, and delete it. Return "right", or the first other kind of outcome."""
        steps = (
            lambda: self.create(count=1), lambda: self.append(self.caches[-1]), lambda: self.attend(self.caches[-1]),
            lambda: self.read(self.caches[-1]), lambda: self.export(self.caches[-1]),
            lambda: held.delete(self.caches[-1:]),
        )  # fmt: skip
        for step in steps:
            if self.request is None:
                self.request = step()
            if (kind := self.call(self.ask)) != "right":
                return kind
        return "right"

    # Calls that `turn` chooses from

    def choose(self) -> Request:
        if self.resting:
            return held.delete(list(self.caches))
        if not self.caches or (len(self.caches) < MOST and self.rng.random() < 0.1):
            return self.create()
        names, weights = list(CALLS), np.array(list(CALLS.values()))
        while True:
            cache = self.caches[int(self.rng.integers(len(self.caches)))]
            request = getattr(self, str(self.rng.choice(names, p=weights / weights.sum())))(cache)
            if request is not None:
                return request

    def ttl(self) -> float | None:
        return None

    def create(self, count: int | None = None) -> Request:
        count, ttl, life = count or int(self.rng.integers(1, 3)), self.ttl(), self.load.service.life()
        longest = 4 * 1024 if self.rng.random() < 0.07 else None

        def heard(answer: Answer) -> None:
            documents = answer.json["caches"]
            held.same("count", len(documents), count)
            for document in documents:
                self.caches.append(HeldCache(document["id"], self.of(life), ttl or TTL, request.first + (ttl or TTL)))
                held.described(document, self.caches[-1])
            self.load.book.made(self.owner, [document["id"] for document in documents])

        body = {**SHAPE, "count": count, "ttl_s": ttl, "max_length": longest}
        request = held.asks("POST", "/caches", body, 201, heard, ttl=ttl or TTL)
        return request

    def fork(self, cache: HeldCache) -> Request | None:
        length = None if self.rng.integers(2) or not max(cache.lengths) else int(self.rng.integers(max(cache.lengths)))
        freed = [cache] if self.rng.integers(2) or len(self.caches) >= MOST else []

        def heard(answer: Answer) -> None:
            (document,) = answer.json["caches"]
            copy = HeldCache(document["id"], cache.life, cache.ttl, request.first + cache.ttl)
            copy.layers = [layer[:, :length].copy() for layer in cache.layers]
            self.caches.append(copy)
            held.described(document, copy)
            for freed_cache in freed:
                self.end(freed_cache, "cache_not_found")

        body = {"caches": [cache.id], "lengths": None if length is None else [length], "free": [c.id for c in freed]}
        request = held.asks("POST", "/caches/fork", body, 201, heard, caches=[cache, *freed], ttl=cache.ttl, uses=True)
        return request

    def append(self, cache: HeldCache) -> Request:
        layer = int(self.rng.integers(LAYERS))
        tokens, at = self.tokens(1)[:, 0], self.place(cache, layer)
        return held.append(cache, layer, tokens, at)

    def attend(self, cache: HeldCache) -> Request:
        caches = self.some(cache)
        layer, tokens = int(self.rng.integers(LAYERS)), self.tokens(len(caches))
        at = [self.place(each, layer) for each in caches]
        q = self.rng.standard_normal((len(caches), Q_HEADS, tokens.shape[2], DIM), dtype=np.float32)
        places = None if None in at else at
        return held.attend(caches, layer, q, tokens, places, OPTIONS[int(self.rng.integers(len(OPTIONS)))])

    def read(self, cache: HeldCache) -> Request:
        caches = self.some(cache)
        q = self.rng.standard_normal((len(caches), Q_HEADS, int(self.rng.integers(1, 4)), DIM), dtype=np.float32)
        option = OPTIONS[int(self.rng.integers(len(OPTIONS)))]
        return held.attend(caches, int(self.rng.integers(LAYERS)), q, None, None, option)

    def export(self, cache: HeldCache) -> Request:
        return held.export(cache, int(self.rng.integers(LAYERS)))

    def look(self, cache: HeldCache) -> Request:
        return held.look(cache)

    def renew(self, cache: HeldCache) -> Request:
        return held.renew(cache)

    def truncate(self, cache: HeldCache) -> Request:
        return held.truncate(cache, int(self.rng.integers(max(cache.lengths) + 1)))

    def delete(self, cache: HeldCache) -> Request:
        return held.delete([cache])

    def again(self, cache: HeldCache) -> Request | None:
        """Return the last write, to be repeated: the service must give the same answer, and write nothing."""
        request = cache.last
        if request is None or any(each.last is not request or each not in self.caches for each in request.caches):
            return None
        request.unsure, request.tries, request.first = False, 0, 0.0
        return request

    def late(self, cache: HeldCache) -> Request | None:
        """Return a write before the last, to be repeated: the service must answer `cache_stale`, and write nothing."""
        older = [request for request in cache.written if request is not cache.last]
        if not older:
            return None
        copy = older[int(self.rng.integers(len(older)))]
        return Request(
            copy.method, copy.path, copy.body, copy.headers, copy.success, copy.heard, [cache],
            lambda code: code == "cache_stale",
        )  # fmt: skip

    def trespass(self, cache: HeldCache) -> Request | None:
        """Return a request with another key's cache or an unknown id: the service answers 404, and changes nothing."""
        ids = [*self.load.book.others(self.owner), "c" + ("A" if cache.id[1] != "A" else "B") + cache.id[2:]]
        other, q = ids[int(self.rng.integers(len(ids)))], np.zeros((1, Q_HEADS, 1, DIM), np.float32)
        k = np.zeros((KV_HEADS, 1, DIM), np.float32)
        choice = int(self.rng.integers(6))
        never = {"refused": lambda code: code == "cache_not_found" or (choice == 2 and code == "cache_lost")}
        if choice == 0:
            return held.carries({"k": k, "v": k}, {}, f"/caches/{other}/append", None, **never)
        if choice == 1:
            return held.carries({"q": q}, {"caches": [other]}, "/attention", None, **never)
        document = {"caches": [cache.id], "free": [other]} if choice == 2 else {**SHAPE, "beside": other}
        if choice < 4:
            return held.asks("POST", "/caches/fork" if choice == 2 else "/caches", document, 201, None, **never)
        if choice == 4:
            return held.asks("DELETE", f"/caches/{other}", None, 204, None, **never)
        return held.asks("GET", f"/caches/{other}/tensors", None, 200, None, **never)

    def revisit(self, cache: HeldCache) -> Request | None:
        """Return a request for a cache that has ended.

        The service must answer 410 if the cache was lost, or 404 if it was deleted. After the cache's engine has ended,
        410 is also right; after a restart of the service, 404 is.
        """
        if not self.ended:
            return None
        gone, code = self.ended[int(self.rng.integers(len(self.ended)))]

        def right(now: str) -> bool:
            if now == "cache_lost":
                return code == now or is_over(gone.life)
            return now == "cache_not_found" and (code == now or gone.life.starts != self.load.service.starts)

        return held.asks("GET", f"/caches/{gone.id}", None, 200, None, refused=right)

    # Helpers for the calls

    def of(self, life: Life) -> Life:
        """Return `life`, read before a call, if the same engine still runs; otherwise a `Life` that is over."""
        now = self.load.service.life()
        return now if now == life else Life(-1, None)

    def some(self, cache: HeldCache) -> list[HeldCache]:
        others = [each for each in self.caches if each is not cache and each.life == cache.life]
        return [cache, *others[: int(self.rng.integers(2))]]

    def tokens(self, count: int) -> np.ndarray:
        """Return new random tokens (2, count, n, Hk, D)."""
        length = LONG if self.rng.random() < 0.05 else int(self.rng.integers(1, 9))
        return self.rng.standard_normal((2, count, length, KV_HEADS, DIM), dtype=np.float32)

    def place(self, cache: HeldCache, layer: int) -> int | None:
        """Return the position of a write: mostly None, which means the layer's end, sometimes a position near the end.

        In a layer longer than 2·LONG it is always an early position, because a write removes all later tokens.
        """
        length = cache.lengths[layer]
        if length > 2 * LONG:
            return int(self.rng.integers(LONG))
        return None if self.rng.random() < 0.7 else int(self.rng.integers(max(0, length - 20), length + 1))


class OtherHolder(Holder):
    owner = OWNERS[1]


class ShortHolder(OtherHolder):
    """A caller whose caches expire between calls, or while a call waits."""

    def ttl(self) -> float | None:
        return float(self.rng.uniform(*SHORT)) if self.load.going.is_set() else None

    def turn(self) -> str:
        if not self.resting and self.rng.random() < 0.05:
            time.sleep(float(self.rng.uniform(*SHORT)) / 2)
        return super().turn()


def is_over(life: Life) -> bool:
    """Return whether the engine has ended. Wait up to GONE seconds for it, because its sockets close earlier."""
    end = time.monotonic() + GONE
    while not life.over and time.monotonic() < end:
        time.sleep(0.01)
    return life.over
