"""The bodies of jobs for an engine: attention, a verification, or a call about caches or saved forwards.

A body is sent to the engine inside a `Submit` (messages.py). Its type decides how the engine handles it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Literal

import msgspec

from flashpoint_contract.options import Direction, Options

encode = msgspec.msgpack.Encoder().encode
SLOT = -1  # in the place of a segment's number: the slot of a request, which it does not have yet


class PlacedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in shared memory: in row-major order, from byte `offset` of `segment` (a number, see messages.py).

    In a layout, which many requests share, `segment` is SLOT, and `offset` counts from the start of a request's slot.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    segment: int
    offset: int


def with_shapes(tensors: Iterable[PlacedTensor], shapes: Mapping[str, tuple[int, ...]]) -> list[PlacedTensor]:
    """Return the tensors with other shapes of at most as many elements, by name."""
    return [PlacedTensor(t.name, t.dtype, shapes.get(t.name, t.shape), t.segment, t.offset) for t in tensors]


class CacheShape(msgspec.Struct, frozen=True, array_like=True):
    """The sizes of a cache, one number for each layer, and its dtype."""

    kv_heads: tuple[int, ...]
    head_dim: tuple[int, ...]
    value_dim: tuple[int, ...]
    dtype: str

    @property
    def layers(self) -> int:
        return len(self.kv_heads)


LayerSizes = tuple[int, int, int, str]  # the fields of flashpoint_contract.caches.LayerShape


class CacheRef(msgspec.Struct, frozen=True, array_like=True):
    """The caches of `owner` that an attention call reads.

    The k and v of the call are written at the ends of the caches, or at the positions `at`.

    `key` is the idempotency key, or "". With a key, `asked` has the caller's options, packed: a retry has the same.
    `quota` is the maximum number of bytes for the owner; None means no limit.
    `left` is the number of earlier keys to which a single query attends: it replaces the window in the options. With
    −1, the window in the options applies.
    """

    owner: str
    caches: tuple[int, ...]
    shape: LayerSizes
    layer: int
    at: tuple[int, ...] | None
    key: str
    quota: int | None
    left: int
    asked: bytes = b""


class Save(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Save a forward of `nbytes`. `quota` is as in `CacheRef`; `head` describes the forward (access/saved_ids.py)."""

    owner: str
    quota: int | None
    nbytes: int
    head: bytes
    most: int | None = None  # as in `CacheCall`


class Recall(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Compute the gradients of the saved forward `serial` of `owner`.

    `tensors` has the name, dtype and shape of each saved tensor.
    """

    owner: str
    serial: int
    tensors: list[tuple[str, str, tuple[int, ...]]]


class AttentionCall(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Compute attention or its gradients on `backend`. `cache_ref` is set if keys and values are in caches.

    `seed` is the seed of dropout, if the caller has set one: `options` has 0 in its place, so that calls which differ
    in it alone have equal options. `saved` is set if the forward is to be saved, or if the gradients are those of a
    saved forward.
    """

    direction: Direction
    options: msgspec.Raw  # packed Options; equal ones are decoded once: see `read_options`
    backend: str
    seed: int | None = None
    cache_ref: CacheRef | None = None
    saved: Save | Recall | None = None

    @property
    def recall(self) -> Recall | None:
        """The saved forward whose gradients are computed, or None."""
        return self.saved if isinstance(self.saved, Recall) else None

    @property
    def save(self) -> Save | None:
        """How to save the forward, or None if it is not saved."""
        return self.saved if isinstance(self.saved, Save) else None

    @property
    def serials(self) -> tuple[int, ...]:
        """The serial numbers of the caches, or of the saved forward, that the job uses."""
        if self.cache_ref is not None:
            return self.cache_ref.caches
        return () if self.recall is None else (self.recall.serial,)

    @property
    def uses(self) -> bool:
        """Whether the end of the job restarts the time to live of `serials`."""
        return True


class VerifyCall(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Run a verification of the inputs, with the options `request` in JSON.

    Without inputs, `request` is a VerifyRequest in JSON. With `wants_progress`, the engine reports progress.
    """

    request: bytes
    wants_progress: bool = False

    @property
    def serials(self) -> tuple[int, ...]:
        return ()

    @property
    def uses(self) -> bool:
        return False


class CreateCaches(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Create `count` caches. `ttl` is in seconds.

    For each layer, `keep` has the number of last tokens that the cache keeps; None: it keeps all. `beside` is the
    serial of the cache that determined the engine, if there is one: a retry has the same.
    """

    shape: CacheShape
    count: int
    max_length: int | None
    keep: list[int | None]
    ttl: float | None
    beside: int | None = None


class ListCaches(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Describe the owner's next caches whose serial is above `after`, at most `limit`."""

    after: int
    limit: int


class LookAtCaches(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Describe the `caches` of the CacheCall."""


class RenewCaches(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Restart the time to live of the `caches` of the CacheCall."""


class AppendTokens(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Write the inputs k and v, of one sequence, to a layer of the cache: at its end, or `at` a position."""

    layout: str
    layer: int
    at: int | None


class ForkCaches(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Copy caches up to `lengths`, and delete others. `order` has indices into the `caches` of the CacheCall.

    The first `forked` indices name the caches to copy; the other indices name those to delete.
    """

    order: list[int]
    forked: int
    lengths: list[int] | None


class TruncateCache(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Drop the tokens of all layers from `length` on."""

    length: int


class ExportTokens(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Copy the tokens [first, length) of a layer to the outputs. Fails if the layer no longer has exactly these."""

    layer: int
    first: int
    length: int


class DeleteCaches(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Delete the `caches` of the CacheCall, all or none."""


CacheOperation = (
    CreateCaches
    | ListCaches
    | LookAtCaches
    | RenewCaches
    | AppendTokens
    | ForkCaches
    | TruncateCache
    | ExportTokens
    | DeleteCaches
)


class CacheCall(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Run an operation on caches that computes no attention. Other fields are as in `CacheRef`.

    `caches` are unique, except for LookAtCaches.
    """

    owner: str
    operation: CacheOperation
    caches: tuple[int, ...] = ()
    key: str = ""
    quota: int | None = None
    most: int | None = None  # the maximum number of the owner's caches and saved forwards

    @property
    def serials(self) -> tuple[int, ...]:
        return self.caches

    @property
    def uses(self) -> bool:
        match self.operation:
            case LookAtCaches() | ExportTokens():
                return False
        return True


class SavedCall(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Describe or delete saved forwards. `list` describes the owner's next forwards whose serial is above `after`."""

    owner: str
    operation: Literal["list", "look", "delete"]
    forwards: tuple[int, ...] = ()
    after: int = 0

    @property
    def serials(self) -> tuple[int, ...]:
        return self.forwards

    @property
    def uses(self) -> bool:
        return self.operation != "look"


Body = AttentionCall | VerifyCall | CacheCall | SavedCall


def pack_options(options: Options) -> msgspec.Raw:
    return msgspec.Raw(encode(options))


def read_options(packed: msgspec.Raw) -> Options:
    return _read_options(bytes(packed))


@lru_cache(1024)  # checking the options takes as long as decoding the rest of a message
def _read_options(packed: bytes) -> Options:
    return msgspec.msgpack.decode(packed, type=Options)
