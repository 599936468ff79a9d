"""The device: the only module of the server that imports torch."""

from __future__ import annotations

import gc
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashpoint.errors import InvalidInputError
from flashpoint.options import AttentionOptions
from flashpoint.verify_schema import VerifyRequest
from flashpoint_kernels import Problem, available_backends, run, triton_backend
from flashpoint_kernels.dispatch import run_part
from flashpoint_kernels.problem import DTYPES
from flashpoint_kernels.reproducible import CORES, split
from flashpoint_kernels.spec import INDEX_TENSORS, Options, ProblemError, Row, Spec, TensorInfo, plan
from flashpoint_kernels.timing.environment import device_name
from flashpoint_server import local, messages
from flashpoint_server.messages import DeviceInfo, Prove, Submit
from flashpoint_server.refusal import invalid

MEMORY_SECONDS = 0.1  # between two looks at how much of it is held


class OutOfMemoryError(Exception):
    """The device has no memory for this, at the moment at least."""


class DeviceLostError(Exception):
    """Nothing works on the device any more, in this process."""


class Placed(NamedTuple):
    """A job, what it asks for, and the segments of shared memory that its tensors lie in."""

    submit: Submit
    spec: Spec
    memory: Mapping[int, mmap.mmap]


class Stages(NamedTuple):
    """Seconds that a launch spent on copies to and from a GPU."""

    copy_in: float
    copy_out: float


NO_COPIES = Stages(0.0, 0.0)


