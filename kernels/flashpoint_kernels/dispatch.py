"""The backends of a device, and the function that runs a group of problems on one of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache, partial
from importlib import import_module
from types import ModuleType

import torch

from flashpoint_contract.options import ProblemError
from flashpoint_kernels.problem import Problem, launch_key, with_forwards
from flashpoint_kernels.reproducible import split, spread, with_all_threads
from flashpoint_kernels.support import unsupported

# A backend is a module with `forward(problems)` and `backward(problems)`, which is imported at its first use.
_MODULES = {
    "triton": "triton_backend.launch",
    "torch": "torch_backend.fused",
    "tiled": "tiled_backend.tiles",
    "reference": "reference_backend.formula",
}
_OWN_FORWARD = ("reference",)  # its `backward` computes `o` and `lse` if they are missing

# Triton reads the variable when kernels are defined, so its value at import counts.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def available_backends(device: str) -> tuple[str, ...]:
    """Return the backends of a device, in the order in which `auto` prefers them.

    On the CPU Triton's kernels run only under Triton's interpreter (TRITON_INTERPRET=1), as the last choice.

    Args:
        device: `cpu`, `cuda` or `cuda:N`.
    """
    if torch.device(device).type == "cuda":
        return ("triton", "torch", "tiled", "reference")
    return ("torch", "tiled", "reference", *(("triton",) if _INTERPRETED else ()))


def run(problems: Sequence[Problem], backend: str) -> None:
    """Run problems on a backend, in one launch, into their outputs.

    A gradient without `o` and `lse` first runs the same backend's forward. On the CPU `torch` and `tiled` run on all
    cores: one problem with torch's own threads where its bits keep, else cut as `reproducible.split` says; such a part
    may also be run by itself.

    Args:
        problems: Problems with one direction, one device and one `problem.launch_key`.
        backend: `triton`, `torch`, `tiled` or `reference`.

    Raises:
        ProblemError: the backend cannot do a problem.
        ValueError: the problems do not belong in one launch.
    """
    if not problems:
        return
    if len({(launch_key(p.spec, backend), p.device) for p in problems}) > 1:
        raise ValueError("the problems of one launch must share one launch key and one device")
    if errors := [e for p in problems for e in unsupported(backend, p.spec, p.device.type)]:
        raise ProblemError(dict.fromkeys(errors))
    if problems[0].device.type == "cpu" and backend in ("torch", "tiled"):
        if backend == "torch" and len(problems) == 1 and (whole := with_all_threads(problems[0])).threads:
            run_part(whole, backend)
        else:
            spread([partial(run_part, part, backend) for problem in problems for part in split(problem, backend)])
    else:
        _run(problems, backend)


def run_part(part: Problem, backend: str) -> None:
    """Run a part from `reproducible.split` in the calling thread. The backend must support it."""
    _run([part], backend)


def _run(problems: Sequence[Problem], backend: str) -> None:
    kind = problems[0].device.type
    if torch.is_grad_enabled():
        with torch.no_grad():
            _run(problems, backend)
    elif torch.is_autocast_enabled(kind):  # autocast would convert float32 products inside a backend to 16 bits
        with torch.autocast(kind, enabled=False):
            _run(problems, backend)
    elif problems[0].spec.direction == "forward":
        _module(backend).forward(problems)
    else:
        forwards, problems = ([], problems) if backend in _OWN_FORWARD else with_forwards(problems)
        if forwards:
            if backend == "tiled" and kind == "cpu":  # the forward can be cut by heads, even if the gradients cannot
                forwards = [part for problem in forwards for part in split(problem, backend)]
            _module(backend).forward(forwards)
        _module(backend).backward(problems)


@cache
def _module(backend: str) -> ModuleType:
    return import_module(f"flashpoint_kernels.{_MODULES[backend]}")
