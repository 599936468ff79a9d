"""A GPU as the engine's device: launches copy tensors from and to shared memory, on a CUDA stream of each lane."""

from __future__ import annotations

import gc
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import structlog
import torch
from msgspec.structs import replace as replace_fields
from torch import Tensor

from flashpoint_contract.tensors import INDEX_TENSORS
from flashpoint_kernels import Problem, available_backends, run, triton_backend
from flashpoint_kernels.problems.problem import DTYPES
from flashpoint_kernels.timing.device import is_lost
from flashpoint_server.engine.caches.attending import CallTensors
from flashpoint_server.engine.execution.device import ComputeDevice, Stages, speed_of
from flashpoint_server.engine.scheduling.engine_request import EngineRequest
from flashpoint_server.engine.state.memory import bytes_in, tensor_in
from flashpoint_server.ipc.bodies import PlacedTensor
from flashpoint_server.ipc.messages import DeviceInfo

log = structlog.stdlib.get_logger("flashpoint.engine")


class DeviceMissingError(RuntimeError):
    """The device that the settings name does not exist here."""


class CudaDevice(ComputeDevice):
    """A GPU.

    It has three lanes: while one launch computes, a second one copies tensors on the CUDA stream of its own lane, and
    the third lane waits for messages.
    """

    cores, lanes, launches = 1, 3, 2
    shares_cores = False

    def __init__(self, info: DeviceInfo) -> None:
        super().__init__(info)
        self._streams = threading.local()
        self._pinned: set[int] = set()  # addresses of locked memory

    @classmethod
    def open(cls, name: str) -> CudaDevice:
        """Open the GPU `name`: cuda or cuda:N. Raises DeviceMissingError if it does not exist."""
        if not torch.cuda.is_available():
            raise DeviceMissingError(f"device {name} is not available: torch finds no CUDA device; set --device cpu")
        device = torch.device(name)
        if (device.index or 0) >= torch.cuda.device_count():
            last = torch.cuda.device_count() - 1
            raise DeviceMissingError(f"device {name} is not available: the last CUDA device is cuda:{last}")
        properties = torch.cuda.get_device_properties(name)
        name = f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"
        info = DeviceInfo(name, properties.name, properties.total_memory, (), speed_of(name))
        return cls(cls.with_kernels(info))

    @staticmethod
    def with_kernels(info: DeviceInfo) -> DeviceInfo:
        backends = available_backends(info.name)
        return replace_fields(
            info, backends=backends, no_triton=backends.no_triton, kernels_off=dict(backends.off)
        )  # fmt: skip

    def pin(self, memory: mmap.mmap) -> None:
        """Lock shared memory for the copy engine; `unpin` it before it is unmapped.

        If the system refuses to lock the memory, it is copied more slowly: not in parallel with other work.
        """
        try:
            with torch.cuda.device(self.info.name):
                torch.cuda.check_error(int(_cudart().cudaHostRegister(_address(memory), len(memory), 0)))
        except RuntimeError as error:
            log.warning("memory not pinned", size=len(memory), error=str(error))
            # Clear CUDA's error state: otherwise this thread's next launch would report the error.
            with suppress(RuntimeError):
                torch.zeros(1, dtype=torch.float32, device=self.info.name)
        else:
            self._pinned.add(_address(memory))

    def unpin(self, memory: mmap.mmap) -> None:
        if (address := _address(memory)) in self._pinned:
            self._pinned.remove(address)
            with torch.cuda.device(self.info.name):
                torch.cuda.check_error(int(_cudart().cudaHostUnregister(address)))

    def lost(self) -> bool:
        return is_lost(self.info.name)

    def cuts(self, backend: str) -> bool:
        return False

    def compile(self, job: EngineRequest) -> Future[None] | None:
        with self._device_errors:
            meta = partial(torch.empty, device="meta")
            problem = self._problem(
                job,
                lambda t: meta(t.shape, dtype=DTYPES[t.dtype]),
                lambda name, t: t if name in INDEX_TENSORS else meta(t.shape, dtype=t.dtype),
            )
            problem = replace(problem, device=torch.device(self.info.name))
            return None if triton_backend.compiled([problem]) else triton_backend.compile_ahead([problem])

    def call_tensors(self, job: EngineRequest) -> CallTensors:
        """Return copies of the tensors of a job over caches. Raises Refusal 422."""
        given = {t.name: tensor_in(job.memory, t) for t in job.inputs}
        there = {name: t if name in INDEX_TENSORS else t.to(self.info.name) for name, t in given.items()}
        weights = {t.name: tensor_in(job.memory, t) for t in job.outputs if t.name == "key_weights"}
        return CallTensors.of(job.spec, there, weights)

    def kin(self, job: EngineRequest) -> None:
        """Return None: calls over caches share launches, but not what they read."""

    def launch(self, jobs: Sequence[EngineRequest]) -> tuple[list[int | None], Stages]:
        """Compute jobs with the same launch key. Return the dropout seed of each, and the seconds of the copies.

        Copies and kernels run on the lane's own stream, so one lane copies while another computes; the lane waits only
        at the end. Raises OutOfMemoryError and DeviceLostError.
        """
        with self._device_errors, torch.cuda.stream(self._stream()):
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]  # type: ignore[no-untyped-call]
            marks[0].record()
            problems = [self._cached_problem(job.call) if job.call else self._copied(job) for job in jobs]
            marks[1].record()
            run(problems, backend := jobs[0].backend)
            for job, problem in zip(jobs, problems, strict=True):
                self._weigh(job.call, problem, backend)
            marks[2].record()
            for job, problem in zip(jobs, problems, strict=True):
                for t in job.outputs:
                    if t.name not in problem.outputs:  # key weights over caches, which `_weigh` has copied
                        continue
                    answer = problem.outputs[t.name].view(t.shape)
                    tensor_in(job.memory, t).copy_(answer, non_blocking=True)
            marks[3].record()
            for job, problem in zip(jobs, problems, strict=True):
                self._keep_there(job, problem)
            marks[3].synchronize()
            stages = Stages(marks[0].elapsed_time(marks[1]) / 1000, marks[2].elapsed_time(marks[3]) / 1000)
            return [problem.seed for problem in problems], stages

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
        tensors = {t.name: tensor_in(job.memory, t) if t.name in INDEX_TENSORS else there(t) for t in job.inputs}
        tensors |= {name: recalled(name, t) for name, t in self._recalled(job).items()}
        spec, seed = job.spec, job.submit.seed
        return Problem.create(tensors, spec.options, spec.direction, spec=spec, seed=seed)

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Run the `with` block's GPU work on this lane's stream, and wait for its end.

        The wait is needed because the next call on the same cache may use another stream.
        """
        stream = self._stream()
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()

    def _keep_there(self, job: EngineRequest, problem: Problem) -> None:
        """Save the tensors of a forward pass if the job requests it. They stay on the GPU.

        Only index tensors are copied: they are views of staging memory, which an HTTP process reuses.
        """
        if job.saved_forward is None:
            return
        here = {**problem.tensors, **problem.outputs}
        places = (*job.inputs, *job.outputs)
        tensors = {t.name: here[t.name].view(t.shape) for t in places}
        tensors |= {name: t.clone() for name, t in tensors.items() if name in INDEX_TENSORS}
        self.saved.keep(job.saved_forward, tensors)

    def _stream(self) -> torch.cuda.Stream:
        """Return the CUDA stream of this lane (thread)."""
        if not hasattr(self._streams, "stream"):
            self._streams.stream = torch.cuda.Stream(self.info.name)  # type: ignore[no-untyped-call]
        stream: torch.cuda.Stream = self._streams.stream
        return stream

    def empty_cache(self) -> None:
        gc.collect()
        with torch.cuda.device(self.info.name):
            torch.cuda.empty_cache()

    def memory(self) -> int:
        """Return the bytes that torch's allocator has reserved on the GPU."""
        return torch.cuda.memory_reserved(self.info.name)


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
