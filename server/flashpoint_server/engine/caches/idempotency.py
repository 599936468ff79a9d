"""Idempotency keys of writes to caches: the payload that each key stands for, and the first answers of creations.

A retry has the key and the payload of the first call. The payload is the operation, its options, and the names, dtypes,
shapes and bytes of its tensors. Header fields are no part of it: the deadline of a retry is another one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from flashpoint_contract.tensors import ITEMSIZE
from flashpoint_server.engine.caches.cache import Terms
from flashpoint_server.engine.state.memory import MappedMemory
from flashpoint_server.engine.state.owner_lru import OwnerLru
from flashpoint_server.ipc.bodies import PlacedTensor, encode
from flashpoint_server.refusal import Refusal

ANSWERS = 1 << 16  # maximum number of caches in the answers that are stored for repeated creations and forks
PAYLOADS = 1 << 16  # maximum number of keys whose payloads are stored, of all operations
REUSED = "idempotency_key_reused", "its idempotency key belongs to another call: send each call with a key of its own"
_DIGEST = 16  # bytes of a payload's digest


class _First(NamedTuple):
    payload: bytes
    serials: list[int]


class IdempotencyKeys:
    """The keys of all owners. Acquire the store's lock to use it."""

    def __init__(self) -> None:
        self._payloads: OwnerLru[bytes] = OwnerLru(PAYLOADS)
        self._answers: OwnerLru[_First] = OwnerLru(ANSWERS)

    def check(self, terms: Terms) -> list[int] | None:
        """Return the caches that the first call with this key created, if it was a creation or a fork, else None.

        Raises Refusal 422 if that call had another payload.
        """
        if not terms.key:
            return None
        first = self._answers.get(terms.owner, terms.key)
        known = self._payloads.get(terms.owner, terms.key) if first is None else first.payload
        if known is not None and known != terms.payload:
            raise Refusal(*REUSED)
        return None if first is None else first.serials

    def done(self, terms: Terms, created: Sequence[int] = ()) -> None:
        """Record that a call took effect. `created` are the serials of the caches that it created."""
        if not terms.key:
            return
        if created:
            self._answers.put(terms.owner, terms.key, _First(terms.payload, list(created)), len(created))
        else:
            self._payloads.put(terms.owner, terms.key, terms.payload)


def payload_of(call: Any, tensors: Iterable[PlacedTensor], memory: MappedMemory) -> bytes:
    """Return the digest of a call's payload. `call` is the operation with its options; the tensors are in `memory`."""
    digest = hashlib.sha256(encode(call))
    for t in sorted(tensors, key=attrgetter("name")):
        digest.update(encode((t.name, t.dtype, t.shape)))
        if nbytes := math.prod(t.shape) * ITEMSIZE[t.dtype]:
            memory_map, start = memory.find(t)
            with memoryview(memory_map) as segment, segment[start : start + nbytes] as data:
                digest.update(data)
    return digest.digest()[:_DIGEST]