class Device:
    """One device and the backends that it has. `lanes` threads serve it, which make `launches` at a time at most."""

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info
        self.is_cpu = info.name == "cpu"
        # On a GPU two streams: one copies while the other computes. The third thread listens.
        self.lanes, self.launches = (CORES, 1) if self.is_cpu else (3, 2)
        self._streams = threading.local()
        self._memory, self._looked = 0, -MEMORY_SECONDS

    @classmethod
    def open(cls, asked: str) -> Device:
        """`asked` is auto, cpu, cuda or cuda:N. Raises RuntimeError where there is none such."""
        torch.set_num_threads(1)  # what takes more says so itself: see flashpoint_kernels.reproducible
        name = ("cuda" if torch.cuda.is_available() else "cpu") if asked == "auto" else asked
        if not name.startswith("cuda"):
            return cls(DeviceInfo("cpu", device_name("cpu"), _ram(), available_backends("cpu"), _speed("cpu") * CORES))
        if not torch.cuda.is_available():
            raise RuntimeError(f"device {asked} is asked for, and torch finds no CUDA device")
        properties = torch.cuda.get_device_properties(name)
        device = torch.device(name)
        name = f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"
        backends = available_backends(name)
        return cls(DeviceInfo(name, properties.name, properties.total_memory, backends, _speed(name)))

    def prove(self) -> None:
        """Check every backend's forward and gradients against the float64 reference, on this device.

        Compilers do miscompile. Raises RuntimeError naming the backend that disagrees.
        """
        dtypes = [torch.float32, torch.bfloat16]
        for backend in self.info.backends:
            for dtype in dtypes if backend != "reference" else []:
                for name, error in self._errors(backend, dtype).items():
                    # Bounds that only a wrong result passes: rounding reaches a twentieth of them.
                    bound = 1e-4 if dtype == torch.float32 else 0.1
                    if not error <= bound:
                        raise RuntimeError(
                            f"the {backend} backend disagrees with the reference on {self.info.name}: "
                            f"{name} in {dtype} is off by {error:.3g} of its largest value"
                        )
        if not self.is_cpu:
            self._warm()

    def _warm(self) -> None:
        """Compile, all at a time, what most requests will need: 16-bit attention and its gradients without options."""
        compiling = []
        for dtype, dim, direction in product((torch.float16, torch.bfloat16), (64, 128), ("forward", "backward")):
            names = ("q", "k", "v", "do") if direction == "backward" else ("q", "k", "v")
            tensors = dict.fromkeys(names, torch.zeros(1, 1, 16, dim, dtype=dtype, device=self.info.name))
            problem = Problem.create(tensors, Options(), "backward" if direction == "backward" else "forward")
            compiling.append(triton_backend.compile_ahead([problem]))
        for done in compiling:
            done.result()

    def _errors(self, backend: str, dtype: torch.dtype) -> dict[str, float]:
        """The largest error of each answer, relative to its largest value, on a small causal problem with GQA."""
        generator = torch.Generator().manual_seed(7)
        shapes = {"q": (2, 4, 37, 16), "k": (2, 2, 53, 16), "v": (2, 2, 53, 16), "do": (2, 4, 37, 16)}
        tensors = {n: torch.randn(s, generator=generator).to(self.info.name, dtype) for n, s in shapes.items()}
        options = Options(causal=True, return_lse=True)

        def answers(backend: str) -> dict[str, Tensor]:
            forward = Problem.create({n: tensors[n] for n in ("q", "k", "v")}, options)
            run([forward], backend)
            backward = Problem.create({**tensors, **forward.outputs}, options, "backward")
            run([backward], backend)
            return {**forward.outputs, **backward.outputs}

        truth = answers("reference")
        return {
            n: ((t.double() - truth[n].double()).abs().max() / truth[n].double().abs().max()).item()
            for n, t in answers(backend).items()
        }

    def pin(self, memory: mmap.mmap) -> None:
        """Lock shared memory for a GPU's copy engine; `unpin` before it is unmapped. Nothing to do on the CPU."""
        self._register(lambda runtime, address: runtime.cudaHostRegister(address, len(memory), 0), memory)

    def unpin(self, memory: mmap.mmap) -> None:
        self._register(lambda runtime, address: runtime.cudaHostUnregister(address), memory)

    def _register(self, call: Callable[[Any, int], Any], memory: mmap.mmap) -> None:
        if self.is_cpu:
            return
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(int(call(runtime, address)))

    def cuts(self, backend: str) -> bool:
        """Whether a request of `backend` is cut into `parts`, which run on several lanes; else it is a launch."""
        return self.is_cpu and backend in ("torch", "tiled")

    def compile(self, job: Placed) -> Future[None] | None:
        """None where the kernels of a Triton job are compiled; else the end of compiling them, aside."""
        if self.is_cpu:
            return None  # interpreted
        with _told_apart():
            problem = self._copied(job)
            return None if triton_backend.compiled([problem]) else triton_backend.compile_ahead([problem])

    def parts(self, job: Placed) -> list[Problem]:
        """A job that this device cuts, in parts, which compute in its shared memory. Raises Refusal 422."""
        return split(_in_place(job))

    def run(self, part: Problem, backend: str) -> None:
        """Compute a part. Raises OutOfMemoryError."""
        with _told_apart():
            run_part(part, backend)

    def launch(self, jobs: Sequence[Placed]) -> tuple[list[int | None], Stages]:
        """Compute jobs of one launch key from and into their memory; the seed of each, and what the copies took.

        On a GPU the copies and the kernels go to the lane's own stream, with one wait at the end, so that one lane
        copies while another computes. Raises OutOfMemoryError and DeviceLostError.
        """
        backend = jobs[0].submit.backend
        if self.is_cpu:
            with _told_apart():
                problems = [_in_place(job) for job in jobs]
                run(problems, backend)
            return [problem.seed for problem in problems], NO_COPIES
        with _told_apart(), torch.cuda.stream(self._stream()):
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]  # type: ignore[no-untyped-call]
            marks[0].record()
            problems = [self._copied(job) for job in jobs]
            marks[1].record()
            run(problems, backend)
            marks[2].record()
            for job, problem in zip(jobs, problems, strict=True):
                for t in job.submit.outputs:
                    _in(job.memory, t).copy_(problem.outputs[t.name], non_blocking=True)
            marks[3].record()
            marks[3].synchronize()
            stages = Stages(marks[0].elapsed_time(marks[1]) / 1000, marks[2].elapsed_time(marks[3]) / 1000)
            return [problem.seed for problem in problems], stages

    def _copied(self, job: Placed) -> Problem:
        """The job's problem, its tensors on their way to the GPU; the values of index tensors are read here."""
        given = {t.name: _in(job.memory, t) for t in job.submit.inputs}
        tensors = {
            name: t if name in INDEX_TENSORS else t.to(self.info.name, non_blocking=True) for name, t in given.items()
        }
        return Problem.create(tensors, job.spec.options, job.spec.direction, spec=job.spec)

    def _stream(self) -> torch.cuda.Stream:
        """The lane's own."""
        if not hasattr(self._streams, "stream"):
            self._streams.stream = torch.cuda.Stream(self.info.name)  # type: ignore[no-untyped-call]
        stream: torch.cuda.Stream = self._streams.stream
        return stream

    def verify(self, asked: Prove, memory: Mapping[int, mmap.mmap]) -> bytes:
        """The VerifyReport of what is asked, in JSON. Raises Refusal 422, OutOfMemoryError and DeviceLostError."""
        with _told_apart():
            try:
                if not asked.inputs:
                    drawn = VerifyRequest.model_validate_json(asked.request)
                    return local.verify(drawn, self.info.name).model_dump_json().encode()
                given = {t.name: _in(memory, t) for t in asked.inputs}
                given = {name: t if name in INDEX_TENSORS else t.to(self.info.name) for name, t in given.items()}
                options = Options(**AttentionOptions.model_validate_json(asked.request).model_dump())
                return local.judge_given(given, options, self.info.name).model_dump_json().encode()
            except InvalidInputError as error:
                raise invalid((problem.field, problem.message) for problem in error.errors) from None

    def empty_cache(self) -> None:
        """Give back what nobody uses, before a second try."""
        gc.collect()
        if not self.is_cpu:
            torch.cuda.empty_cache()

    def memory(self) -> int:
        """Bytes of the device's memory that this process holds: what is resident of it, on the CPU. A moment ago."""
        now = time.monotonic()
        if now >= self._looked + MEMORY_SECONDS:
            self._looked = now
            if self.is_cpu:
                self._memory = int(os.pread(_STATM, 128, 0).split()[1]) * mmap.PAGESIZE
            else:
                self._memory = torch.cuda.memory_reserved(self.info.name)
        return self._memory


