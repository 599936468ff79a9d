"""A device of the engine: prepares jobs in shared memory, computes parts, and classifies the device's errors.

`cpu.py` has what only a CPU does, `cuda.py` what only a GPU does.
"""

from __future__ import annotations

import mmap
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from flashpoint_contract.options import Options, ProblemError
from flashpoint_contract.schemas.options import AttentionOptions
from flashpoint_contract.schemas.verify import VerifyRequest
from flashpoint_contract.spec import Row
from flashpoint_contract.tensors import INDEX_TENSORS, SCALES
from flashpoint_kernels import Problem
from flashpoint_kernels.cpu_backend.spans import Part
from flashpoint_kernels.dispatching import dispatch
from flashpoint_kernels.dispatching.dispatch import run_part
from flashpoint_kernels.problems.problem import check_scales
from flashpoint_kernels.problems.reproducible import split
from flashpoint_server.engine.benchmarks import local
from flashpoint_server.engine.caches.attending import CachedCall, CallTensors, Sequences, attend
from flashpoint_server.engine.caches.cache import StoredCache, Terms
from flashpoint_server.engine.caches.chunks import Track
from flashpoint_server.engine.caches.store import CacheStore
from flashpoint_server.engine.caches.weighing import WeighingPart, weigh, weighing
from flashpoint_server.engine.scheduling.engine_request import EngineRequest, OutOfMemoryError
from flashpoint_server.engine.state.ledger import Ledger
from flashpoint_server.engine.state.memory import tensor_in
from flashpoint_server.engine.state.saved import SavedForward, SavedStore
from flashpoint_server.ipc.bodies import CacheRef, Recall, Save
from flashpoint_server.ipc.messages import DeviceInfo
from flashpoint_server.refusal import of_problem


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


