"""The engine's device: computes jobs in shared memory, copies to and from a GPU, and classifies the device's errors."""

from __future__ import annotations

import gc
import mmap
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import structlog
import torch
from msgspec.structs import replace as replace_fields
from torch import Tensor

from flashpoint_contract.options import Options, ProblemError
from flashpoint_contract.schemas.options import AttentionOptions
from flashpoint_contract.schemas.verify import VerifyRequest
from flashpoint_contract.spec import Row
from flashpoint_contract.tensors import INDEX_TENSORS, SCALES
from flashpoint_kernels import Problem, available_backends, native, run, triton_backend
from flashpoint_kernels.dispatching import dispatch
from flashpoint_kernels.dispatching.dispatch import run_part
from flashpoint_kernels.problems.problem import DTYPES, check_scales
from flashpoint_kernels.problems.reproducible import CORES, split
from flashpoint_kernels.timing.device import device_name, is_lost
from flashpoint_server.engine.benchmarks import local
from flashpoint_server.engine.caches.attending import CachedCall, CallTensors
from flashpoint_server.engine.caches.cache import StoredCache, Terms
from flashpoint_server.engine.caches.chunks import Track
from flashpoint_server.engine.caches.parts import CachedPart, Sequences, attend, shares
from flashpoint_server.engine.caches.store import CacheStore
from flashpoint_server.engine.scheduling.engine_request import EngineRequest, OutOfMemoryError
from flashpoint_server.engine.state.ledger import Ledger
from flashpoint_server.engine.state.memory import bytes_in, tensor_in
from flashpoint_server.engine.state.saved import SavedForward, SavedStore
from flashpoint_server.ipc.bodies import CacheRef, PlacedTensor, Save
from flashpoint_server.ipc.messages import DeviceInfo
from flashpoint_server.refusal import of_problem

log = structlog.stdlib.get_logger("flashpoint.engine")

MEMORY_SECONDS = 0.1  # seconds between two reads of the used memory


class DeviceLostError(Exception):
    """The device no longer works in this process."""


class Stages(NamedTuple):
    """Seconds that a launch spent on copies to and from a GPU."""

    copy_in: float
    copy_out: float


NO_COPIES = Stages(0.0, 0.0)


class _DeviceErrors(AbstractContextManager[None]):
    """A context manager that passes each MemoryError and RuntimeError to `tell`.

    It is a class, because one made with `contextlib.contextmanager` takes twice as long.
    """

    def __init__(self, tell: Callable[[MemoryError | RuntimeError], None]) -> None:
        self._tell = tell

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, (MemoryError, RuntimeError)):
            self._tell(error)


class DeviceMissingError(RuntimeError):
    """The device that the settings name does not exist here."""


