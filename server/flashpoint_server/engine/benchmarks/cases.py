"""Make the cases of a benchmark request: each is one backend on one problem.

This needs no torch, so HTTP processes can count the cases of a request before they accept it.
"""

from __future__ import annotations

from dataclasses import replace

from flashpoint_contract.options import BackendRenamedError, ProblemError
from flashpoint_contract.schemas.benchmark import BenchmarkRequest
from flashpoint_kernels.timing import Case, grid, preset
from flashpoint_kernels.timing.case import OWN, useful


def cases_of(request: BenchmarkRequest, device: str, *, own_kernel: bool = False) -> list[Case]:
    """Return the cases of a request on `device`. With `own_kernel`, the caller's function also runs on each problem.

    Raises ProblemError if the request is not valid, names the caller's function (`OWN`) as a backend, or `torch` on a
    CPU.
    """
    if OWN in request.backends:
        reason = "is a function of your own: flashpoint benchmark --kernel MODULE:FUNCTION times it"
        raise ProblemError([("backend", f"{OWN!r} {reason}")])
    if "torch" in request.backends and device == "cpu":
        raise BackendRenamedError("backends")
    cases = _named(request, device)
    problems = {case.problem: case for case in cases}.values() if own_kernel else ()
    return [*(replace(case, backend=OWN) for case in problems), *cases]


def _named(request: BenchmarkRequest, device: str) -> list[Case]:
    if request.preset is None:
        # If the request names no backends, use those of the preset `papers`: the ones that are useful on this device.
        backends = request.backends or dict.fromkeys(case.backend for case in preset("papers", device))
        cases = grid(
            [shape.model_dump() for shape in request.shapes],
            dtypes=request.dtypes, causal=request.causal, directions=request.directions, backends=backends,
        )  # fmt: skip
        return cases if request.backends else useful(cases)
    cases = preset(request.preset, device)
    if not request.backends:
        return cases
    problems = {case.problem: case for case in cases}.values()
    return [replace(case, backend=backend) for case in problems for backend in request.backends]
