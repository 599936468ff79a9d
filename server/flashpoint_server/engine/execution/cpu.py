"""The CPU as the engine's device: parts compute in shared memory, several at the same time."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from msgspec.structs import replace as replace_fields

from flashpoint_kernels import available_backends, native, run
from flashpoint_kernels.cpu_backend.spans import shares
from flashpoint_kernels.problems.reproducible import CORES
from flashpoint_kernels.timing.device import device_name
from flashpoint_server.engine.caches.attending import CallTensors
from flashpoint_server.engine.execution.device import NO_COPIES, ComputeDevice, Stages, speed_of
from flashpoint_server.engine.scheduling.engine_request import EngineRequest
from flashpoint_server.engine.state.memory import tensor_in
from flashpoint_server.ipc.messages import DeviceInfo


class CpuDevice(ComputeDevice):
    """The CPU.

    One more thread than `cores` can run a short part (see scheduler.py).
    """

    launches = 1
    shares_cores = True

    def __init__(self, info: DeviceInfo) -> None:
        super().__init__(info)
        self.cores, self.lanes = info.cores, info.cores + 1

    @classmethod
    def open(cls, no_gpu: str = "") -> CpuDevice:
        """Open the CPU. `no_gpu` says why it was chosen with a torch that is built for GPUs."""
        speed = speed_of("cpu") * CORES
        info = DeviceInfo("cpu", device_name("cpu"), _ram(), (), speed, cores=CORES, no_gpu=no_gpu)
        return cls(cls.with_kernels(info))

    @staticmethod
    def with_kernels(info: DeviceInfo) -> DeviceInfo:
        backends, kernels = available_backends(info.name), native.names()
        return replace_fields(
            info, backends=backends, no_triton=backends.no_triton, kernels_off=dict(backends.off), kernels=kernels,
            gradient_kernels=native.names("backward"), no_kernels="" if kernels else native.missing(),
        )  # fmt: skip

    def pin(self, memory: mmap.mmap) -> None:
        """Do nothing: parts compute in the shared memory itself."""

    def unpin(self, memory: mmap.mmap) -> None:
        """Do nothing, like `pin`."""

    def lost(self) -> bool:
        return False

    def cuts(self, backend: str) -> bool:
        return backend != "triton"

    def compile(self, job: EngineRequest) -> None:
        """Return None: on the CPU, Triton kernels are interpreted, not compiled."""

    def call_tensors(self, job: EngineRequest) -> CallTensors:
        return job.tensors(self._tensors)

    def _tensors(self, job: EngineRequest) -> CallTensors:
        given = {t.name: tensor_in(job.memory, t) for t in job.inputs}
        return CallTensors.of(job.spec, given, {t.name: tensor_in(job.memory, t) for t in job.outputs})

    def kin(self, job: EngineRequest) -> Hashable | None:
        """Like `ComputeDevice.kin`: None on another backend than `cpu`, or if no other cache shares the first chunk."""
        cache_ref, spec = job.submit.cache_ref, job.spec
        assert cache_ref is not None
        if job.backend != "cpu":
            return None
        chunk = self.caches.shared_chunk(cache_ref.owner, cache_ref.caches, cache_ref.layer)
        if chunk is None or not shares(spec):
            return None
        return chunk, spec.dtype, spec.q_heads, spec.scale, spec.options.softcap

    def launch(self, jobs: Sequence[EngineRequest]) -> tuple[list[int | None], Stages]:
        with self._device_errors:
            problems = [self._cached_problem(job.call) if job.call else self.in_place(job) for job in jobs]
            run(problems, backend := jobs[0].backend)
            for job, problem in zip(jobs, problems, strict=True):
                self._weigh(job.call, problem, backend)
                self._keep(job)
        return [problem.seed for problem in problems], NO_COPIES

    def in_order(self) -> AbstractContextManager[None]:
        return nullcontext()

    def empty_cache(self) -> None:
        gc.collect()

    def memory(self) -> int:
        """Return the bytes of RAM that this process has resident."""
        return int(os.pread(_STATM, 128, 0).split()[1]) * mmap.PAGESIZE


_STATM = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


def _ram() -> int:
    """Return the bytes of memory for this process: the machine's, or its container's if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdecimal():
        total = min(total, int(text))
    return total
