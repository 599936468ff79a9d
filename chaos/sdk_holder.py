"""A caller that uses the caches, retries and idempotency keys of the Python SDK's `Client`.

`Client` does not report whether a failed call took effect. After the failure, the cache must have either the complete
state before the call or the complete state after it. The caller checks this, and continues with another cache.
"""

from __future__ import annotations

import contextlib
import time

import numpy as np

import flashpoint
from chaos.callers import AFTER_NOTHING, HANG, Caller, WrongError
from chaos.held import DIM, KV_HEADS, LAYERS, Q_HEADS, SHAPE, dense, empty
from chaos.holders import is_over
from chaos.keys import SDK, key_of
from chaos.service import Life
from flashpoint._calls.caches import Described
from flashpoint._calls.service import Affinity

MOST = 60  # a write to a layer of this length or more starts at an earlier token, and removes later tokens
GONE = ("cache_lost", "cache_not_found")


class SdkHolder(Caller):
    """A caller that has one cache."""

    owner = SDK
    cache: flashpoint.Cache | None = None
    life = Life(0, None)

    def __init__(self, name, load, rng):
        super().__init__(name, load, rng)
        self.states: list[list[np.ndarray]] = []  # possible states of the cache: one, or two after a failed call

    def turn(self) -> str:
        return self.call(self.ask)

    def probe(self) -> str:
        kinds = [self.turn() for _ in range(4)]
        return next((kind for kind in kinds if kind != "right"), "right")

    def ask(self) -> str:
        try:
            self.step(self.client(self.owner, retries=2))
        except flashpoint.CacheError as error:
            restarted = self.life.starts != self.load.service.starts
            if error.code not in GONE or not (restarted if error.code == GONE[1] else is_over(self.life)):
                raise WrongError(f"{error.code}, and the cache should be there") from None
            self.cache = None
            return f"{error.status} {error.code}"
        return ""

    def step(self, client: flashpoint.Client) -> None:
        if self.cache is None:
            life = self.load.service.life()
            self.cache = client.cache(**SHAPE)
            self.life = life if life == self.load.service.life() else Life(-1, None)
            self.states = [[empty() for _ in range(LAYERS)]]
        elif len(self.states) > 1:
            self.compare(self.cache)
            self.cache.delete()
            self.cache = None
        elif self.rng.random() < 0.3:
            self.compare(self.cache)
        elif self.rng.random() < 0.2:
            self.truncate(self.cache)
        else:
            self.write(self.cache)

    def compare(self, cache: flashpoint.Cache) -> None:
        """Check that the cache is in one of its possible states. Raises WrongError."""
        layers = [cache.tensors(layer) for layer in range(LAYERS)]
        state_now = [np.stack(layer)[:, 0].swapaxes(1, 2) for layer in layers]
        if not any(all(map(np.array_equal, state_now, state)) for state in self.states):
            raise WrongError(f"it holds {[layer.shape for layer in state_now]}, none of {len(self.states)} states")

    def truncate(self, cache: flashpoint.Cache) -> None:
        end = int(self.rng.integers(cache.length + 1))
        self.states.append([layer[:, :end] for layer in self.states[0]])
        cache.truncate(end)
        self.settle(cache)

    def write(self, cache: flashpoint.Cache) -> None:
        layer, count = int(self.rng.integers(LAYERS)), int(self.rng.integers(1, 5))
        tokens = self.rng.standard_normal((2, count, KV_HEADS, DIM), dtype=np.float32)
        q = self.rng.standard_normal((1, Q_HEADS, count, DIM), dtype=np.float32)
        before = self.states[0]
        at = before[layer].shape[1] if before[layer].shape[1] < MOST else int(self.rng.integers(MOST))
        after = [*before]
        after[layer] = np.concatenate((before[layer][:, :at], tokens), 1)
        self.states.append(after)
        k, v = tokens.swapaxes(1, 2)
        o = cache.attention(q, k[None], v[None], layer=layer, at=at, causal=True)
        self.settle(cache)
        if not np.allclose(o[0], dense(q[0], after[layer], causal=True), 1e-4, 1e-5):
            raise WrongError("attention over the client's cache differs")

    def settle(self, cache: flashpoint.Cache) -> None:
        """After a successful call, drop the state before the call. Raises WrongError if lengths are wrong."""
        del self.states[0]
        if cache.lengths != [layer.shape[1] for layer in self.states[0]]:
            raise WrongError(f"lengths {cache.lengths}")

    def rest(self) -> None:
        """Delete all caches of the key, because a failed creation may have made one."""
        self.close()
        end = time.monotonic() + HANG
        while (left := self.load.service.caches(self.owner)) != [] and time.monotonic() < end:
            with contextlib.suppress(flashpoint.FlashpointError), self.fresh() as client:
                for described in left or ():
                    flashpoint.Cache(client, Described(described, Affinity())).delete()
            time.sleep(AFTER_NOTHING)

    def fresh(self) -> flashpoint.Client:
        return flashpoint.Client(self.load.url, api_key=key_of(self.owner), timeout=self.load.patience)

    def leave(self) -> None:
        if self.over.is_set():
            self.close()

    def close(self) -> None:
        """Close the client, and forget its cache."""
        super().leave()
        self.cache = None
