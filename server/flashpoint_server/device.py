"""The device: the only module of the server that imports torch."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashpoint_kernels import Problem, available_backends, run
from flashpoint_kernels.problem import DTYPES
from flashpoint_kernels.spec import INDEX_TENSORS, Options, ProblemError
from flashpoint_server import messages
from flashpoint_server.messages import DeviceInfo, Submit
from flashpoint_server.refusal import Refusal, invalid


class Device:
    """One device and the backends that it has."""

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info

    @classmethod
    def open(cls, asked: str) -> Device:
        """`asked` is auto, cpu, cuda or cuda:N. Raises RuntimeError where there is none such."""
        name = ("cuda" if torch.cuda.is_available() else "cpu") if asked == "auto" else asked
        if not name.startswith("cuda"):
            return cls(DeviceInfo("cpu", torch.backends.cpu.get_cpu_capability(), _ram(), available_backends("cpu")))
        if not torch.cuda.is_available():
            raise RuntimeError(f"device {asked} is asked for, and torch finds no CUDA device")
        properties = torch.cuda.get_device_properties(name)
        device = torch.device(name)
        name = f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"
        return cls(DeviceInfo(name, properties.name, properties.total_memory, available_backends(name)))

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
        if self.info.name == "cpu":
            return
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(int(call(runtime, address)))

    def run(self, submit: Submit, memory: mmap.mmap) -> dict[str, Any]:
        """Compute a job from and into `memory`; what is not a tensor of its answer.

        Raises Refusal: 422 for index tensors that do not fit, 503 when memory runs out.
        """
        options = submit.options
        try:
            given = {t.name: _in(memory, t) for t in submit.inputs}
            tensors = {name: t if name in INDEX_TENSORS else t.to(self.info.name) for name, t in given.items()}
            wanted = {t.name: _in(memory, t) for t in submit.outputs}
            on_device = {} if self.info.name != "cpu" else wanted
            problem = Problem.create(tensors, options, submit.direction, outputs=on_device)
            run([problem], submit.backend)
            if not on_device:
                for name, t in wanted.items():
                    t.copy_(problem.outputs[name])
        except ProblemError as error:
            raise invalid(error.errors) from None
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            # The traceback holds the very tensors that did not fit.
            error.__traceback__ = None
            raise Refusal("out_of_memory", "the device ran out of memory for this request") from None
        metadata: dict[str, Any] = {"backend": submit.backend}
        if options.dropout_p:
            metadata["dropout_seed"] = problem.seed
        return metadata


def _in(memory: mmap.mmap, t: messages.Tensor) -> Tensor:
    """The tensor, in shared memory."""
    dtype = DTYPES[t.dtype]
    count = math.prod(t.shape)
    if not count:
        return torch.empty(t.shape, dtype=dtype)
    if dtype is not torch.bool:
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=t.offset).view(t.shape)
    # A bool that is neither 0 nor 1 is undefined behaviour; what a caller sends may be any byte.
    return torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=t.offset).ne(0).view(t.shape)


def _is_out_of_memory(error: Exception) -> bool:
    # On the CPU torch says it in words alone: "DefaultCPUAllocator: can't allocate memory".
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def _ram() -> int:
    """Bytes of memory that this process may use: the machine's, or its container's where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdecimal():
        total = min(total, int(text))
    return total
