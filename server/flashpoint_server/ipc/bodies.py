"""The bodies of jobs for an engine: attention, a verification, or a call about caches or saved forwards.

A body is sent to the engine inside a `Submit` (messages.py). Its type decides how the engine handles it. That of
attention is bytes: a `PlannedCall`, which an HTTP process encodes once for all calls of a plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from flashpoint_contract.caches import LayerShape
from flashpoint_contract.options import Direction, Options
from flashpoint_contract.tensors import TensorInfo

encode = msgspec.msgpack.Encoder().encode
SLOT = -1  # in the place of a segment's number: the slot of a request


class PlacedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in shared memory: in row-major order, from byte `offset` of `segment` (a number, see messages.py).

    If `segment` is SLOT, `offset` counts from the start of the request's slot, so that requests can share layouts.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    segment: int
    offset: int


def with_shapes(tensors: Iterable[PlacedTensor], shapes: Mapping[str, tuple[int, ...]]) -> tuple[PlacedTensor, ...]:
    """Return the tensors with other shapes of at most as many elements, by name."""
    return tuple([PlacedTensor(t.name, t.dtype, shapes.get(t.name, t.shape), t.segment, t.offset) for t in tensors])


class CacheShape(msgspec.Struct, frozen=True, array_like=True):
    """The sizes of a cache, one number for each layer, and its dtype."""

    kv_heads: tuple[int, ...]
    head_dim: tuple[int, ...]
    value_dim: tuple[int, ...]
    dtype: str

    @property
    def layers(self) -> int:
        return len(self.kv_heads)


class PlannedCall(msgspec.Struct, frozen=True, array_like=True):
    """Compute attention or its gradients on `backend`: what all calls of a plan have in common.

    `options` has the dropout seed 0 in the place of any other. If keys and values are in caches, `layer` is the shape
    of their layer, and `caches` their number. `recalled` are the tensors of the saved forward that the calls use.
    """

    direction: Direction
    options: Options
    backend: str
    inputs: tuple[PlacedTensor, ...]
    outputs: tuple[PlacedTensor, ...]
    layer: LayerShape | None = None
    caches: int = 0
    recalled: tuple[tuple[str, TensorInfo], ...] = ()


read_planned = msgspec.msgpack.Decoder(PlannedCall).decode


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
    """Compute the gradients of the saved forward `serial` of `owner`."""

    owner: str
    serial: int


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


Body = bytes | VerifyCall | CacheCall | SavedCall