def check(job: Placed) -> tuple[Row, ...]:
    """The sequences of a job. Raises Refusal 422 where the values of index tensors do not fit: a head cannot tell."""
    index = {t.name: _in(job.memory, t).tolist() for t in job.submit.inputs if t.name in INDEX_TENSORS}
    try:
        return job.spec.rows(index)
    except ProblemError as error:
        raise invalid(error.errors) from None


def spec_of(submit: Submit) -> Spec:
    infos = {t.name: TensorInfo(t.dtype, t.shape) for t in submit.inputs}
    return plan(infos, messages.read_options(submit.options), submit.direction)


def _in_place(job: Placed) -> Problem:
    """Raises Refusal 422, as `check` does."""
    submit, spec, memory = job
    given = {t.name: _in(memory, t) for t in submit.inputs}
    wanted = {t.name: _in(memory, t) for t in submit.outputs}
    try:
        return Problem.create(given, spec.options, spec.direction, spec=spec, outputs=wanted)
    except ProblemError as error:
        raise invalid(error.errors) from None


_STATM = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


def _in(segments: Mapping[int, mmap.mmap], t: messages.Tensor) -> Tensor:
    """The tensor, in shared memory."""
    memory = segments[t.segment]
    dtype = DTYPES[t.dtype]
    count = math.prod(t.shape)
    if not count:
        return torch.empty(t.shape, dtype=dtype)
    if dtype is not torch.bool:
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=t.offset).view(t.shape)
    # A bool that is neither 0 nor 1 is undefined behaviour; what a caller sends may be any byte.
    return torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=t.offset).ne(0).view(t.shape)


@contextmanager
def _told_apart() -> Iterator[None]:
    """Turn what torch raises when memory runs out, or the device is gone, into errors of ours."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # On the CPU torch says it in words alone: "DefaultCPUAllocator: can't allocate memory".
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
            error.__traceback__ = None  # it holds the very tensors that did not fit
            raise OutOfMemoryError from None
        if "CUDA error" in str(error):  # sticky: every later call of this process fails with it, too
            raise DeviceLostError(str(error).splitlines()[0]) from error
        raise


def _speed(device: str) -> float:
    """FLOP/s of a matrix product by one thread, or by a GPU."""
    n, dtype = (512, torch.float32) if device == "cpu" else (8192, torch.bfloat16)
    t = torch.ones(n, n, dtype=dtype, device=device)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        (t @ t)[0, 0].item()
        seconds.append(time.perf_counter() - began)
    return 2 * n**3 / min(seconds)


def _ram() -> int:
    """Bytes of memory that this process may use: the machine's, or its container's where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdecimal():
        total = min(total, int(text))
    return total
