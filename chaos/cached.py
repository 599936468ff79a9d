"""Faults of callers with caches: they disconnect during a write, fill the memory, or let their caches expire."""

from __future__ import annotations

import contextlib
import http.client
import time
from collections.abc import Iterator

import numpy as np

from chaos import held
from chaos.callers import Answer, WrongError
from chaos.clients import PATIENCE, STAGES, break_off, connected, head_of
from chaos.held import DIM, KV_HEADS, LAYERS, Q_HEADS, SHAPE, HeldCache, Request
from chaos.keys import FILLER, OWNERS, QUOTA, SMALL
from chaos.world import World

WHOLE = STAGES.index("the whole request")
TOKENS = 300  # tokens of an interrupted write: 75 KiB of k and 75 KiB of v
CHUNK = 1024  # number of tokens in the unit by which a cache's layer allocates memory
EACH = 2 * CHUNK  # tokens that each cache reserves when caches fill the memory
TTL = 0.3  # seconds until a cache without use expires
EXPIRES = 60.0  # timeout in seconds for an unused cache to expire
SHORT = 3.0  # timeout in seconds for creating a cache: the engine may still be starting after an earlier fault
LASTS = (0.1, 0.6)  # range of seconds that a fault lasts


def leave_cached(world: World) -> str | None:
    """Disconnect during a write or its answer, then repeat the write with its idempotency key: it takes effect once.

    If the body was incomplete, the write has no effect until it is repeated.
    """
    with _cache(world, FILLER) as cache:
        if cache is None:
            return None
        stage, reset, request = int(world.rng.integers(len(STAGES))), bool(world.rng.integers(2)), _write(world, cache)
        with contextlib.suppress(OSError), connected(world) as connection:
            break_off(connection, head_of(request, FILLER), request.body, stage, reset)
        if stage < WHOLE:
            _heard(world, held.look(cache), FILLER, f"a write that ended after {STAGES[stage]}")
        _heard(world, request, FILLER, "a write that is sent again")
        _heard(world, request, FILLER, "a write that is sent a third time")
        for again in (*(held.export(cache, layer) for layer in range(LAYERS)), held.look(cache)):
            _heard(world, again, FILLER, "what a write has left")
    return f"after {STAGES[stage]}, {'reset' if reset else 'closed'}"


def fill_caches(world: World) -> str | None:
    """Fill the memory for caches: creating another cache gives 429, and deleting the caches frees all of the memory."""
    made: list[HeldCache] = []
    answer = None
    while (answer := _made(world, FILLER, made, max_length=EACH)) is not None and answer.status == 201:
        pass
    world.wait(*LASTS)
    code = "nothing" if answer is None else answer.code
    if answer is not None and code != "cache_memory" and answer.status != 503:
        world.violations.append(f"a cache too many got {answer.status}: {answer.body[:200]!r}")
    for cache in made:
        _deleted(world, FILLER, cache)
    return f"a cache too many got {code}"


