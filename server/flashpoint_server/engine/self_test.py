"""The start of a device: compare its kernels with exact answers, switch off those that are wrong, measure the rates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product

import msgspec
import structlog
import torch

from flashpoint_contract.options import Options
from flashpoint_kernels import Problem, native, triton_backend
from flashpoint_kernels.dispatching import calibration
from flashpoint_kernels.dispatching.dispatch import run_part
from flashpoint_kernels.dispatching.support import unsupported
from flashpoint_kernels.problems.problem import DTYPE_NAMES
from flashpoint_kernels.tiled_backend import tiles
from flashpoint_server.engine.benchmarks import local
from flashpoint_server.engine.checks import cases, problems
from flashpoint_server.engine.checks.exact import Case
from flashpoint_server.engine.execution.cpu import CpuDevice
from flashpoint_server.engine.execution.cuda import CudaDevice
from flashpoint_server.engine.execution.device import ComputeDevice

log = structlog.stdlib.get_logger("flashpoint.engine")

_PASSING = ("out of memory", "ALLOC_FAILED", "busy or unavailable", "uncorrectable ECC error")
# Queries and keys of the largest block of the gradients in C: of these kernels, and of the others.
_BLOCKS = {"c-amx": (128, 128), "c-avx512bf16": (128, 128)}
_BLOCK = (64, 128)
_TILE = (16, 16)  # queries and keys of a tile, for the check of `tiled`
_FEW = 12  # problems for `reference`, of which each takes 3 ms
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def start(name: str) -> ComputeDevice:
    """Return the device `name` (auto, cpu, cuda or cuda:N), checked and calibrated. Raises RuntimeError."""
    device = open_device(name)
    check_backends(device)
    calibrate(device)
    return device


def open_device(name: str, cpu: type[CpuDevice] = CpuDevice, cuda: type[CudaDevice] = CudaDevice) -> ComputeDevice:
    """Open the device `name`: auto, cpu, cuda or cuda:N. Raises DeviceMissingError if it does not exist."""
    # Code that needs more threads sets their number itself: see flashpoint_kernels.problems.reproducible.
    torch.set_num_threads(1)
    if name.startswith("cuda"):
        return cuda.open(name)
    if name == "auto" and torch.cuda.is_available():
        return cuda.open("cuda")
    return cpu.open(local.no_gpu() if name == "auto" else "")


def may_pass(error: Exception) -> bool:
    """Return whether a restart may succeed: other processes use the memory, or the device has a temporary fault."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in _PASSING)


def check_backends(device: ComputeDevice) -> None:
    """Compare every kernel of this device with exact answers, and switch off those that are wrong.

    A compiler may have made wrong code. The next lower level replaces a kernel in C, and the next backend replaces a
    backend. Raises RuntimeError if no backend is right but `reference`, or if `reference` is wrong.
    """
    if isinstance(device, CpuDevice):
        _check_cpu(device)
    else:
        _check_gpu(device)
    some = solved(list(cases.cases(*_TILE))[:_FEW])
    if wrong := _first(_wrong(some, [torch.float32], device.info.name, "reference")):
        raise RuntimeError(f"the backend reference computes wrongly on {device.info.name}: {wrong}")
    if set(device.info.backends) <= {"reference"}:
        raise RuntimeError(f"no backend computes rightly on {device.info.name}: {device.info.kernels_off}")
    device.empty_cache()


def _check_cpu(device: ComputeDevice) -> None:
    if "cpu" in device.info.backends:
        blocks = _BLOCKS.get(device.info.gradient_kernels["bfloat16"], _BLOCK)
        each, every = solved(cases.cases(*blocks)), solved(cases.cuts(*blocks))
        while "cpu" in device.info.backends and (wrong := _wrong_in_c(each, every)):
            _switch_off(device, wrong)
    if "tiled" in device.info.backends:
        each = solved(cases.cases(*_TILE))
        found = (_wrong(each[n :: len(DTYPES)], [dtype], "cpu", "tiled") for n, dtype in enumerate(DTYPES))
        _check(device, "tiled", (wrong for one in found for wrong in one))
    if "triton" in device.info.backends:  # under Triton's interpreter, which takes a second for one small problem
        _check(device, "triton", _wrong(solved([cases.small()]), DTYPES[::2], "cpu", "triton"))


def _check_gpu(device: ComputeDevice) -> None:
    every = solved(cases.compiled())
    for backend in device.info.backends:
        if backend == "reference":
            continue
        if backend == "triton":
            try:
                _warm(device.info.name)
            except Exception as error:
                if may_pass(error):
                    raise
                _switch_off(device, {backend: f"they do not compile: {error}"})
                continue
        _check(device, backend, _wrong(every, DTYPES, device.info.name, backend))


