"""The messages between HTTP processes and engines, and the socket that carries them.

Tensors stay in shared memory (staging.py). `Attach` sends the descriptor of a segment; other messages contain its
number. The socket is a Unix socket that keeps message boundaries (SOCK_SEQPACKET): a message arrives whole or not at
all. An end of file means that the other process and its mappings are gone.
"""

from __future__ import annotations

import socket
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from flashpoint_contract.options import Direction
from flashpoint_kernels.dispatching.support import Backends
from flashpoint_kernels.problems.cost import Rates
from flashpoint_server.ipc.bodies import Body, CacheRef, CacheShape, PlacedTensor, Recall, Save

LARGEST_MESSAGE = 1 << 17
MOST_LISTED = 64  # maximum saved forwards in one message, each with a head of up to 1 KiB
MOST_ERRORS = 512  # maximum errors in a Failed, so that it fits into LARGEST_MESSAGE
_RECORD, _RECORD_LAYER = 256, 32  # maximum bytes of a CacheRecord, and of each layer in it
_CUT = int(socket.MSG_TRUNC)  # as an int, because comparing enum flags takes 10% of the time to receive a message
_ROOM = socket.CMSG_SPACE(4 * array("i").itemsize)  # bytes for up to four descriptors in a message; `Attach` has one


class Attach(msgspec.Struct, frozen=True, tag=True):
    """To the engine: map this segment. Its descriptor comes with the message."""

    segment: int
    size: int


class Detach(msgspec.Struct, frozen=True, tag=True):
    """To the engine: unmap this segment. No later message refers to it."""

    segment: int


class CacheRecord(msgspec.Struct, frozen=True):
    """A cache's state. `ttl` and `expires_in` are in seconds.

    For each layer, `lengths` has the end of the tokens, and `firsts` the position of the first token still stored.
    """

    serial: int
    shape: CacheShape
    max_length: int | None
    keep: list[int | None]
    ttl: float
    lengths: list[int]
    firsts: list[int]
    nbytes: int
    expires_in: float


class SavedRecord(msgspec.Struct, frozen=True):
    """The state of a saved forward. `head` is that of its `Save`; `ttl` and `expires_in` are in seconds."""

    serial: int
    head: bytes
    nbytes: int
    ttl: float
    expires_in: float


class Submit(msgspec.Struct, tag=True, kw_only=True, omit_defaults=True):
    """To the engine: run the job `body`, with tensors in shared memory. The engine runs the lowest `rank` first.

    The job's slot begins at offset `start` of `segment`. `rank` and `deadline` are in `time.monotonic` seconds, a clock
    that all processes share. Before the engine starts the job, it writes 1 at offset `mark` of `segment`. If the engine
    dies, jobs without this mark are sent to another engine.

    The fields from `seed` on are for attention. `seed` is the seed of dropout, if the caller has set one. `cache_ref`
    is set if keys and values are in caches; `saved` if the forward is to be saved, or if the gradients are those of a
    saved forward. `inputs` and `outputs` are for the other bodies: those of attention are in its `PlannedCall`.
    """

    id: int
    request_id: str
    body: Body
    segment: int
    start: int
    mark: int
    flops: int
    seconds: float  # predicted time on one core, or on the GPU
    rank: float
    deadline: float | None = None
    inputs: tuple[PlacedTensor, ...] = ()
    outputs: tuple[PlacedTensor, ...] = ()
    seed: int | None = None
    cache_ref: CacheRef | None = None
    saved: Save | Recall | None = None

    @property
    def serials(self) -> tuple[int, ...]:
        """The serial numbers of the caches, or of the saved forwards, that the job uses."""
        if not isinstance(self.body, bytes):
            return self.body.serials
        if self.cache_ref is not None:
            return self.cache_ref.caches
        return (self.saved.serial,) if isinstance(self.saved, Recall) else ()

    @property
    def uses(self) -> bool:
        """Whether the end of the job restarts the time to live of `serials`."""
        return isinstance(self.body, bytes) or self.body.uses


class SavedOwners(msgspec.Struct, frozen=True, tag=True):
    """To the engine: the owners that have API keys. The engine frees the caches and forwards of all other owners."""

    names: list[str]