def fill_quota(world: World) -> str | None:
    """Use up a key's quota: this key gets 429 key_limit, its caches do not change, and other keys see no effect."""
    with _cache(world, SMALL) as cache:
        if cache is None:
            return None
        for count in (TOKENS, QUOTA // (KV_HEADS * DIM * 8)):
            tokens = world.rng.standard_normal((2, count, KV_HEADS, DIM), dtype=np.float32)
            request = held.append(cache, 0, tokens, None)
            answer = _settled(world, request, SMALL, PATIENCE)
            if answer is not None and count == TOKENS and answer.status == 200:
                request.heard(answer)
        code = "nothing" if answer is None else answer.code
        if code not in ("key_limit", "cache_memory", "nothing") and not (code == "cache_lost" and cache.life.over):
            world.violations.append(f"a write over the quota got {answer.status}: {answer.body[:200]!r}")
        with _cache(world, FILLER):  # another key must not get key_limit
            pass
        _heard(world, held.look(cache), SMALL, "a cache whose key has used up its quota")
        _heard(world, held.export(cache, 0), SMALL, "a cache whose key has used up its quota")
    return code


def expire(world: World) -> str | None:
    """Let a cache expire between two calls or during a body: then its own key gets 410, and another key gets 404."""
    slowly = bool(world.rng.integers(2))
    with _cache(world, FILLER, ttl_s=TTL) as cache:
        if cache is None:
            return None
        request = _write(world, cache)
        if slowly:
            with contextlib.suppress(OSError), connected(world) as connection:
                text = head_of(request, FILLER) + request.body
                connection.sendall(text[: len(text) // 2])
                time.sleep(TTL)
                connection.sendall(text[len(text) // 2 :])
                connection.recv(1 << 16)
        codes: list[str] = []

        def expired() -> bool:
            answer = _settled(world, held.look(cache), FILLER, PATIENCE)
            codes.append("nothing" if answer is None else str(answer.status) + answer.code)
            return codes[-1] not in ("200", "nothing")

        world.until(expired, EXPIRES, "a cache does not expire")
        ended = ((after, FILLER, "cache_lost") for after in (held.look(cache), request, held.delete([cache])))
        for sent, owner, right in (*ended, (held.look(cache), OWNERS[0], "cache_not_found")):
            answer = _settled(world, sent, owner, PATIENCE)
            if answer is not None and answer.status != 503 and answer.code != right:
                world.violations.append(f"{sent.method} {sent.path} of an expired cache got {answer}")
        return f"while a body came, {codes[-1]}" if slowly else f"between calls, {codes[-1]}"


# Helpers of the faults above


@contextlib.contextmanager
def _cache(world: World, owner: str, **options: object) -> Iterator[HeldCache | None]:
    """Yield a cache, and delete it at the end; yield None if none can be created."""
    made: list[HeldCache] = []
    _made(world, owner, made, **options)
    try:
        yield made[0] if made else None
    finally:
        for cache in made:
            _deleted(world, owner, cache)


def _made(world: World, owner: str, made: list[HeldCache], **options: object) -> Answer | None:
    """Create a cache, append it to `made`, and return the last answer.

    The request is sent twice with one idempotency key. Record a violation if this makes two caches, or if an API key
    without a quota (any `owner` but SMALL) gets key_limit.
    """
    life = world.service.life()

    def heard(answer: Answer) -> None:
        (document,) = answer.json["caches"]
        if not made or all(cache.id != document["id"] for cache in made):
            made.append(HeldCache(document["id"], life, document["ttl_s"], 0.0))

    request, before = held.asks("POST", "/caches", {**SHAPE, **options}, 201, heard), len(made)
    answers = [_settled(world, request, owner, SHORT) for _ in range(2)]
    for answer in answers:
        if answer is not None and answer.status == 201:
            heard(answer)
    if len(made) > before + 1 and world.service.life() == life:
        world.violations.append("one key has made two caches")
    if owner != SMALL and any(answer is not None and answer.code == "key_limit" for answer in answers):
        world.violations.append("a key without a quota got key_limit")
    return answers[-1]


def _deleted(world: World, owner: str, cache: HeldCache) -> None:
    """Delete a cache that may already be gone."""
    answer = _settled(world, held.delete([cache]), owner, PATIENCE)
    right = answer is None or answer.status == 204 or answer.code in ("cache_lost", "cache_not_found")
    if not right and answer.status != 503:
        world.violations.append(f"a cache that is deleted got {answer}")


def _write(world: World, cache: HeldCache) -> Request:
    """Return a request that writes TOKENS tokens to a random layer of the cache, alone or with an attention call."""
    tokens = world.rng.standard_normal((2, 1, TOKENS, KV_HEADS, DIM), dtype=np.float32)
    layer = int(world.rng.integers(LAYERS))
    if world.rng.integers(2):
        return held.append(cache, layer, tokens[:, 0], None)
    q = world.rng.standard_normal((1, Q_HEADS, TOKENS, DIM), dtype=np.float32)
    return held.attend([cache], layer, q, tokens, None, {"causal": True})


def _heard(world: World, request: Request, owner: str, what: str) -> None:
    """Send a request, and compare its answer with the numpy model of the cache; record a difference as a violation."""
    answer = _settled(world, request, owner, PATIENCE)
    if answer is None or answer.status in (429, 503, 504):
        return
    (cache,) = request.caches
    if answer.status != request.success:
        if not cache.life.over:
            world.violations.append(f"{what} got {answer.status}: {answer.body[:200]!r}")
        return
    try:
        request.heard(answer)
    except WrongError as error:
        world.violations.append(f"{what}: {error}")


def _settled(world: World, request: Request, owner: str, patience: float) -> Answer | None:
    """Repeat a request until its answer or refusal is final, or for `patience` seconds; return the last answer."""
    end, answer = time.monotonic() + patience, None
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", world.service.port, timeout=PATIENCE)
        try:
            with contextlib.closing(connection):
                answer = request.send(connection, owner)
        except (OSError, http.client.HTTPException):
            answer = None
        except WrongError as error:
            world.violations.append(str(error))
        if answer is not None and (
            answer.status not in (408, 429, 503, 504) or answer.code in ("cache_memory", "key_limit")
        ):
            return answer
        if time.monotonic() > end:
            return answer
        time.sleep(0.05)
