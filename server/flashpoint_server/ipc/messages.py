"""The messages between HTTP processes and engines, and the socket that carries them.

Only descriptors cross: tensors lie in shared memory (memory.py), whose file descriptors travel beside `Attach`. The
socket is a Unix one that keeps message boundaries (SOCK_SEQPACKET): a message comes whole or not at all, and an end of
file says that the other process is gone, and with it every mapping it had.
"""

from __future__ import annotations

import socket
from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Generic, TypeVar

import msgspec

from flashpoint_contract.options import Direction, Options
from flashpoint_kernels.cost import Rates

LARGEST_MESSAGE = 1 << 17
MOST_LISTED = 64  # saved forwards of one message, each with up to a KiB of its head
MOST_ERRORS = 512  # of a Failed: such a list fits into a message
_RECORD, _RECORD_LAYER = 256, 32  # bytes of a CacheRecord, and of each layer in it, at most
_CUT = int(socket.MSG_TRUNC)  # as a number: to compare flags at each message takes a tenth of its way
_ROOM = socket.CMSG_SPACE(4 * array("i").itemsize)  # for the descriptors beside a message: `Attach` has one


class PlacedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in a segment, row-major from `offset` on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    segment: int
    offset: int


class Attach(msgspec.Struct, frozen=True, tag=True):
    """To the engine: map this segment; its descriptor comes with the message."""

    segment: int
    size: int


class Detach(msgspec.Struct, frozen=True, tag=True):
    """To the engine: this segment will not be named again."""

    segment: int


class CacheShape(msgspec.Struct, frozen=True, array_like=True):
    """The sizes of a cache, one number for each layer, and its dtype."""

    kv_heads: tuple[int, ...]
    head_dim: tuple[int, ...]
    value_dim: tuple[int, ...]
    dtype: str

    @property
    def layers(self) -> int:
        return len(self.kv_heads)


LayerSizes = tuple[int, int, int, str]  # flashpoint_contract.caches.LayerShape


class CacheRecord(msgspec.Struct, frozen=True):
    """A cache as it is: `lengths`, and `firsts` tokens that `keep` has left, of each layer; seconds for times."""

    serial: int
    shape: CacheShape
    max_length: int | None
    keep: list[int | None]
    ttl: float
    lengths: list[int]
    firsts: list[int]
    nbytes: int
    expires_in: float


class Held(msgspec.Struct, frozen=True, array_like=True):
    """The caches of `owner` that a Submit attends over, and where it writes its k and v: at the end, or `at`.

    `key` is the idempotency key, "" for none; `quota` is how many bytes the owner may hold, None for no limit. `left`
    is how many keys before its own a single query sees, where the options do not say that; −1 for any.
    """

    owner: str
    caches: tuple[int, ...]
    shape: LayerSizes
    layer: int
    at: tuple[int, ...] | None
    key: str
    quota: int | None
    left: int