class Forget(msgspec.Struct, frozen=True, tag=True):
    """To the engine: free this saved forward. No caller has its id."""

    serial: int


class StartBenchmark(msgspec.Struct, frozen=True, tag=True):
    """To the engine: run the BenchmarkRequest `request` (in JSON) as the job `job`, for `owner`.

    Every HTTP process receives `JobOpened`, and then a `JobEvent` for each event of the job.
    """

    job: str
    owner: str
    request: bytes
    created: str


class StopJob(msgspec.Struct, frozen=True, tag=True):
    """To the engine: stop the benchmark `job`."""

    job: str


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """To the engine: the result of this job is no longer needed.

    The engine still answers, after its last access to the job's memory.
    """

    id: int


class DeviceInfo(msgspec.Struct, frozen=True):
    """An engine's device: its name in torch ("cpu", "cuda:0"), a title for people, and its memory in bytes.

    `backends` have passed the self-test. `speed` is that of a matrix product on all cores, in FLOP/s. `rates` has the
    costs in seconds of each backend's work on one core, or on the GPU. `cores` is the number of cores that work in
    parallel; 1 for a GPU. `no_triton` says why Triton is not among the backends. `kernels` names the kernels in C, by
    the data type of q, and `gradient_kernels` those of gradients; a CPU without them has `no_kernels`, which says what
    to install. `kernels_off` has what is switched off, each name with the reason. `no_gpu` says why a CPU was chosen
    with a torch that is built for GPUs.
    """

    name: str
    title: str
    memory: int
    backends: tuple[str, ...]
    speed: float
    rates: dict[str, Rates] = {}
    cores: int = 1
    no_triton: str = ""
    kernels: dict[str, str] = {}
    gradient_kernels: dict[str, str] = {}
    kernels_off: dict[str, str] = {}
    no_kernels: str = ""
    no_gpu: str = ""

    @property
    def choices(self) -> Backends:
        """The backends in the form that `choose_backend` expects."""
        return Backends(self.backends, self.name.partition(":")[0], self.no_triton, self.kernels_off)

    def kernel(self, dtype: str, direction: Direction) -> str | None:
        """Return the name of the kernel in C for a data type of q and a direction; None without one."""
        return (self.gradient_kernels if direction == "backward" else self.kernels).get(dtype)

    @property
    def logged(self) -> dict[str, object]:
        """The fields of the log line that reports a ready engine."""
        about: dict[str, object] = {"device": self.name, "title": self.title, "backends": self.backends}
        about |= {"kernels": self.kernels}
        if self.kernels_off:
            about |= {"gradient_kernels": self.gradient_kernels, "kernels_off": self.kernels_off}
        return about


class Hello(msgspec.Struct, frozen=True, tag=True):
    """From the engine, first: it is ready. Contains its device, its process id, and a number unique to this engine."""

    device: DeviceInfo
    pid: int
    incarnation: int = 0


class Broken(msgspec.Struct, frozen=True, tag=True):
    """From the engine, instead of Hello: it cannot start, because of `reason`."""

    reason: str


