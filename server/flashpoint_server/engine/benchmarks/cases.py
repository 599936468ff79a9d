"""Make the cases of a benchmark request. This needs no torch, so HTTP processes can check the size of a request."""

from __future__ import annotations

from dataclasses import replace

from flashpoint_contract.options import ProblemError
from flashpoint_contract.schemas.benchmark import BenchmarkRequest
from flashpoint_kernels.timing import Case, grid, preset
from flashpoint_kernels.timing.case import OWN


def cases_of(request: BenchmarkRequest, device: str, *, own_kernel: bool = False) -> list[Case]:
    """Return the cases of a request on `device`. `own_kernel` adds a case with the caller's function to each problem.

    Raises ProblemError.
    """
    if OWN in request.backends:
        reason = "is a function of your own: flashpoint benchmark --kernel MODULE:FUNCTION times it"
        raise ProblemError([("backend", f"{OWN!r} {reason}")])
    cases = _named(request, device)
    problems = {case.problem: case for case in cases}.values() if own_kernel else ()
    return [*(replace(case, backend=OWN) for case in problems), *cases]


def _named(request: BenchmarkRequest, device: str) -> list[Case]:
    if request.preset is None:
        # The smaller preset names the backends that are useful on this device.
        backends = request.backends or dict.fromkeys(case.backend for case in preset("papers", device))
        return grid(
            [shape.model_dump() for shape in request.shapes],
            dtypes=request.dtypes, causal=request.causal, directions=request.directions, backends=backends,
        )  # fmt: skip
    cases = preset(request.preset, device)
    if not request.backends:
        return cases
    problems = {case.problem: case for case in cases}.values()
    return [replace(case, backend=backend) for case in problems for backend in request.backends]