class ComputeDevice(ABC):
    """One device and its backends.

    `lanes` threads run its tasks, at most `launches` launches and `cores` parts at the same time. `shares_cores` says
    whether a launch computes on the cores of this machine, as its HTTP processes do.
    """

    cores: int
    lanes: int
    launches: int
    shares_cores: bool
    ledger: Ledger  # set, like the stores, before the device serves requests
    caches: CacheStore
    saved: SavedStore

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info
        self._device_errors = _DeviceErrors(self._tell_apart)

    @staticmethod
    @abstractmethod
    def with_kernels(info: DeviceInfo) -> DeviceInfo:
        """Return `info` with the backends and kernels that are available now."""

    @abstractmethod
    def pin(self, memory: mmap.mmap) -> None:
        """Lock shared memory for a GPU's copy engine; `unpin` it before it is unmapped."""

    @abstractmethod
    def unpin(self, memory: mmap.mmap) -> None: ...

    @abstractmethod
    def lost(self) -> bool:
        """Return whether the device does not work any more in this process, for example after an illegal access."""

    @abstractmethod
    def cuts(self, backend: str) -> bool:
        """Return whether a request on `backend` is cut into `parts` for several lanes; otherwise it is one launch."""

    @abstractmethod
    def compile(self, job: EngineRequest) -> Future[None] | None:
        """Compile a Triton job's kernels in the background, and return the future; None if there is none to compile.

        This reads the shapes of tensors, and the values of index tensors only. Call `rows` first, which checks these.
        """

    @abstractmethod
    def call_tensors(self, job: EngineRequest) -> CallTensors:
        """Return the tensors of a job over caches. Raises Refusal 422."""

    @abstractmethod
    def kin(self, job: EngineRequest) -> Hashable | None:
        """Return a key for a call over caches. Calls with equal keys begin with the same chunk of a cache.

        If they are computed together, this chunk is read only once. Return None if the call must not be computed with
        others.
        """

    @abstractmethod
    def launch(self, jobs: Sequence[EngineRequest]) -> tuple[list[int | None], Stages]:
        """Compute jobs with the same launch key. Return the dropout seed of each, and the seconds of the copies.

        The outputs are in the jobs' shared memory. Raises OutOfMemoryError and DeviceLostError.
        """

    @abstractmethod
    def in_order(self) -> AbstractContextManager[None]:
        """Run the `with` block's work after all earlier work on the caches, and wait for its end."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Free memory that no tensor uses any more, before a retry."""

    @abstractmethod
    def memory(self) -> int:
        """Return the bytes of memory that the engine uses on the device."""

    def switch_off(self, found: Mapping[str, str]) -> None:
        """Switch kernels or backends off, each name (native/switches.py) with its reason."""
        dispatch.switch_off(found)
        self.info = self.with_kernels(self.info)

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

    def rows(self, job: EngineRequest) -> tuple[Row, ...]:
        """Return the sequences of a job. Raises Refusal 422 if values of its tensors are not valid."""
        index = {t.name: tensor_in(job.memory, t).tolist() for t in job.inputs if t.name in INDEX_TENSORS}
        index |= {name: t.tolist() for name, t in self._recalled(job).items() if name in INDEX_TENSORS}
        try:
            check_scales({t.name: tensor_in(job.memory, t) for t in job.inputs if t.name in SCALES})
            return job.spec.rows(index)
        except ProblemError as error:
            raise of_problem(error) from None

    def parts(self, job: EngineRequest) -> list[Problem]:
        """Cut a job into parts that compute in its shared memory. Raises Refusal 422."""
        return split(self.in_place(job), job.backend)

    def tracks(self, ref: CacheRef) -> list[Track]:
        """Return what a call over caches has read, for each of its sequences. Raises Refusal."""
        caches = self.caches.find(Terms(ref.owner, ref.quota, ref.key), ref.caches)
        return [cache.tracks[ref.layer] for cache in caches]

    def write(self, call: CachedCall) -> Sequence[StoredCache]:
        """Write the new tokens of a call over caches, after all checks, and return its caches. Raises Refusal."""
        with self._device_errors, self.in_order():
            return call.write(self.caches)

    def attend(
        self, calls: Sequence[tuple[CachedCall, Sequence[StoredCache]]], backend: str, cores: int
    ) -> tuple[list[Sequences], Sequence[Problem | Part]]:
        """Cut calls over caches into parts for `cores` cores. Return each call's sequences and seed, and the parts.

        `write` has written the calls' tokens. Several calls must have equal `kin`. Raises Refusal.
        """
        with self._device_errors:
            return attend(calls, backend, cores)

    def run(self, part: Problem | Part | WeighingPart, backend: str) -> None:
        """Compute a part. Raises OutOfMemoryError."""
        try:
            if isinstance(part, Part | WeighingPart):
                part.compute()
            else:
                run_part(part, backend)
        except (MemoryError, RuntimeError) as error:
            self._tell_apart(error)
            raise

    def weighing(self, call: CachedCall, caches: Sequence[StoredCache], backend: str) -> Sequence[WeighingPart]:
        """Return the parts that compute the key weights of a call that has them, when its other parts have ended."""
        assert call.of.weights is not None
        with self._device_errors:
            return weighing(call, caches, backend, call.of.outputs["lse"], call.of.weights)[1]

    def _weigh(self, call: CachedCall | None, problem: Problem, backend: str) -> None:
        """Compute the key weights of a call over caches, if it has any, after its `problem` has run."""
        if call is not None and call.of.weights is not None:
            caches = self.caches.find(call.terms, call.cache_ref.caches)
            weigh(call, caches, backend, problem.outputs["lse"].view(call.of.spec.lse_shape))

    def _cached_problem(self, call: CachedCall) -> Problem:
        """Return the problem of a call over caches, after `write` has written its tokens. Raises Refusal 422."""
        return call.problem(self.caches.find(call.terms, call.cache_ref.caches))

    # Saved forwards

    def reserve(self, save: Save) -> SavedForward:
        """Reserve memory for a forward pass that will be saved. Raises Refusal 413 and 429."""
        return self.saved.reserve(save)

    def drop(self, forward: SavedForward) -> None:
        """Free the memory that was reserved for a forward pass that has failed."""
        self.saved.drop(forward.serial)

    def keep(self, job: EngineRequest) -> None:
        """Save a forward after all its parts have run. Raises OutOfMemoryError."""
        with self._device_errors:
            self._keep(job)

    def _keep(self, job: EngineRequest) -> None:
        """Save the tensors of a forward pass if the job requests it.

        They are copied out of staging memory, which an HTTP process reuses. The copy takes 1/30 of the forward's time
        at 1,024 tokens, and less at more tokens.
        """
        if job.saved_forward is not None:
            places = (*job.inputs, *job.outputs)
            self.saved.keep(job.saved_forward, {t.name: tensor_in(job.memory, t).clone() for t in places})

    def _recalled(self, job: EngineRequest) -> Mapping[str, Tensor]:
        """Return the tensors of the saved forward that a job uses. Raises Refusal 404 and 410."""
        recall = job.submit.saved
        return self.saved.tensors(recall.owner, recall.serial) if isinstance(recall, Recall) else {}

    def in_place(self, job: EngineRequest) -> Problem:
        """Return the job's problem with views of its shared memory. Raises Refusal 422 like `rows`, and 404 and 410."""
        spec, memory = job.spec, job.memory
        given = {t.name: tensor_in(memory, t) for t in job.inputs}
        given |= {name: t.cpu() for name, t in self._recalled(job).items()}
        wanted = {t.name: tensor_in(memory, t) for t in job.outputs}
        try:
            return Problem.create(given, spec.options, spec.direction, spec=spec, outputs=wanted, seed=job.submit.seed)
        except ProblemError as error:
            raise of_problem(error) from None

    def verify(self, job: EngineRequest, progress: local.Tell) -> bytes:
        """Return the VerifyReport of a verification, in JSON. Raises Refusal 422, OutOfMemoryError and DeviceLostError.

        `progress` is called before each block of work. If it raises, the verification ends.
        """
        request_json, inputs = job.verification.request, job.inputs
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


def speed_of(device: str) -> float:
    """Return the measured FLOP/s of a matrix product: in float32 on one CPU thread, or in bfloat16 on a GPU."""
    n, dtype = (512, torch.float32) if device == "cpu" else (8192, torch.bfloat16)
    t = torch.ones(n, n, dtype=dtype, device=device)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        (t @ t)[0, 0].item()
        seconds.append(time.perf_counter() - began)
    return 2 * n**3 / min(seconds)