class TorchDevice:
    """One device and its backends.

    `lanes` threads run its tasks, at most `launches` launches and `cores` parts at the same time. On the CPU, one more
    thread than `cores` can run a short part (see scheduler.py).
    """

    ledger: Ledger  # set, like the stores, before the device serves requests
    caches: CacheStore
    saved: SavedStore

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info
        self.is_cpu = info.name == "cpu"
        # A GPU has three lanes: while one launch computes, a second one copies tensors on the CUDA stream of its own
        # lane, and the third lane waits for messages.
        self.cores = info.cores
        self.lanes, self.launches = (self.cores + 1, 1) if self.is_cpu else (3, 2)
        self._streams = threading.local()
        self._device_errors = _DeviceErrors(self._tell_apart)
        self._pinned: set[int] = set()  # addresses of locked memory
        self._memory, self._looked = 0, -MEMORY_SECONDS

    @classmethod
    def open(cls, requested: str) -> TorchDevice:
        """Open the device `requested`: auto, cpu, cuda or cuda:N. Raises DeviceMissingError if it does not exist."""
        # Code that needs more threads sets their number itself: see flashpoint_kernels.problems.reproducible.
        torch.set_num_threads(1)
        name = ("cuda" if torch.cuda.is_available() else "cpu") if requested == "auto" else requested
        if not name.startswith("cuda"):
            speed = _speed("cpu") * CORES
            no_gpu = local.no_gpu() if requested == "auto" else ""
            info = DeviceInfo("cpu", device_name("cpu"), _ram(), (), speed, cores=CORES, no_gpu=no_gpu)
            return cls(with_kernels(info))
        if not torch.cuda.is_available():
            raise DeviceMissingError(
                f"device {requested} is not available: torch finds no CUDA device; set --device cpu"
            )
        if (torch.device(name).index or 0) >= torch.cuda.device_count():
            last = torch.cuda.device_count() - 1
            raise DeviceMissingError(f"device {requested} is not available: the last CUDA device is cuda:{last}")
        properties = torch.cuda.get_device_properties(name)
        device = torch.device(name)
        name = f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"
        return cls(with_kernels(DeviceInfo(name, properties.name, properties.total_memory, (), _speed(name))))

    def switch_off(self, found: Mapping[str, str]) -> None:
        """Switch kernels or backends off, each name (native/switches.py) with its reason."""
        dispatch.switch_off(found)
        self.info = with_kernels(self.info)

    def pin(self, memory: mmap.mmap) -> None:
        """Lock shared memory for a GPU's copy engine; `unpin` it before it is unmapped. Does nothing on the CPU.

        If the system refuses to lock the memory, it is copied more slowly: not in parallel with other work.
        """
        if self.is_cpu:
            return
        try:
            with self._current():
                torch.cuda.check_error(int(_cudart().cudaHostRegister(_address(memory), len(memory), 0)))
        except RuntimeError as error:
            log.warning("memory not pinned", size=len(memory), error=str(error))
            # Clear CUDA's error state: otherwise this thread's next launch would report the error.
            with suppress(RuntimeError):
                torch.zeros(1, dtype=torch.float32, device=self.info.name)
        else:
            self._pinned.add(_address(memory))

    def unpin(self, memory: mmap.mmap) -> None:
        if not self.is_cpu and (address := _address(memory)) in self._pinned:
            self._pinned.remove(address)
            with self._current():
                torch.cuda.check_error(int(_cudart().cudaHostUnregister(address)))

    def _current(self) -> AbstractContextManager[object]:
        """Return a context in which torch's CUDA calls of this thread use this device."""
        return nullcontext() if self.is_cpu else torch.cuda.device(self.info.name)

    def lost(self) -> bool:
        """Return whether a GPU does not work any more in this process, for example after an illegal access."""
        return is_lost(self.info.name)

    def _tell_apart(self, error: MemoryError | RuntimeError) -> None:
        """Raise OutOfMemoryError if `error` reports a lack of memory, DeviceLostError if the device no longer works.

        Otherwise return. A CUDA error may concern only one call, so the device is tested.
        """
        text = str(error)
        # Triton, cuBLAS and torch's CPU allocator report a lack of memory only in the error's text.
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in text:
            short = True
        elif any(name in text for name in ("CUDA error", "Triton Error [CUDA]", "CUBLAS_STATUS")):
            if self.lost():
                raise DeviceLostError(text.splitlines()[0]) from error
            short = "out of memory" in text or "ALLOC_FAILED" in text
        else:
            short = False
        if short:
            error.__traceback__ = None  # its frames refer to tensors, whose memory a retry may need
            raise OutOfMemoryError from None

    def cuts(self, backend: str) -> bool:
        """Return whether a request on `backend` is cut into `parts` for several lanes; otherwise it is one launch."""
        return self.is_cpu and backend != "triton"

    def compile(self, job: EngineRequest) -> Future[None] | None:
        """Compile a Triton job's kernels in the background, and return the future; None if they are already compiled.

        This reads the shapes of tensors, and the values of index tensors only. Call `rows` first, which checks these.
        """
        if self.is_cpu:
            return None  # on the CPU, Triton kernels are interpreted, not compiled
        with self._device_errors:
            meta = partial(torch.empty, device="meta")
            problem = self._problem(
                job,
                lambda t: meta(t.shape, dtype=DTYPES[t.dtype]),
                lambda name, t: t if name in INDEX_TENSORS else meta(t.shape, dtype=t.dtype),
            )
            problem = replace(problem, device=torch.device(self.info.name))
            return None if triton_backend.compiled([problem]) else triton_backend.compile_ahead([problem])

    def rows(self, job: EngineRequest) -> tuple[Row, ...]:
        """Return the sequences of a job. Raises Refusal 422 if values of its tensors are not valid."""
        index = {t.name: tensor_in(job.memory, t).tolist() for t in job.submit.inputs if t.name in INDEX_TENSORS}
        index |= {name: t.tolist() for name, t in self._recalled(job).items() if name in INDEX_TENSORS}
        try:
            check_scales({t.name: tensor_in(job.memory, t) for t in job.submit.inputs if t.name in SCALES})
            return job.spec.rows(index)
        except ProblemError as error:
            raise of_problem(error) from None

    def parts(self, job: EngineRequest) -> list[Problem]:
        """Cut a job into parts that compute in its shared memory. Raises Refusal 422."""
        return split(self.in_place(job), job.attention.backend)

    def call_tensors(self, job: EngineRequest) -> CallTensors:
        """Return the tensors of a job over caches: on the CPU in shared memory, on a GPU as copies.

        Raises Refusal 422.
        """
        given = {t.name: tensor_in(job.memory, t) for t in job.submit.inputs}
        if self.is_cpu:
            return CallTensors.of(job.spec, given, {t.name: tensor_in(job.memory, t) for t in job.submit.outputs})
        there = {name: t if name in INDEX_TENSORS else t.to(self.info.name) for name, t in given.items()}
        return CallTensors.of(job.spec, there, {})

    def tracks(self, ref: CacheRef) -> list[Track]:
        """Return what a call over caches has read, for each of its sequences. Raises Refusal."""
        caches = self.caches.find(Terms(ref.owner, ref.quota, ref.key), ref.caches)
        return [cache.tracks[ref.layer] for cache in caches]

    def kin(self, job: EngineRequest) -> Hashable | None:
        """Return a key for a call over caches. Calls with equal keys begin with the same chunk of a cache.

        If they are computed together, this chunk is read only once. Return None if the call must not be computed with
        others: on a GPU, on another backend than `cpu`, if no other cache shares its first chunk, or if its options
        do not allow it.
        """
        cache_ref, spec = job.attention.cache_ref, job.spec
        assert cache_ref is not None
        if not self.is_cpu or job.attention.backend != "cpu":
            return None
        chunk = self.caches.shared_chunk(cache_ref.owner, cache_ref.caches, cache_ref.layer)
        if chunk is None or not shares(spec):
            return None
        return chunk, spec.dtype, spec.q_heads, spec.scale, spec.options.softcap

    def write(self, call: CachedCall) -> Sequence[StoredCache]:
        """Write the new tokens of a call over caches, after all checks, and return its caches. Raises Refusal."""
        with self._device_errors, self.in_order():
            return call.write(self.caches)

    def attend(
        self, calls: Sequence[tuple[CachedCall, Sequence[StoredCache]]], backend: str, cores: int
    ) -> tuple[list[Sequences], Sequence[Problem | CachedPart]]:
        """Cut calls over caches into parts for `cores` cores. Return each call's sequences and seed, and the parts.

        `write` has written the calls' tokens. Several calls must have equal `kin`. Raises Refusal.
        """
        with self._device_errors:
            return attend(calls, backend, cores)

    def run(self, part: Problem | CachedPart, backend: str) -> None:
        """Compute a part. Raises OutOfMemoryError."""
        with self._device_errors:
            if isinstance(part, CachedPart):
                part.compute()
            else:
                run_part(part, backend)

    def launch(self, jobs: Sequence[EngineRequest]) -> tuple[list[int | None], Stages]:
        """Compute jobs with the same launch key. Return the dropout seed of each, and the seconds of the copies.

        The outputs are in the jobs' shared memory. On a GPU, copies and kernels run on the lane's own stream, so one
        lane copies while another computes; the lane waits only at the end. Raises OutOfMemoryError and DeviceLostError.
        """
        backend = jobs[0].attention.backend
        if self.is_cpu:
            with self._device_errors:
                problems = [self._cached_problem(job.call) if job.call else self.in_place(job) for job in jobs]
                run(problems, backend)
                for job, problem in zip(jobs, problems, strict=True):
                    self._keep(job, problem)
            return [problem.seed for problem in problems], NO_COPIES
        with self._device_errors, torch.cuda.stream(self._stream()):
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]  # type: ignore[no-untyped-call]
            marks[0].record()
            problems = [self._cached_problem(job.call) if job.call else self._copied(job) for job in jobs]
            marks[1].record()
            run(problems, backend)
            marks[2].record()
            for job, problem in zip(jobs, problems, strict=True):
                for t in job.submit.outputs:
                    answer = problem.outputs[t.name].view(t.shape)
                    tensor_in(job.memory, t).copy_(answer, non_blocking=True)
            marks[3].record()
            for job, problem in zip(jobs, problems, strict=True):
                self._keep(job, problem)
            marks[3].synchronize()
            stages = Stages(marks[0].elapsed_time(marks[1]) / 1000, marks[2].elapsed_time(marks[3]) / 1000)
            return [problem.seed for problem in problems], stages

    def _cached_problem(self, call: CachedCall) -> Problem:
        """Return the problem of a call over caches, after `write` has written its tokens. Raises Refusal 422."""
        return call.problem(self.caches.find(call.terms, call.cache_ref.caches))

    def _copied(self, job: EngineRequest) -> Problem:
        """Return the job's problem with its tensors on the GPU; the copies may still run."""

        def there(t: PlacedTensor) -> Tensor:
            copy = bytes_in(job.memory, t).to(self.info.name, non_blocking=True)
            return copy.ne(0) if t.dtype == "bool" else copy

        return self._problem(job, there)

    def _problem(
        self, job: EngineRequest, there: Callable[[PlacedTensor], Tensor],
        recalled: Callable[[str, Tensor], Tensor] = lambda _, t: t,
    ) -> Problem:  # fmt: skip
        """Return the job's problem. Index tensors are views of shared memory; `there` makes the other inputs.

        If the job uses a saved forward, `recalled` gets each of its tensors by name, and returns the tensor to use.
        """
        tensors = {t.name: tensor_in(job.memory, t) if t.name in INDEX_TENSORS else there(t) for t in job.submit.inputs}
        tensors |= {name: recalled(name, t) for name, t in self._recalled(job).items()}
        return Problem.create(tensors, job.spec.options, job.spec.direction, spec=job.spec)

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Run the `with` block's GPU work on this lane's stream, and wait for its end.

        The wait is needed because the next call on the same cache may use another stream.
        """
        if self.is_cpu:
            yield
            return
        stream = self._stream()
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()

    # Saved forwards

    def reserve(self, save: Save) -> SavedForward:
        """Reserve memory for a forward pass that will be saved. Raises Refusal 413 and 429."""
        return self.saved.reserve(save)

    def drop(self, forward: SavedForward) -> None:
        """Free the memory that was reserved for a forward pass that has failed."""
        self.saved.drop(forward.serial)

    def keep(self, job: EngineRequest) -> None:
        """Save a forward on the CPU after all its parts have run. Raises OutOfMemoryError."""
        with self._device_errors:
            self._keep(job, None)

    def _keep(self, job: EngineRequest, problem: Problem | None) -> None:
        """Save the tensors of a forward pass if the job requests it. On a GPU only index tensors are copied.

        On the CPU all are copied out of staging memory, which an HTTP process reuses. The copy takes 1/30 of the
        forward's time at 1,024 tokens, and less at more tokens.
        """
        if job.saved_forward is None:
            return
        places = [*job.submit.inputs, *job.submit.outputs]
        if self.is_cpu or problem is None:
            tensors = {t.name: tensor_in(job.memory, t).clone() for t in places}
        else:
            here = {**problem.tensors, **problem.outputs}
            tensors = {t.name: here[t.name].view(t.shape) for t in places}
            # The index tensors are views of staging memory, which an HTTP process reuses.
            tensors |= {name: t.clone() for name, t in tensors.items() if name in INDEX_TENSORS}
        self.saved.keep(job.saved_forward, tensors)

    def _recalled(self, job: EngineRequest) -> Mapping[str, Tensor]:
        """Return the tensors of the saved forward that a job uses. Raises Refusal 404 and 410."""
        recall = job.attention.recall
        return {} if recall is None else self.saved.tensors(recall.owner, recall.serial)

    def in_place(self, job: EngineRequest) -> Problem:
        """Return the job's problem with views of its shared memory. Raises Refusal 422 like `rows`, and 404 and 410."""
        spec, memory = job.spec, job.memory
        given = {t.name: tensor_in(memory, t) for t in job.submit.inputs}
        given |= {name: t.cpu() for name, t in self._recalled(job).items()}
        wanted = {t.name: tensor_in(memory, t) for t in job.submit.outputs}
        try:
            return Problem.create(given, spec.options, spec.direction, spec=spec, outputs=wanted)
        except ProblemError as error:
            raise of_problem(error) from None

    def _stream(self) -> torch.cuda.Stream:
        """Return the CUDA stream of this lane (thread)."""
        if not hasattr(self._streams, "stream"):
            self._streams.stream = torch.cuda.Stream(self.info.name)  # type: ignore[no-untyped-call]
        stream: torch.cuda.Stream = self._streams.stream
        return stream

    def verify(self, job: EngineRequest, progress: local.Tell) -> bytes:
        """Return the VerifyReport of a verification, in JSON. Raises Refusal 422, OutOfMemoryError and DeviceLostError.

        `progress` is called before each block of work. If it raises, the verification ends.
        """
        request_json, inputs = job.verification.request, job.submit.inputs
        with self._device_errors:
            try:
                if not inputs:
                    drawn = VerifyRequest.model_validate_json(request_json)
                    return local.verify(drawn, self.info.name, progress).model_dump_json().encode()
                given = {t.name: tensor_in(job.memory, t) for t in inputs}
                given = {name: t if name in INDEX_TENSORS else t.to(self.info.name) for name, t in given.items()}
                options = Options(**AttentionOptions.model_validate_json(request_json).model_dump())
                return local.judge_given(given, options, self.info.name, progress).model_dump_json().encode()
            except ProblemError as error:
                raise of_problem(error) from None

    def empty_cache(self) -> None:
        """Free memory that no tensor uses any more, before a retry."""
        gc.collect()
        if not self.is_cpu:
            with self._current():
                torch.cuda.empty_cache()

    def memory(self) -> int:
        """Return the bytes that torch's allocator has reserved on the GPU, or that this process has resident in RAM.

        The value is at most 0.1 s old.
        """
        now = time.monotonic()
        if now >= self._looked + MEMORY_SECONDS:
            self._looked = now
            if self.is_cpu:
                self._memory = int(os.pread(_STATM, 128, 0).split()[1]) * mmap.PAGESIZE
            else:
                self._memory = torch.cuda.memory_reserved(self.info.name)
        return self._memory


def with_kernels(info: DeviceInfo) -> DeviceInfo:
    """Return `info` with the backends and kernels that are available now."""
    backends = available_backends(info.name)
    in_c = {"kernels": native.names(), "gradient_kernels": native.names("backward")} if info.name == "cpu" else {}
    no_kernels = "" if info.name != "cpu" or in_c["kernels"] else native.missing()
    return replace_fields(
        info, backends=backends, no_triton=backends.no_triton, kernels_off=dict(backends.off), no_kernels=no_kernels,
        **in_c,
    )  # fmt: skip


_STATM = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _speed(device: str) -> float:
    """Return the measured FLOP/s of a matrix product: in float32 on one CPU thread, or in bfloat16 on a GPU."""
    n, dtype = (512, torch.float32) if device == "cpu" else (8192, torch.bfloat16)
    t = torch.ones(n, n, dtype=dtype, device=device)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        (t @ t)[0, 0].item()
        seconds.append(time.perf_counter() - began)
    return 2 * n**3 / min(seconds)


def _ram() -> int:
    """Return the bytes of memory for this process: the machine's, or its container's if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdecimal():
        total = min(total, int(text))
    return total
