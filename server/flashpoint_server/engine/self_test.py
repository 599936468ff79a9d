"""The start of a device: check its backends against the float64 reference, and measure their rates."""

from __future__ import annotations

from itertools import product

import msgspec
import structlog
import torch
from torch import Tensor

from flashpoint_contract.options import Options
from flashpoint_kernels import Problem, run, triton_backend
from flashpoint_kernels.dispatching import calibration
from flashpoint_server.engine.execution.device import TorchDevice

log = structlog.stdlib.get_logger("flashpoint.engine")

# Bounds of the relative error of correct results: rounding errors reach only 1/20 of them.
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 0.1}

_PASSING = ("out of memory", "ALLOC_FAILED", "busy or unavailable", "uncorrectable ECC error")


def start(name: str) -> TorchDevice:
    """Return the device `name` (auto, cpu, cuda or cuda:N), checked and calibrated. Raises RuntimeError."""
    device = TorchDevice.open(name)
    check_backends(device)
    calibrate(device)
    return device


def may_pass(error: Exception) -> bool:
    """Return whether a restart may succeed: other processes use the memory, or the device has a temporary fault."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in _PASSING)


def check_backends(device: TorchDevice) -> None:
    """Check the forward and the gradients of every backend against the float64 reference on this device.

    A compiler may have produced wrong code. Raises RuntimeError, which names the backend that is wrong.
    """
    name = device.info.name
    for backend in device.info.backends:
        for dtype, bound in BOUNDS.items() if backend != "reference" else ():
            for tensor, error in _errors(name, backend, dtype).items():
                if not error <= bound:
                    raise RuntimeError(
                        f"the {backend} backend disagrees with the reference on {name}: "
                        f"{tensor} in {dtype} is off by {error:.3g} of its largest value"
                    )
    if not device.is_cpu:
        _warm(name)
    device.empty_cache()


def calibrate(device: TorchDevice) -> None:
    """Store the rates of each backend in `device.info`, from which the seconds of requests are predicted.

    A CPU's rates are measured. A GPU's rates follow from its measured FLOP/s.
    """
    info = device.info
    rates = {
        backend: calibration.measure(backend) if device.is_cpu else calibration.of_gpu(backend, info.speed)
        for backend in info.backends
    }
    device.info = msgspec.structs.replace(info, rates=rates)
    log.debug("calibrated", rates={name: one._asdict() for name, one in rates.items()})


def _errors(device: str, backend: str, dtype: torch.dtype) -> dict[str, float]:
    """Return the error of each answer, relative to its largest value, on a small causal problem with GQA."""
    generator = torch.Generator().manual_seed(7)
    shapes = {"q": (2, 4, 37, 16), "k": (2, 2, 53, 16), "v": (2, 2, 53, 16), "do": (2, 4, 37, 16)}
    tensors = {n: torch.randn(s, generator=generator).to(device, dtype) for n, s in shapes.items()}
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


def _warm(device: str) -> None:
    """Compile, in parallel, the kernels that most requests need: 16-bit attention and gradients without options."""
    compiling = []
    for dtype, dim in product((torch.float16, torch.bfloat16), (64, 128)):
        t = torch.zeros(1, 1, 16, dim, dtype=dtype, device=device)
        problem = Problem.create(dict.fromkeys(("q", "k", "v", "do"), t), Options(), "backward")
        compiling.append(triton_backend.compile_ahead([problem]))  # also compiles the forward
    for done in compiling:
        done.result()
