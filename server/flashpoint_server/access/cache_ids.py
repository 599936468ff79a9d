"""Ids of caches. An id contains the cache's engine and shape, so that the server can check a call without the engine.

    "c" + base64url(HMAC-SHA-256(secret, owner and payload)[:16] + payload)

The payload is MessagePack: the replica's name, the engine's incarnation, the cache's serial number in the engine, its
dtype, and its layers as a list of distinct sizes and an index into it for each layer. All HTTP processes of the service
have the secret for the HMAC. It is drawn when the service starts, or derived from `--cache-secret`: replicas with the
same cache secret can read each other's ids.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from functools import lru_cache
from typing import NamedTuple

import msgspec

from flashpoint_contract.caches import ID_LENGTH, LayerShape
from flashpoint_server.config.settings import Settings
from flashpoint_server.ipc.bodies import CacheShape
from flashpoint_server.ipc.counts import WorkerGroup
from flashpoint_server.ipc.memory import NamedMemory

MOST_LAYERS = 512
READ_AGAIN = 1024  # number of decoded ids in the LRU cache, each at most ID_LENGTH characters
MOST_SIZES = 16  # maximum number of distinct layer sizes in one cache
_MAC = 16  # bytes of the HMAC
_SECRET = 32  # bytes of the secret


class CacheId(NamedTuple):
    """The parts of a cache's id."""

    replica: str
    incarnation: int
    serial: int
    shape: CacheShape

    def layer(self, number: int) -> LayerShape:
        """Return the shape of a layer."""
        shape = self.shape
        return LayerShape(shape.kv_heads[number], shape.head_dim[number], shape.value_dim[number], shape.dtype)


class _Payload(msgspec.Struct, frozen=True, array_like=True):
    replica: str
    incarnation: int
    serial: int
    dtype: str
    sizes: list[tuple[int, int, int]]
    layers: bytes


class CacheIds:
    """Makes and reads ids. `replica` is the name of this service among the replicas behind a load balancer."""

    def __init__(self, settings: Settings, shared: WorkerGroup) -> None:
        drawn = shared_secret(shared.memory)
        self.secret = drawn
        if settings.cache_secret is not None:
            self.secret = hashlib.sha256(settings.cache_secret.get_secret_value().encode()).digest()
        self.replica = settings.replica or hashlib.sha256(drawn + b"replica").hexdigest()[:16]
        self.read = lru_cache(READ_AGAIN)(self._read)  # most calls use recently used caches

    def make(self, owner: str, incarnation: int, serial: int, shape: CacheShape) -> str:
        """Return the id of a cache. Equal arguments give equal ids."""
        layers = list(zip(shape.kv_heads, shape.head_dim, shape.value_dim, strict=True))
        sizes = list(dict.fromkeys(layers))
        places = bytes(sizes.index(one) for one in layers)
        payload = msgspec.msgpack.encode(_Payload(self.replica, incarnation, serial, shape.dtype, sizes, places))
        return "c" + sealed(self.secret, owner, payload)

    def _read(self, owner: str, text: str) -> CacheId | None:
        """Return the parts of an id of this owner; None if the id is not valid."""
        if not text.startswith("c") or len(text) > ID_LENGTH:
            return None
        if (payload := opened(self.secret, owner, text[1:])) is None:
            return None
        decoded = msgspec.msgpack.decode(payload, type=_Payload)
        kv_heads, head_dim, value_dim = zip(*(decoded.sizes[place] for place in decoded.layers), strict=True)
        shape = CacheShape(kv_heads, head_dim, value_dim, decoded.dtype)
        return CacheId(decoded.replica, decoded.incarnation, decoded.serial, shape)


def sealed(secret: bytes, owner: str, payload: bytes) -> str:
    """Return an id: base64url of the payload, with an HMAC that proves that the service made it for this owner."""
    return base64.urlsafe_b64encode(_mac(secret, owner, payload) + payload).rstrip(b"=").decode()


def opened(secret: bytes, owner: str, text: str) -> bytes | None:
    """Return the payload of an id that `sealed` made for this owner; None for other texts."""
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    mac, payload = raw[:_MAC], raw[_MAC:]
    return payload if hmac.compare_digest(mac, _mac(secret, owner, payload)) else None


def _mac(secret: bytes, owner: str, payload: bytes) -> bytes:
    name = owner.encode()
    message = len(name).to_bytes(4, "little") + name + payload
    return hmac.digest(secret, message, hashlib.sha256)[:_MAC]


def shared_secret(memory: NamedMemory | None) -> bytes:
    """Return the secret that all HTTP processes with this memory share. The first process generates it."""
    drawn = secrets.token_bytes(_SECRET)
    if memory is None:
        return drawn
    block, offset = memory.block("caches.secret", _SECRET + 1)
    with memory.locked(offset, 1, wait=True):
        if not block[_SECRET]:  # this byte says that the secret is drawn
            block[:_SECRET] = drawn
            block[_SECRET] = 1
        return bytes(block[:_SECRET])
