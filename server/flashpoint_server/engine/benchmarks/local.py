"""Verify and benchmark attention, and describe the device, in this process: for commands without `--url`.

The functions accept the same requests and return the same answers as a server. The `flashpoint` command finds them
through the entry point group `flashpoint.local`. This module needs torch.
"""

from __future__ import annotations

import datetime
import itertools
import os
import subprocess
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from flashpoint_contract.options import Options, ProblemError
from flashpoint_contract.schemas.benchmark import (
    BenchmarkEvent,
    BenchmarkRequest,
    BenchmarkRow,
    DeviceEvent,
    ProgressEvent,
    RowEvent,
    State,
    StateEvent,
)
from flashpoint_contract.schemas.options import AttentionOptions
from flashpoint_contract.schemas.shapes import Shape
from flashpoint_contract.schemas.verify import VerifyProgress, VerifyReport, VerifyRequest
from flashpoint_contract.tensors import JUDGED
from flashpoint_kernels import available_backends, native
from flashpoint_kernels.dispatching.support import SUPPORT
from flashpoint_kernels.problems.problem import DTYPES
from flashpoint_kernels.timing import Timing, describe, run_grid
from flashpoint_kernels.timing.own_kernel import Kernel
from flashpoint_kernels.verification import Progress, Verification
from flashpoint_kernels.verification import verify as judge
from flashpoint_server.engine.benchmarks.cases import cases_of

Tell = Callable[[VerifyProgress], None]  # called before each block of a verification; an exception ends it


def benchmark(request: BenchmarkRequest, kernel: Kernel | None = None) -> Iterator[BenchmarkEvent]:
    """Run a benchmark, and yield the events that a server would stream. Raises ProblemError before the first event.

    `kernel` is a function of the caller, which is also timed.
    """
    return (event for event in slices(request, _device(), kernel=kernel) if event is not None)


def slices(
    request: BenchmarkRequest, device: str, slice_ms: float = 20.0, kernel: Kernel | None = None
) -> Generator[BenchmarkEvent | None, None, None]:
    """Run a benchmark on a device that also serves requests.

    Yields an event, or None, after each `slice_ms` of work or so; the device is then idle. A single call that takes
    longer is not split. Closing the generator stops the benchmark. Raises like `benchmark`.
    """
    cases = cases_of(request, device, own_kernel=kernel is not None)
    timing = Timing(
        precision=request.relative_precision,
        max_seconds=request.max_seconds,
        warmup_ms=request.warmup_ms,
        slice_ms=slice_ms,
    )
    ids = itertools.count(1)
    load = [round(x, 2) for x in os.getloadavg()]  # system load at the start, caused by other programs

    def state(name: State, error: str | None = None) -> StateEvent:
        return StateEvent(id=next(ids), state=name, at=datetime.datetime.now(datetime.UTC), error=error)

    yield state("running")
    at: tuple[int, str | None] | None = None
    try:
        with closing(run_grid(cases, device, timing, kernel)) as events:
            for event in events:
                if event["type"] == "device":
                    environment = event["environment"] | {"load_average": load, "commit": _commit()}
                    yield DeviceEvent(id=next(ids), device=environment["device"], environment=environment)
                elif event["type"] == "row":
                    row = BenchmarkRow.model_validate(event["row"])
                    yield RowEvent(id=next(ids), done=event["done"], total=event["total"], row=row)
                elif at != (at := (event["done"], event["backend"])):
                    yield ProgressEvent(
                        id=next(ids), done=event["done"], total=event["total"], backend=event["backend"]
                    )
                else:
                    yield None
    except (RuntimeError, MemoryError) as error:
        yield state("failed", f"{type(error).__name__}: {error}")
        return
    yield state("done")


def verify(request: VerifyRequest, device: str | None = None, progress: Tell | None = None) -> VerifyReport:
    """Run a random problem (see `draw`) on a backend, and report whether the answers are exact enough.

    The report has the tensors of `request.direction`. Raises ProblemError.
    """
    device, start = device or _device(), time.monotonic()
    options = Options(**{name: getattr(request, name) for name in AttentionOptions.model_fields})
    verification = judge(draw(request, device), options, progress=_telling(progress))
    report = _report(verification, device, start, request.seed)
    if request.direction != "backward":
        return report
    judged = tuple(t for t in report.tensors if t.name not in ("o", "lse"))
    return report.model_copy(update={"tensors": judged, "ok": all(t.ok for t in judged)})