class Done(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """From the engine: the outputs are written. `began` and `ended` are in `time.perf_counter` seconds.

    `copy_in` and `copy_out` are the seconds of this time that copies to and from a GPU took. `memory` is the device
    memory that the engine uses, in bytes. `launch` is a number that is unique among all engines. `dropped` is the
    number of log lines that the engine has dropped since its last Done.

    The last fields describe the launch, for one of its `batch_size` requests; `flops` is None for the others. `padding`
    is the number of additional FLOPs that padding all sequences to the longest one would cost. `fill` is the used
    fraction of the batch budget. `splits` is how often the batch was split in two because memory ran out.
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
    dropped: int
    flops: int | None = None
    padding: int = 0
    fill: float = 0.0
    splits: int = 0


class Failed(msgspec.Struct, frozen=True, tag=True):
    """From the engine: the job failed. The fields are those of a `Refusal`."""

    id: int
    code: str
    detail: str
    errors: list[tuple[str, str]]


class Unmapped(msgspec.Struct, frozen=True, tag=True):
    """From the engine: this segment could not be mapped. Jobs in it are refused until it is attached again."""

    segment: int


class VerifyProgressed(msgspec.Struct, frozen=True, tag=True):
    """From the engine: progress of a verification.

    `progress` is a VerifyProgress in JSON; the first one means "started".
    """

    id: int
    progress: bytes


class Verified(msgspec.Struct, frozen=True, tag=True):
    """From the engine: the VerifyReport of a verification, in JSON. Times are as in `Done`."""

    id: int
    report: bytes
    began: float
    ended: float


class CallReply(msgspec.Struct, frozen=True, tag=True):
    """From the engine: the answer to a CacheCall or a SavedCall. Times are as in `Done`.

    A long answer is sent in several messages; all but the last one have `more`.
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
    ) -> Iterator[CallReply]:
        """Yield the answer in messages of at most LARGEST_MESSAGE bytes. `saved` is in the last message."""
        layers = max((one.shape.layers for one in caches), default=0)
        count = max(1, LARGEST_MESSAGE // 2 // (_RECORD + _RECORD_LAYER * layers))
        for start in range(0, max(len(caches), 1), count):
            more = start + count < len(caches)
            yield cls(id, list(caches[start : start + count]), began, ended, [] if more else saved, more)


class Holding(msgspec.Struct, frozen=True, tag=True):
    """From the engine, to all processes: the number and the bytes of its caches and of its saved forwards."""

    caches: int
    nbytes: int
    saved: int = 0
    saved_nbytes: int = 0

    @property
    def total(self) -> int:
        """The bytes of caches and saved forwards together."""
        return self.nbytes + self.saved_nbytes


class JobOpened(msgspec.Struct, frozen=True, tag=True):
    """From the engine, to all processes: it has accepted the benchmark `job`, which has `total` cases.

    A process that connects later also receives this.
    """

    job: str
    owner: str
    request: bytes
    created: str
    total: int


class JobEvent(msgspec.Struct, frozen=True, tag=True):
    """From the engine, to all processes: a BenchmarkEvent of the benchmark `job`, in JSON."""

    job: str
    event: bytes


class JobDropped(msgspec.Struct, frozen=True, tag=True):
    """From the engine, to all processes: it has removed the benchmark `job`, which ended long ago."""

    job: str


class AnswerVerified(msgspec.Struct, frozen=True, tag=True):
    """From the engine, to one process: it has verified an answer of its own, or could not (`skipped`)."""

    backend: str
    dtype: str
    direction: str
    result: str


class Withdraw(msgspec.Struct, frozen=True, tag=True):
    """From the engine, to all processes: it has found `wrong` answers of its own, so take no new work."""

    wrong: int


JobNews = JobOpened | JobEvent | JobDropped
ToEngine = Attach | Detach | Submit | SavedOwners | Forget | StartBenchmark | StopJob | Cancel
FromEngine = (
    Hello | Broken | Done | Failed | Unmapped | VerifyProgressed | Verified | CallReply | Holding | JobNews
    | AnswerVerified | Withdraw
)  # fmt: skip

Incoming = TypeVar("Incoming")


class Channel(Generic[Incoming]):
    """One end of the socket, non-blocking. `Incoming` is the union of the messages from the other end."""

    def __init__(self, sock: socket.socket, incoming: Any) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._decode = msgspec.msgpack.Decoder(incoming).decode
        self._buffer = memoryview(bytearray(LARGEST_MESSAGE))

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Send a message that `encode` has made.

        Raises BlockingIOError if the socket's buffer is full, and OSError if the other end is gone.
        """
        if descriptors:
            socket.send_fds(self.sock, [message], descriptors)
        else:
            self.sock.send(message)

    def receive(self) -> tuple[Incoming, list[int]]:
        """Return a message and its descriptors, which the caller must close.

        If this process has reached its limit of open files, the descriptors are missing. Raises BlockingIOError if
        there is no message, and EOFError if the other end is gone.
        """
        try:
            size, beside, flags, _ = self.sock.recvmsg_into([self._buffer], _ROOM)
        except ConnectionError as error:
            raise EOFError from error
        # No other ancillary data is ever sent.
        descriptors = array("i", b"".join(data for _, _, data in beside)).tolist() if beside else []
        if not size:
            raise EOFError
        if flags & _CUT:
            raise EOFError("a message was truncated")
        return self._decode(self._buffer[:size]), descriptors

    def close(self) -> None:
        self.sock.close()
