"""System shared memory: regions that callers on this host have registered, so that their tensors are never copied.

A region is a part of a POSIX shared memory object. Only the owner of the API key that registered it can use its name.
The name of the object in the system, with which any process could open it, is not stored. For the engines a region is
another segment: they get its descriptor and compute in it. The region stays open as long as a request may write there,
even if it is unregistered.

The owner may write to the region at any time, so checked values are copied first (`Regions.read`). The owner may also
shorten the object, which kills an engine that computes in it: use this only for trusted callers.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import NamedTuple

from flashpoint_contract.tensors import ITEMSIZE, TensorInfo
from flashpoint_server.refusal import Refusal, invalid

SEGMENT_NUMBERS = count()  # ids of segments on the channels to the engines
MOST = 256  # maximum number of regions: each needs a mapping and a file descriptor, in the engine too
_OBJECTS = Path("/dev/shm")  # the directory of shared memory objects on Linux
_KEY = re.compile(r"/?[^/\0]{1,255}")


class RegionSlice(NamedTuple):
    """The location of a tensor in a request: `size` bytes at `offset` in the region of this name."""

    region: str
    offset: int
    size: int


class Region:
    """`size` bytes at `offset` of a shared memory object. Engines map the first `mapped` bytes of the object.

    `identity` identifies the object.
    """

    def __init__(self, name: str, fd: int, offset: int, size: int, ended: Callable[[Region], None]) -> None:
        self.name = name
        self.fd = fd
        self.offset = offset
        self.size = size
        self.number = next(SEGMENT_NUMBERS)
        self.mapped = offset + size
        about = os.fstat(fd)
        self.identity = (about.st_dev, about.st_ino)
        self._ended = ended
        self._holders = 1  # the first holder is the registration

    def hold(self) -> None:
        """Add a holder, which must call `release` once."""
        self._holders += 1

    def release(self) -> None:
        self._holders -= 1
        if not self._holders:
            os.close(self.fd)
            self._ended(self)

    @property
    def whole(self) -> bool:
        """Whether the shared memory object is still long enough for the region."""
        return os.fstat(self.fd).st_size >= self.mapped


class Regions:
    """The registered regions, of at most `limit` bytes in all. `dropped` is called with a freed region's `number`."""

    def __init__(self, limit: int, dropped: Callable[[int], None]) -> None:
        self.limit = limit
        self._dropped = dropped
        self._named: dict[tuple[str, str], Region] = {}  # by owner and name
        self._bytes = 0  # includes unregistered regions that requests still use

    def register(self, owner: str, name: str, key: str, offset: int, size: int) -> None:
        """Register a region. Raises Refusal 413 and 422."""
        if (owner, name) in self._named:
            raise invalid([("name", f"region {name!r} is already registered; unregister it first")])
        if len(self._named) >= MOST or self._bytes + offset + size > self.limit:
            detail = (
                f"{len(self._named)} regions with {self._bytes} bytes are registered, and this one has {offset + size}"
            )
            raise Refusal("work_too_large", f"{detail}: the limits are {MOST} regions and {self.limit} bytes")
        region = self._named[owner, name] = Region(name, _open(key, offset + size), offset, size, self._ended)
        self._bytes += region.mapped

    def unregister(self, owner: str, name: str) -> None:
        """Unregister a region; ignore an unknown name.

        Triton Inference Server also ignores it, and its clients unregister a name before they register it.
        """
        if (region := self._named.pop((owner, name), None)) is not None:
            region.release()

    def unregister_all(self, owner: str) -> None:
        for region in self.all(owner):
            self.unregister(owner, region.name)

    def close(self) -> None:
        """Unregister the regions of all owners."""
        while self._named:
            self._named.popitem()[1].release()

    def find(self, owner: str, name: str) -> Region:
        """Return a region. Raises Refusal 404."""
        if (owner, name) not in self._named:
            raise Refusal("not_found", f"region {name!r} is not registered")
        return self._named[owner, name]

    def all(self, owner: str) -> list[Region]:
        return [region for (its_owner, _), region in self._named.items() if its_owner == owner]

    def locate(
        self, owner: str, tensor: str, info: TensorInfo, shared: RegionSlice, *, spare: bool = False
    ) -> tuple[Region, int]:
        """Return a tensor's region, and its offset in the shared memory object. Raises Refusal 422.

        With `spare`, the location may be larger than the tensor.
        """
        region = self._named.get((owner, shared.region))
        if region is None:
            off = "" if self.limit else "; shared memory is off on this server"
            raise invalid([(tensor, f"region {shared.region!r} is not registered{off}")])
        if shared.size < info.nbytes or (shared.size > info.nbytes and not spare):
            due = f"at least {info.nbytes}" if spare else f"{info.nbytes}"
            expected = f"{due} bytes for this shape and datatype, not {shared.size}"
            raise invalid([(tensor, f"shared_memory_byte_size must be {expected}")])
        if shared.offset + shared.size > region.size:
            raise invalid(
                [(tensor, f"bytes {shared.offset} to {shared.offset + shared.size} exceed the region's {region.size}")]
            )
        if not region.whole:
            raise invalid([(tensor, f"the object of region {shared.region!r} has become shorter")])
        return region, region.offset + shared.offset

    def read(self, owner: str, tensor: str, info: TensorInfo, shared: RegionSlice) -> bytes:
        """Return a copy of a small tensor's bytes. Raises Refusal 422."""
        region, start = self.locate(owner, tensor, info, shared)
        return os.pread(region.fd, info.nbytes, start)

    def _ended(self, region: Region) -> None:
        self._bytes -= region.mapped
        self._dropped(region.number)


def provide(key: str, size: int) -> None:
    """Let the system provide the memory of a shared memory object, which takes a quarter of a second for a GiB.

    An engine that wrote to a page for which there is no memory would be killed. Raises Refusal 422 and 503.
    """
    fd = _open(key, size)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        detail = f"the system has no memory for the object's {size} bytes ({error.strerror}): make room in /dev/shm"
        raise Refusal("out_of_memory", detail) from None
    finally:
        os.close(fd)


def check_apart(
    inputs: Mapping[str, tuple[Region, int]], outputs: Mapping[str, tuple[Region, int]], infos: Mapping[str, TensorInfo]
) -> None:
    """Raise Refusal 422 if an output overlaps another tensor, or if its alignment does not fit its dtype."""
    taken = [(name, *place) for name, place in (*inputs.items(), *outputs.items())]
    for name, (region, start) in outputs.items():
        if start % ITEMSIZE[infos[name].dtype]:
            raise invalid(
                [(name, f"the offset of an output must be a multiple of {ITEMSIZE[infos[name].dtype]} bytes")]
            )
        for other, its_region, its_start in taken:
            if other == name or region.identity != its_region.identity:
                continue
            if start < its_start + infos[other].nbytes and its_start < start + infos[name].nbytes:
                raise invalid([(name, f"overlaps {other!r} in shared memory")])


def _open(key: str, size: int) -> int:
    """Return a descriptor of the shared memory object `key`. Raises Refusal 422, whose text does not contain `key`."""
    name = key.removeprefix("/")
    if not _KEY.fullmatch(key) or name in (".", ".."):
        raise invalid([("key", "is not the name of a shared memory object")])
    try:
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(_OBJECTS / name, flags)
    except OSError:
        raise invalid([("key", "this server cannot open a shared memory object with this key")]) from None
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode) or about.st_size < size:
        os.close(fd)
        raise invalid([("byte_size", f"offset and byte_size end at {size}, which is beyond the object's end")])
    return fd
