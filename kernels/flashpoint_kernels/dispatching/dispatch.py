"""List the backends of a device, and run a group of problems on one of them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, lru_cache, partial
from importlib import import_module
from types import ModuleType

import torch

from flashpoint_contract.options import BackendRenamedError, ProblemError
from flashpoint_contract.spec import Spec
from flashpoint_kernels import native
from flashpoint_kernels.dispatching.key_weights import weighing
from flashpoint_kernels.dispatching.machine import version_of
from flashpoint_kernels.dispatching.support import Backends, choose_backend, unsupported
from flashpoint_kernels.native import switches
from flashpoint_kernels.problems.modes import exact_products
from flashpoint_kernels.problems.problem import Problem, launch_key, with_forwards
from flashpoint_kernels.problems.reproducible import split, spread
from flashpoint_kernels.triton_backend.host.configurations import refusal

# A backend is a module with `forward(problems)` and `backward(problems)`. It is imported at its first use.
_MODULES = {
    "triton": "triton_backend.host.launch",
    "cpu": "cpu_backend.run",
    "torch": "torch_backend.fused",
    "tiled": "tiled_backend.tiles",
    "reference": "reference_backend.formula",
}
_DERIVATIVES = {"tiled": "tiled_backend.derivatives", "reference": "reference_backend.derivatives"}
_TANGENTS = {"cpu": "cpu_backend.derivatives", **_DERIVATIVES}  # backends of the forward's tangents
_OF_OPERATORS = ("torch", "tiled", "reference")  # backends that are made of torch's operators
_OWN_FORWARD = ("reference", "cpu")  # backends whose `backward` computes missing `o` and `lse` itself
_AS_IS = nullcontext()  # changes no mode of torch

# Triton reads this variable when it defines kernels, so only the value at import time counts.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache(maxsize=64)
def available_backends(device: str) -> Backends:
    """Return the backends of a device, in the order in which `auto` prefers them.

    `cpu` is the kernels in C. Triton's kernels run on a CPU only under Triton's interpreter
    (TRITON_INTERPRET=1), as the last choice. On a GPU where Triton's kernels give wrong results, torch's operators
    replace them; `no_triton` has the reason. On devices other than CPUs and NVIDIA's GPUs only tiles of torch
    operations run. Backends that are switched off are left out; `off` has the reasons.

    Args:
        device: `cpu`, `cuda`, `cuda:N` or another device of torch.
    """
    kind, reason = torch.device(device).type, ""
    if kind == "cpu":
        in_c = ("cpu",) if native.library() is not None else ()
        names = (*in_c, "tiled", "reference", *(("triton",) if _INTERPRETED else ()))
    elif kind != "cuda" or torch.version.hip is not None:
        names = ("tiled", "reference") if kind == "cuda" else ("tiled",)  # other devices may lack float64
        reason = "the kernels are for NVIDIA's GPUs"
    else:  # without a GPU, these are the backends of a supported GPU: a caller may ask before a device exists
        names = ("triton", "torch", "tiled", "reference")
        if torch.cuda.is_available():
            major, minor = torch.cuda.get_device_capability(device)
            reason = refusal(10 * major + minor, version_of("triton"))
        if reason:
            names = names[1:]
    off = switches.switched_off()
    return Backends((name for name in names if name not in off), kind, reason, off)


def switch_off(found: Mapping[str, str]) -> None:
    """Switch kernels or backends off in this process, each name (native/switches.py) with its reason."""
    switches.note(found)
    native.library.cache_clear()
    available_backends.cache_clear()


def backend_for(spec: Spec, device: str) -> str:
    """Return the backend for a problem on a device. Warn if `auto` has to do without the kernels in C.

    Raises ProblemError, as `choose_backend`.
    """
    available = available_backends(device)
    if spec.options.backend == "auto" and available.kind == "cpu" and "cpu" not in available:
        warnings.warn(
            f"auto takes the backend tiled, which is slower: {native.missing()}", RuntimeWarning, stacklevel=2
        )
    return choose_backend(spec, available)


def derivative_backend(spec: Spec, device: str) -> str:
    """Return the backend for derivatives along a direction, of the forward or of the gradients.

    It is `cpu` only where `auto` asks for the forward's tangents, which the kernels in C have for some problems.
    Raises ProblemError if `spec` names a backend without them, or one that cannot do this problem.
    """
    named = spec.options.backend
    if named != "auto":
        if named not in _DERIVATIVES:
            text = f"{named} has no forward-mode or second derivatives: use auto, {' or '.join(_DERIVATIVES)}"
            raise ProblemError([("backend", text)])
        return backend_for(spec, device)
    if "cpu" in available_backends(device) and not unsupported("cpu", spec, derived=True):
        return "cpu"
    return next((each for each in _DERIVATIVES if not unsupported(each, spec, derived=True)), "reference")


def run(problems: Sequence[Problem], backend: str) -> None:
    """Run problems on a backend in one launch, and write the results into the problems' `outputs`.

    For gradients without given `o` and `lse`, the backend's forward runs first. `cpu`, and `tiled` on a CPU, run on
    all cores: the kernels in C start threads for a single problem; other problems are cut into parts by
    `reproducible.split`, which run in parallel. To run one part in the calling thread, use `run_part`.

    Args:
        problems: Problems with one direction, one device and one `problem.launch_key`.
        backend: `triton`, `cpu`, `torch`, `tiled` or `reference`.

    Raises:
        ProblemError: the backend cannot do a problem; BackendRenamedError for `torch` on a CPU.
        ValueError: the problems do not belong in one launch.
    """
    if not problems:
        return
    if len(problems) > 1 and len({(launch_key(p.spec, backend), p.device) for p in problems}) > 1:
        raise ValueError("the problems of one launch must share one launch key and one device")
    kind = problems[0].device.type
    if kind != "cpu" and backend not in (available := available_backends(str(problems[0].device))):
        why = available.no_triton or f"the backends of a device of kind {kind} are {', '.join(available)}"
        raise ProblemError([("backend", f"{backend} is not available on this device: {why}")])
    if kind == "cpu" and backend == "torch":
        raise BackendRenamedError
    if errors := [e for p in problems for e in unsupported(backend, p.spec, p.tangents is not None)]:
        raise ProblemError(dict.fromkeys(errors))
    if kind == "cpu" and backend in ("cpu", "tiled"):
        if backend == "cpu" and len(problems) == 1:
            run_part(replace(problems[0], threads=torch.get_num_threads()), backend)
        else:
            spread([partial(run_part, part, backend) for problem in problems for part in split(problem, backend)])
    else:
        _run(problems, backend)


def run_part(part: Problem, backend: str) -> None:
    """Run a part from `reproducible.split` in the calling thread. The backend must support it."""
    _run([part], backend)


def _run(problems: Sequence[Problem], backend: str) -> None:
    kind, spec = problems[0].device.type, problems[0].spec
    # autocast would convert float32 products inside a backend to 16 bits
    own_types = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _AS_IS
    exact = exact_products() if backend in _OF_OPERATORS and spec.options.precision == "ieee" else _AS_IS
    with torch.no_grad(), own_types, exact:
        _solve(problems if spec.has_columns else [problem.with_columns() for problem in problems], backend)


def _solve(problems: Sequence[Problem], backend: str) -> None:
    if problems[0].tangents is not None:
        if left := import_module(f"flashpoint_kernels.{_TANGENTS[backend]}").solve(problems):
            run(left, "tiled")
    elif problems[0].spec.direction == "forward":
        if any("key_weights" in problem.outputs for problem in problems):
            _solve_and_weigh(problems, backend)
        else:
            _module(backend).forward(problems)
    else:
        forwards, problems = ([], problems) if backend in _OWN_FORWARD else with_forwards(problems)
        if forwards:
            if (
                backend == "tiled" and problems[0].device.type == "cpu"
            ):  # these can be cut by heads where gradients cannot
                forwards = [part for problem in forwards for part in split(problem, backend)]
            _module(backend).forward(forwards)
        _module(backend).backward(problems)


def _solve_and_weigh(problems: Sequence[Problem], backend: str) -> None:
    """Compute forwards, and the key weights of those that have this output, from lse."""
    module, forwards, weighed = _module(backend), [], []
    for problem in problems:
        outputs = dict(problem.outputs)
        if (weights := outputs.pop("key_weights", None)) is not None:
            if "lse" not in problem.tensors and "lse" not in outputs:
                outputs["lse"] = problem.empty_like_output("lse")
            weighed.append(replace(problem, outputs=outputs | {"key_weights": weights}))
        if "lse" not in problem.tensors:  # else the caller has the forward's answers
            forwards.append(replace(problem, outputs=outputs))
    if forwards:
        module.forward(forwards)
    for problem in weighed:
        module.backward(list(weighing(problem, backend)))


@cache
def _module(backend: str) -> ModuleType:
    return import_module(f"flashpoint_kernels.{_MODULES[backend]}")
