"""A pytest plugin that prepares every launch of the device tests for an absent GPU, and does not run it.

    FLASHPOINT_TEST_ARCH=90 python -m pytest -p tests.support.kernels.resolved tests/kernels/test_triton_hopper.py

Tensors are on the CPU. Each problem is cut into tiles and kernel calls with the GPU's table of tile sizes, up to the
arguments of each kernel. The answers come from the tiled backend, or are 0 if it would take long. So the tests check
which kernels would run for their shapes, and how many.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # Triton reads it when kernels are defined

from torch import Tensor

from flashpoint_kernels import Options, Problem, verification
from flashpoint_kernels.dispatching import dispatch
from flashpoint_kernels.problems.problem import with_forwards
from flashpoint_kernels.tiled_backend import tiles
from flashpoint_kernels.triton_backend.host import launch
from flashpoint_kernels.triton_backend.host.calls import Call
from flashpoint_kernels.triton_backend.tools import ahead

LARGEST = 1 << 22  # problems with more scores get zeros as answers
resolved: list[str] = []  # the kernels that would have run

ahead.pretend(int(os.environ["FLASHPOINT_TEST_ARCH"]))
_module, _verify = dispatch._module, verification.verify


def resolve(calls: Iterable[Call]) -> None:
    """Build the arguments of every kernel call, and record the kernel's name."""
    for call in calls:
        if call.programs:
            call.args()
            resolved.append(call.kernel.__name__)


def forward(problems: Sequence[Problem]) -> None:
    resolve(launch.forward_calls(problems))
    _answer(problems, tiles.forward)


def backward(problems: Sequence[Problem]) -> None:
    resolve(launch.backward_calls(problems, [launch.scratch_of(problem) for problem in problems]))
    _answer(problems, tiles.backward)


def prepare(problems: Sequence[Problem]) -> Callable[[], None]:
    run = forward if problems[0].spec.direction == "forward" else backward
    return lambda: run(problems)


def _answer(problems: Sequence[Problem], run: Callable[[Sequence[Problem]], None]) -> None:
    for problem in problems:
        spec = problem.spec
        if spec.batch * spec.q_heads * spec.q_len * spec.kv_len <= LARGEST:
            run([problem])
        else:
            for t in problem.outputs.values():
                t.zero_()


def verify(tensors: Mapping[str, Tensor], options: Options | None = None, **more: Any) -> Any:
    """Prepare the launches that `verify` makes for `triton`; pass any other backend to the real `verify`."""
    options = options or Options()
    if options.backend not in ("auto", "triton") or more:
        return _verify(tensors, options, **more)
    inputs = {name: t for name, t in tensors.items() if name not in ("do", "dlse", "o", "lse")}
    problem = Problem.create(inputs, replace(options, return_lse=True))
    resolve(launch.forward_calls([problem]))
    if "do" in tensors:
        (whole,) = with_forwards([Problem.create(tensors, options, "backward")])[1]
        resolve(launch.backward_calls([whole], [launch.scratch_of(whole)]))
    return SimpleNamespace(ok=True, backend="triton", tensors=())


def available_backends(device: str) -> tuple[str, ...]:
    """Return the backends of a GPU for every device, and `cpu`, which tests name: their tensors are on the CPU."""
    return ("triton", "torch", "cpu", "tiled", "reference")


def module(backend: str) -> Any:
    return SimpleNamespace(forward=forward, backward=backward) if backend == "triton" else _module(backend)


replaced: dict[Any, dict[str, Any]] = {
    dispatch: {"_module": module, "available_backends": available_backends},
    verification: {"verify": verify},
    launch: {"forward": forward, "backward": backward, "prepare": prepare},
}
for owner, names in replaced.items():
    for name, value in names.items():
        setattr(owner, name, value)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"resolved: {len(resolved)} launches of {', '.join(sorted(set(resolved)))}")
