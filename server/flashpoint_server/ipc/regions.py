"""System shared memory: what callers on this host have registered, so that their tensors never move.

A region is a part of a POSIX shared memory object, known by a name to its owner alone, whose API key registered it; the
object's key, which would open it to anyone, is not kept. To the engines it is one more segment: they are given its
descriptor, and compute in it. It is held while a request may write there, whether it is still registered or not.

Its owner may write to it at any time, so nothing that is checked is read from it again (`Regions.read`), and may make
it shorter, which ends the engine that computes in it: this is for callers who are trusted.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from flashpoint_contract.tensors import ITEMSIZE, TensorInfo
from flashpoint_server.ipc.memory import Segment
from flashpoint_server.refusal import Refusal, invalid

MOST = 256  # regions: a mapping and a descriptor each, in the engine too
_OBJECTS = Path("/dev/shm")  # where Linux keeps them
_KEY = re.compile(r"/?[^/\0]{1,255}")


class Shared(NamedTuple):
    """Where a request says that a tensor lies: `size` bytes, from `offset` on in a region of that name."""

    region: str
    offset: int
    size: int


class Region:
    """`size` bytes from `offset` on. As a segment it is mapped from its object's beginning, whose `identity` it has."""

    def __init__(self, name: str, fd: int, offset: int, size: int, ended: Callable[[Region], None]) -> None:
        self.name = name
        self.fd = fd
        self.offset = offset
        self.size = size
        self.number = next(Segment.numbers)
        self.mapped = offset + size
        about = os.fstat(fd)
        self.identity = (about.st_dev, about.st_ino)
        self._ended = ended
        self._holders = 1  # who registered it

    def hold(self) -> None:
        """One more holder, which will call `release` once."""
        self._holders += 1

    def release(self) -> None:
        self._holders -= 1
        if not self._holders:
            os.close(self.fd)
            self._ended(self)

    @property
    def whole(self) -> bool:
        """Whether its object is still as long as it was."""
        return os.fstat(self.fd).st_size >= self.mapped


class Regions:
    """At most `limit` bytes; 0: there are none. `dropped` is told the number of every segment that is given back."""

    def __init__(self, limit: int, dropped: Callable[[int], None]) -> None:
        self.limit = limit
        self._dropped = dropped
        self._named: dict[tuple[str, str], Region] = {}  # by their owner and name
        self._bytes = 0  # of those that are held, too

    def register(self, owner: str, name: str, key: str, offset: int, size: int) -> None:
        """Raises Refusal 413 and 422."""
        if (owner, name) in self._named:
            raise invalid([("name", f"region {name!r} is registered already")])
        if len(self._named) >= MOST or self._bytes + offset + size > self.limit:
            detail = f"{len(self._named)} regions with {self._bytes} bytes are registered, and this has {offset + size}"
            raise Refusal("work_too_large", f"{detail}: over the limits of {MOST} and of {self.limit} bytes")
        region = self._named[owner, name] = Region(name, _open(key, offset + size), offset, size, self._ended)
        self._bytes += region.mapped

    def unregister(self, owner: str, name: str) -> None:
        """Nothing happens where there is no such region, as in Triton: its clients begin by unregistering."""
        if (region := self._named.pop((owner, name), None)) is not None:
            region.release()

    def unregister_all(self, owner: str) -> None:
        for region in self.all(owner):
            self.unregister(owner, region.name)

    def close(self) -> None:
        """Unregister those of all owners."""
        while self._named:
            self._named.popitem()[1].release()

    def find(self, owner: str, name: str) -> Region:
        """Raises Refusal 404."""
        if (owner, name) not in self._named:
            raise Refusal("not_found", f"no region {name!r} is registered")
        return self._named[owner, name]

    def all(self, owner: str) -> list[Region]:
        return [region for (its_owner, _), region in self._named.items() if its_owner == owner]

    def locate(
        self, owner: str, tensor: str, info: TensorInfo, shared: Shared, *, spare: bool = False
    ) -> tuple[Region, int]:
        """Where a tensor lies: its region, and from where on in that segment. Raises Refusal 422.

        With `spare` its place may have more bytes than it.
        """
        region = self._named.get((owner, shared.region))
        if region is None:
            off = "" if self.limit else "; shared memory is off on this server"
            raise invalid([(tensor, f"no region {shared.region!r} is registered{off}")])
        if shared.size < info.nbytes or (shared.size > info.nbytes and not spare):
            due = f"at least {info.nbytes}" if spare else f"{info.nbytes}"
            said = f"{due} bytes, which a tensor of its shape and datatype has, not {shared.size}"
            raise invalid([(tensor, f"shared_memory_byte_size must be {said}")])
        if shared.offset + shared.size > region.size:
            raise invalid([(tensor, f"bytes {shared.offset} to {shared.offset + shared.size} are not in the region")])
        if not region.whole:
            raise invalid([(tensor, f"region {shared.region!r} is not as long any more as it was")])
        return region, region.offset + shared.offset

    def read(self, owner: str, tensor: str, info: TensorInfo, shared: Shared) -> bytes:
        """A small tensor's bytes, as they are now. Raises Refusal 422."""
        region, start = self.locate(owner, tensor, info, shared)
        return os.pread(region.fd, info.nbytes, start)

    def _ended(self, region: Region) -> None:
        self._bytes -= region.mapped
        self._dropped(region.number)


def check_apart(
    inputs: Mapping[str, tuple[Region, int]], outputs: Mapping[str, tuple[Region, int]], infos: Mapping[str, TensorInfo]
) -> None:
    """No output over another tensor, and each where its elements may be written. Raises Refusal 422."""
    taken = [(name, *place) for name, place in (*inputs.items(), *outputs.items())]
    for name, (region, start) in outputs.items():
        if start % ITEMSIZE[infos[name].dtype]:
            raise invalid([(name, f"an output must lie at a multiple of {ITEMSIZE[infos[name].dtype]} bytes")])
        for other, its_region, its_start in taken:
            if other == name or region.identity != its_region.identity:
                continue
            if start < its_start + infos[other].nbytes and its_start < start + infos[name].nbytes:
                raise invalid([(name, f"lies over {other!r} in shared memory")])


def _open(key: str, size: int) -> int:
    """The object's descriptor. Raises Refusal 422, which does not repeat the key."""
    name = key.removeprefix("/")
    if not _KEY.fullmatch(key) or name in (".", ".."):
        raise invalid([("key", "is not the name of a shared memory object")])
    try:
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(_OBJECTS / name, flags)
    except OSError:
        raise invalid([("key", "no shared memory object that this server may use has it")]) from None
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode) or about.st_size < size:
        os.close(fd)
        raise invalid([("byte_size", f"offset and byte_size reach to {size}, beyond the object's end")])
    return fd
