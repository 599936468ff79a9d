"""Ids of saved forwards. An id contains the engine of the forward and its problem (compare cache_ids.py).

    "s" + base64url(HMAC-SHA-256(secret, owner and payload)[:16] + payload)

The payload: the engine's incarnation and the forward's serial number, 8 bytes each; the length of the replica's name in
one byte; the name; and the forward's head. The head is MessagePack: the options that are not defaults; names, dtypes
and shapes of the inputs; and, if the forward had index tensors, its extent (`Extent`). So the server can check a
gradient call and estimate its cost before it reads the body, and need not ask an engine.
"""

from __future__ import annotations

import hmac
import struct
from typing import Any, NamedTuple

import msgspec

from flashpoint_contract.options import OPTIONS, Options
from flashpoint_contract.saved import ID_LENGTH, plan_saved
from flashpoint_contract.spec import Spec
from flashpoint_contract.tensors import TensorInfo
from flashpoint_kernels.problems.cost import Extent
from flashpoint_server.access.cache_ids import CacheIds, opened, sealed

_NUMBERS = struct.Struct(">QQB")


class SavedId(NamedTuple):
    """The parts of an id. `forward` is the problem that was saved; `extent` is None if it had no index tensors."""

    replica: str
    incarnation: int
    serial: int
    forward: Spec
    extent: Extent | None


class _Head(msgspec.Struct, frozen=True, array_like=True):
    options: dict[str, Any]
    tensors: list[tuple[str, str, tuple[int, ...]]]
    extent: tuple[int, int, int, int] | None


class SavedIds:
    """Makes and reads ids of saved forwards, with the replica name of `caches` and a secret derived from its secret."""

    def __init__(self, caches: CacheIds) -> None:
        self._replica = caches.replica.encode()
        self._secret = hmac.digest(caches.secret, b"saved forwards", "sha256")

    @staticmethod
    def head(forward: Spec, seed: int | None, extent: Extent | None) -> bytes:
        """Return the head of an id for a problem from `plan_saved`, computed with this dropout seed.

        `extent` is None if it has no index tensors.
        """
        options = {name: getattr(forward.options, name) for name in OPTIONS if name != "return_lse"}
        options["dropout_seed"] = seed
        chosen = {name: value for name, value in options.items() if value != OPTIONS[name].default}
        tensors = [(name, info.dtype, info.shape) for name, info in forward.tensors.items()]
        return msgspec.msgpack.encode(_Head(chosen, tensors, extent))

    @staticmethod
    def read_head(head: bytes) -> tuple[Spec, Extent | None]:
        """Return the forward's problem from a head, and its extent."""
        decoded = msgspec.msgpack.decode(head, type=_Head)
        infos = {name: TensorInfo(dtype, shape) for name, dtype, shape in decoded.tensors}
        extent = None if decoded.extent is None else Extent(*decoded.extent)
        return plan_saved(infos, Options(**decoded.options)), extent

    def make(self, owner: str, incarnation: int, serial: int, head: bytes) -> str:
        """Return the id of a saved forward. Equal arguments give equal ids."""
        numbers = _NUMBERS.pack(incarnation, serial, len(self._replica))
        return "s" + sealed(self._secret, owner, numbers + self._replica + head)

    def read(self, owner: str, text: str) -> SavedId | None:
        """Return the parts of an id of this owner; None if the id is not valid."""
        if not text.startswith("s") or len(text) > ID_LENGTH:
            return None
        if (payload := opened(self._secret, owner, text[1:])) is None:
            return None
        incarnation, serial, length = _NUMBERS.unpack_from(payload)
        head = _NUMBERS.size + length
        return SavedId(payload[_NUMBERS.size : head].decode(), incarnation, serial, *self.read_head(payload[head:]))
