"""Helpers for tests of `CacheStore` without an engine: a clock that the test sets, and small caches with two layers."""

import numpy as np
import pytest
import torch

from flashpoint_contract.caches import CHUNK
from flashpoint_server.engine.caches.cache import CACHE_BYTES, LAYER_BYTES, Terms
from flashpoint_server.engine.caches.store import CacheStore
from flashpoint_server.engine.state.ledger import Ledger
from flashpoint_server.ipc.bodies import CacheShape
from flashpoint_server.refusal import Refusal

HEADS, D, DV, LAYERS = 2, 4, 3, 2
SHAPE = CacheShape((HEADS,) * LAYERS, (D,) * LAYERS, (DV,) * LAYERS, "float32")
TOKEN = HEADS * (D + DV) * 4
BASE = CACHE_BYTES + LAYER_BYTES * LAYERS
LIMIT = 24 * CHUNK * TOKEN
TTL = 100.0


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def store_of(limit=LIMIT, clock=None, paged=False, most=1 << 16):
    return CacheStore(Ledger(limit, clock or Clock(), most), TTL, paged=paged)


def create(store, owner="alice", count=1, **how):
    request = {"max_length": None, "keep": [None] * LAYERS, "ttl": None, **how}
    terms = Terms(owner, request.pop("quota", None), request.pop("key", ""), most=request.pop("most", None))
    return [record.serial for record in store.create(terms, SHAPE, count, **request)]


def tokens(count, seed=0):
    values = np.random.default_rng(seed).standard_normal((HEADS, count, D + DV), np.float32)
    return torch.from_numpy(values[..., :D]), torch.from_numpy(values[..., D:])


def read(store, owner, serial, layer):
    """Return (the position of a layer's first present token, the k and v of its tokens, joined along D)."""
    (cache,) = store.find(Terms(owner), [serial])
    track = cache.tracks[layer]
    runs = track.pieces(track.first, track.length)
    pieces = [torch.cat((k, v), -1) for run in runs for k, v in zip(run.k, run.v, strict=True)]
    return track.first, torch.cat(pieces, 1).numpy() if pieces else np.zeros((HEADS, 0, D + DV), np.float32)


def refused(code, call, *arguments, **keywords):
    with pytest.raises(Refusal) as error:
        call(*arguments, **keywords)
    assert error.value.code == code, error.value.code
    return error.value