class PackedBody(Protocol):
    """A tensor of the caller: the name of its dtype, its shape, and its contiguous memory as flat bytes."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def data(self) -> memoryview: ...


def verify_tensors(
    tensors: Mapping[str, PackedBody], options: AttentionOptions, progress: Tell | None = None
) -> VerifyReport:
    """Report whether answers are exact enough: those in `tensors` (o, lse, dq, …), or else those of a backend.

    The other `tensors` (q, k, v, …) are the inputs of the problem. Raises ProblemError.
    """
    device = _device()
    given = {name: _tensor(packed).to(device) for name, packed in tensors.items()}
    return judge_given(given, Options(**dict(options)), device, progress)


def judge_given(
    given: Mapping[str, Tensor], options: Options, device: str, progress: Tell | None = None
) -> VerifyReport:
    """Like `verify_tensors`, for tensors that are on `device` already."""
    start = time.monotonic()
    problem = {name: t for name, t in given.items() if name not in JUDGED}
    answers = {name: t for name, t in given.items() if name in JUDGED}
    verification = judge(problem, options, answers=answers or None, progress=_telling(progress))
    return _report(verification, device, start)


def _telling(progress: Tell | None) -> Callable[[Progress], None] | None:
    return None if progress is None else lambda at: progress(VerifyProgress.model_validate(asdict(at)))


def _report(verification: Verification, device: str, start: float, seed: int | None = None) -> VerifyReport:
    about = {"device": describe(device)["device"], "seed": seed, "seconds": time.monotonic() - start}
    return VerifyReport.model_validate(verification.to_dict() | about)


def _tensor(packed: PackedBody) -> Tensor:
    if not packed.data:
        return torch.empty(packed.shape, dtype=DTYPES[packed.dtype], device="cpu")
    return torch.frombuffer(bytearray(packed.data), dtype=DTYPES[packed.dtype]).view(packed.shape)


def info() -> dict[str, Any]:
    """Return what `/info` returns, for this machine: versions, device, backends and the options of each."""
    name = _device()
    described, backends = describe(name), available_backends(name)
    kernels = native.names() if name == "cpu" else {}
    no_kernels = native.missing() if name == "cpu" and not kernels else ""
    return {
        "name": "flashpoint",
        "version": described["flashpoint"],
        "versions": {package: described[package] for package in ("python", "torch", "triton")},
        "device": {"name": name, "title": described["device"], "memory": described.get("memory_bytes")},
        "backends": list(backends),
        "kernels": kernels,
        "missing": [reason for reason in (backends.no_triton, no_kernels, no_gpu()) if reason],
        "options": {backend: sorted(SUPPORT[backend]) for backend in backends},
    }


def no_gpu() -> str:
    """Return why torch's CUDA build runs on the CPU, in a sentence for users; "" if it has a GPU, or is a CPU build."""
    if torch.version.cuda is None or torch.cuda.is_available():
        return ""
    return (
        f"torch is built for CUDA {torch.version.cuda} but finds no GPU, so the CPU computes: start the container with "
        "--gpus all, and check the driver with nvidia-smi"
    )


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _commit() -> str | None:
    """Return the commit of this checkout; None if the file is installed and not in a checkout."""

    def git(*arguments: str) -> str:
        command, here = ["git", *arguments], Path(__file__).parent
        return subprocess.run(command, cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", __file__)
        return git("rev-parse", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return None


def draw(request: VerifyRequest, device: str) -> dict[str, Tensor]:
    """Return random input tensors for a request, by name, with `do` if gradients are checked. Equal on all devices.

    q, k, v, do, a float mask and sinks are standard normal. Slopes are those of ALiBi (Press et al. 2022). A boolean
    mask is true for 3/4 of the pairs, a block mask for 1/2 of the blocks. Lengths are uniform from 1 to the full
    length. Raises ProblemError for two masks.
    """
    shape, extras = request.shape, request.extras
    if {"bool_mask", "float_mask"} <= set(extras):
        raise ProblemError([("extras", "a problem can have only one mask: choose bool_mask or float_mask")])
    generator = torch.Generator("cpu").manual_seed(request.seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64, device="cpu").to(
            device, DTYPES[request.dtype]
        )

    def uniform(*size: int) -> Tensor:
        return torch.rand(size, generator=generator, dtype=torch.float32, device="cpu")

    def rows(heads: int, length: int, dim: int) -> Tensor:
        sizes = {
            "bhsd": (shape.batch, heads, length, dim),
            "bshd": (shape.batch, length, heads, dim),
            "thd": (shape.batch * length, heads, dim),
        }
        return normal(*sizes[request.layout])

    tensors = {
        "q": rows(shape.q_heads, shape.q_len, shape.head_dim),
        "k": rows(shape.kv_heads, shape.kv_len, shape.head_dim),
        "v": rows(shape.kv_heads, shape.kv_len, shape.value_dim),
    }
    if request.direction != "forward":
        tensors["do"] = rows(shape.q_heads, shape.q_len, shape.value_dim)
    if request.layout == "thd":
        for name, length in (("cu_seqlens_q", shape.q_len), ("cu_seqlens_k", shape.kv_len)):
            tensors[name] = torch.arange(shape.batch + 1, dtype=torch.int64, device="cpu") * length
    if "float_mask" in extras:
        tensors["attn_mask"] = normal(1, shape.q_heads, shape.q_len, shape.kv_len)
    if "bool_mask" in extras:
        seen = uniform(shape.batch, 1, shape.q_len, shape.kv_len) < 0.75
        tensors["attn_mask"] = seen.to(device)
    if "block_mask" in extras:
        blocks = (-(-n // size) for n, size in zip((shape.q_len, shape.kv_len), request.block_size, strict=True))
        seen = uniform(shape.batch, shape.q_heads, *blocks) < 0.5
        tensors["block_mask"] = seen.to(device)
    if "alibi_slopes" in extras:
        heads = torch.arange(1, shape.q_heads + 1, dtype=torch.float32, device="cpu")
        tensors["alibi_slopes"] = torch.exp2(-8.0 * heads / shape.q_heads).to(device)
    if "sinks" in extras:
        tensors["sinks"] = normal(shape.q_heads)
    for name, length in (("q_lengths", shape.q_len), ("kv_lengths", shape.kv_len)):
        if name in extras:
            tensors[name] = _lengths(shape, length, generator)
    if "offset" in extras:
        ends = -shape.q_len, shape.kv_len + 1  # from the offset that hides all keys to one that hides none
        tensors["offset"] = _integers(*ends, shape, generator)
    return tensors


def _lengths(shape: Shape, length: int, generator: torch.Generator) -> Tensor:
    return _integers(min(1, length), length + 1, shape, generator)


def _integers(low: int, high: int, shape: Shape, generator: torch.Generator) -> Tensor:
    return torch.randint(low, high, (shape.batch,), generator=generator, dtype=torch.int64, device="cpu")