class Save(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Keep a forward, which counts for `nbytes`; `quota` as in `Held`. `head` says what it is (access/saved_ids.py)."""

    owner: str
    quota: int | None
    nbytes: int
    head: bytes


class Recall(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The saved forward of `owner` whose tensors a gradient needs beside its inputs: name, dtype and shape of each."""

    owner: str
    serial: int
    tensors: list[tuple[str, str, tuple[int, ...]]]


class SavedRecord(msgspec.Struct, frozen=True):
    """A saved forward as it is, with its head; seconds for times."""

    serial: int
    head: bytes
    nbytes: int
    ttl: float
    expires_in: float


class Submit(msgspec.Struct, frozen=True, tag=True):
    """To the engine: compute. `rank` and `deadline` are in `time.monotonic` seconds, which all processes share.

    Where `mark` says, in `segment`, the engine writes a 1 before it begins: what it has not begun when it dies is
    another's to do.
    """

    id: int
    request_id: str
    direction: Direction
    options: msgspec.Raw  # Options, which are the same again and again: see `read_options`
    backend: str
    segment: int
    inputs: list[PlacedTensor]
    outputs: list[PlacedTensor]
    mark: int
    flops: int
    seconds: float  # predicted, of one core
    rank: float
    deadline: float | None
    held: Held | None = None
    saved: Save | Recall | None = None


class Prove(msgspec.Struct, frozen=True, tag=True):
    """To the engine: verify, beside what it serves. Where there are `inputs`, `request` is their options, else all of
    a VerifyRequest, in JSON. With `told`, the engine says how far it is. All else as in `Submit`."""

    id: int
    request_id: str
    request: bytes
    segment: int
    inputs: list[PlacedTensor]
    mark: int
    flops: int
    seconds: float
    rank: float
    deadline: float | None
    told: bool = False


class AskCaches(msgspec.Struct, frozen=True, tag=True):
    """To the engine: what concerns caches and computes nothing. All else as in `Submit` and `Held`.

    `what` is create, look, list, append, fork, truncate, renew, export or delete; `arguments` are what it takes. The k
    and v of an append are `inputs`, those of an export `outputs`. For saved forwards `what` is look_saved, list_saved
    or delete_saved, and `caches` has their numbers.
    """

    id: int
    request_id: str
    what: str
    owner: str
    caches: tuple[int, ...]
    arguments: dict[str, Any]
    key: str
    quota: int | None
    segment: int
    inputs: list[PlacedTensor]
    outputs: list[PlacedTensor]
    mark: int
    flops: int
    seconds: float
    rank: float
    deadline: float | None


class KeepOwners(msgspec.Struct, frozen=True, tag=True):
    """To the engine: these are the owners that still have keys; what all others hold is freed."""

    names: list[str]


class Forget(msgspec.Struct, frozen=True, tag=True):
    """To the engine: nobody has heard of this saved forward."""

    serial: int


class Time(msgspec.Struct, frozen=True, tag=True):
    """To the engine: time what a BenchmarkRequest (in JSON) asks, as the job of this name, on behalf of `owner`.

    Every HTTP process hears of it by `JobOpened`, and of what becomes of it by `JobEvent`s.
    """

    job: str
    owner: str
    request: bytes
    created: str


class StopJob(msgspec.Struct, frozen=True, tag=True):
    """To the engine: this job is not wanted any more."""

    job: str


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """To the engine: nobody waits for this any more. It is answered all the same, once the memory is let go of."""

    id: int


class DeviceInfo(msgspec.Struct, frozen=True):
    """`name` as torch has it ("cpu", "cuda:0"), `title` for people, bytes of memory, and the backends it has proven.

    `speed` is that of a matrix product, in FLOP/s, all cores together. `rates` has, for each backend, the seconds that
    its work takes one core, or the GPU. `cores` is how many of them work at a time; 1 for a GPU.
    """

    name: str
    title: str
    memory: int
    backends: tuple[str, ...]
    speed: float
    rates: dict[str, Rates] = {}
    cores: int = 1


class Hello(msgspec.Struct, frozen=True, tag=True):
    """From the engine, first: its device, ready, its process, and a number that no other engine has had."""

    device: DeviceInfo
    pid: int
    incarnation: int = 0


class Broken(msgspec.Struct, frozen=True, tag=True):
    """From the engine, instead of Hello: it cannot start, and says why."""

    reason: str


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """A launch: its FLOPs, those that padding each sequence to the longest would have added, how full its budget was,
    and how often what was to be one launch had to be cut in two for want of memory."""

    flops: int
    padding: int
    fill: float
    splits: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """From the engine: the outputs are written. `began` and `ended` are in `time.perf_counter` seconds.

    `copy_in` and `copy_out` are seconds of that, to and from a GPU. `memory` is what the engine holds of the device's,
    in bytes. `launch` numbers the launch, among all of all engines; `batch` tells of all that ran in it, to the first
    of them alone. `dropped` is how many lines of its log the engine has dropped since its last Done.
    """

    id: int
    metadata: dict[str, Any]
    began: float
    ended: float
    batch_size: int
    copy_in: float
    copy_out: float
    memory: int
    launch: int
    batch: Batch | None
    dropped: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """From the engine: no answer, for the reason that a `Refusal` of this code gives."""

    id: int
    code: str
    detail: str
    errors: list[tuple[str, str]]


class Unmapped(msgspec.Struct, frozen=True, tag=True):
    """From the engine: it could not map this segment, and refuses what is asked in it until it is attached again."""

    segment: int


class Proving(msgspec.Struct, frozen=True, tag=True):
    """From the engine: a verification has begun, or goes on. `progress` is a VerifyProgress, in JSON."""

    id: int
    progress: bytes


class Proven(msgspec.Struct, frozen=True, tag=True):
    """From the engine: a VerifyReport, in JSON. Times as in `Done`."""

    id: int
    report: bytes
    began: float
    ended: float


class Told(msgspec.Struct, frozen=True, tag=True):
    """From the engine: what was asked of caches, or of saved forwards, is done. Times as in `Done`.

    After one with `more` comes another.
    """

    id: int
    caches: list[CacheRecord]
    began: float
    ended: float
    saved: list[SavedRecord] = []
    more: bool = False

    @classmethod
    def parts(
        cls, id: int, caches: Sequence[CacheRecord], saved: list[SavedRecord], began: float, ended: float
    ) -> Iterator[Told]:
        """Yield what is told of so many caches, in messages that a socket takes; `saved` is in the last."""
        most = max((one.shape.layers for one in caches), default=0)
        count = max(1, LARGEST_MESSAGE // 2 // (_RECORD + _RECORD_LAYER * most))
        for start in range(0, max(len(caches), 1), count):
            more = start + count < len(caches)
            yield cls(id, list(caches[start : start + count]), began, ended, [] if more else saved, more)


class Holding(msgspec.Struct, frozen=True, tag=True):
    """From the engine, to all: how many caches and saved forwards it holds, and the bytes of each."""

    caches: int
    nbytes: int
    saved: int = 0
    saved_nbytes: int = 0

    @property
    def total(self) -> int:
        """Bytes of both."""
        return self.nbytes + self.saved_nbytes


class JobOpened(msgspec.Struct, frozen=True, tag=True):
    """From the engine, to all: it has this job. A process that comes later hears it with what has happened since."""

    job: str
    owner: str
    request: bytes
    created: str
    total: int


class JobEvent(msgspec.Struct, frozen=True, tag=True):
    """From the engine, to all: a BenchmarkEvent of a job, in JSON."""

    job: str
    event: bytes


class JobDropped(msgspec.Struct, frozen=True, tag=True):
    """From the engine, to all: it ended long ago."""

    job: str


JobNews = JobOpened | JobEvent | JobDropped
ToEngine = Attach | Detach | Submit | Prove | AskCaches | KeepOwners | Forget | Time | StopJob | Cancel
FromEngine = Hello | Broken | Done | Failed | Unmapped | Proving | Proven | Told | Holding | JobNews

Incoming = TypeVar("Incoming")

_encode = msgspec.msgpack.Encoder().encode


def pack_options(options: Options) -> msgspec.Raw:
    return msgspec.Raw(_encode(options))


def read_options(packed: msgspec.Raw) -> Options:
    return _read_options(bytes(packed))


@lru_cache(1024)  # to decode them is to check them, which takes as long as all else of a message
def _read_options(packed: bytes) -> Options:
    return msgspec.msgpack.decode(packed, type=Options)


class Channel(Generic[Incoming]):
    """One end of the socket, not blocking. `Incoming` is the union of what the other end sends."""

    def __init__(self, sock: socket.socket, incoming: Any) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._decode = msgspec.msgpack.Decoder(incoming).decode
        self._buffer = memoryview(bytearray(LARGEST_MESSAGE))

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: ToEngine | FromEngine, descriptors: tuple[int, ...] = ()) -> None:
        """Raises BlockingIOError when the other end does not keep up, and OSError when it is gone."""
        if descriptors:
            socket.send_fds(self.sock, [_encode(message)], descriptors)
        else:
            self.sock.send(_encode(message))

    def receive(self) -> tuple[Incoming, list[int]]:
        """A message and the descriptors that came with it, now the caller's; none where this process may have no more.

        Raises BlockingIOError when there is none, and EOFError when the other end is gone.
        """
        try:
            size, beside, flags, _ = self.sock.recvmsg_into([self._buffer], _ROOM)
        except ConnectionError as error:
            raise EOFError from error
        # Nothing else is ever sent beside.
        descriptors = array("i", b"".join(data for _, _, data in beside)).tolist() if beside else []
        if not size:
            raise EOFError
        if flags & _CUT:
            raise EOFError("a message was cut")
        return self._decode(self._buffer[:size]), descriptors

    def close(self) -> None:
        self.sock.close()