def calibrate(device: ComputeDevice) -> None:
    """Store the rates of each backend in `device.info`, from which the seconds of requests are predicted.

    A CPU's rates are measured. A GPU's rates follow from its measured FLOP/s.
    """
    info = device.info
    rates = {
        backend: calibration.measure(backend) if info.name == "cpu" else calibration.of_gpu(backend, info.speed)
        for backend in info.backends
    }
    device.info = msgspec.structs.replace(info, rates=rates)
    log.debug("calibrated", rates={name: one._asdict() for name, one in rates.items()})


def solved(some: Iterable[Case]) -> list[Case]:
    """Return the cases with their exact answers."""
    every = list(some)
    for case in every:
        case.solve()
    return every


def _in_turn(each: Sequence[Case], dtype: torch.dtype) -> Sequence[Case]:
    """Return the cases for a data type: those without options or with one, and every third of the pairs of options."""
    alone = [case for case in each if "+" not in case.name]
    return [*alone, *[case for case in each if "+" in case.name][DTYPES.index(dtype) :: len(DTYPES)]]


def _wrong_in_c(each: Sequence[Case], every: Sequence[Case]) -> dict[str, str]:
    """Return the kernels in C that compute wrongly, each with the first answer that is wrong.

    A data type computes `every` case, and those of `each` that are its turn: the types share all code but the loads. It
    computes all of `each` if it has a kernel of its own.
    """
    library, wrong = native.library(), {}
    assert library is not None
    for dtype, direction in product(DTYPES, ("forward", "backward")):
        level = library.of(DTYPE_NAMES[dtype], direction).kernel.removeprefix("c-")  # type: ignore[arg-type]
        name = f"{level}.{direction}"
        own = library.of("bfloat16", direction).kernel != library.of("float16", direction).kernel  # type: ignore[arg-type]
        turn = each if own and dtype == torch.bfloat16 else _in_turn(each, dtype)
        if name not in wrong and (found := _first(_wrong([*turn, *every], [dtype], "cpu", "cpu", [direction]))):
            wrong[name] = found
    return wrong


def _wrong(
    every: Iterable[Case], dtypes: Sequence[torch.dtype], device: str, backend: str,
    directions: Sequence[str] = ("forward", "backward"),
) -> Iterator[str]:  # fmt: skip
    """Run the cases, and yield a sentence for each answer that is wrong, and for each failed call.

    If the backend keeps prepared calls for a problem, they also run with other numbers.
    """
    for case, dtype, direction in product(every, dtypes, directions):
        if direction == "backward" and case.do is None:
            continue
        make = problems.forward_of if direction == "forward" else problems.backward_of
        about = f"of {case.name} in {DTYPE_NAMES[dtype]}"
        try:
            problem = replace(make(case, dtype, device), threads=case.threads)
            if unsupported(backend, problem.spec):
                continue
            _run(problem, backend)
            ratios = [*problems.errors(case, problem)]
            if problem.calls:
                problems.change_signs(problem)
                _run(problem, backend)
                ratios += problems.errors(case, problem, changed=True)
        except Exception as error:
            if may_pass(error):
                raise
            yield f"{direction} {about} fails: {type(error).__name__}: {error}"
            continue
        yield from (f"{name} {about} is off by {ratio:.3g} times its bound" for name, ratio in ratios if not ratio <= 1)


def _first(found: Iterator[str]) -> str | None:
    return next(found, None)


def _check(device: ComputeDevice, backend: str, found: Iterator[str]) -> None:
    if wrong := _first(found):
        _switch_off(device, {backend: wrong})


def _switch_off(device: ComputeDevice, wrong: dict[str, str]) -> None:
    for name, reason in wrong.items():
        log.error("kernel switched off", kernel=name, reason=reason, device=device.info.name)
    device.switch_off({name: f"the check at the engine's start: {reason}" for name, reason in wrong.items()})


def _run(problem: Problem, backend: str) -> None:
    if backend == "tiled" and problem.device.type == "cpu":
        with torch.no_grad():
            (tiles.forward if problem.spec.direction == "forward" else tiles.backward)([problem], _TILE)
    else:
        run_part(problem, backend)


def _warm(device: str) -> None:
    """Compile, in parallel, the kernels that most requests need: 16-bit attention and gradients without options."""
    compiling = []
    for dtype, dim in product((torch.float16, torch.bfloat16), (64, 128)):
        t = torch.zeros(1, 1, 16, dim, dtype=dtype, device=device)
        problem = Problem.create(dict.fromkeys(("q", "k", "v", "do"), t), Options(), "backward")
        compiling.append(triton_backend.compile_ahead([problem]))  # also compiles the forward
    for done in compiling:
        done.result()
