"""Check the exactness of one problem's answers: their errors against float64, torch's errors, and a verdict.

Answers that a caller passes must be within the bounds of `judging.exact.bounds`, element by element; so must float32
answers of a backend with `precision="tf32"`. All other answers of a backend have one bound per tensor. Let err be
max|answer − float64|, torch the same error of torch's plain attention in the inputs' dtype, and f = 2 (gradients: 3):

    float16, bfloat16   err <= f·torch + 1e-5, and err <= the dtype's absolute bound
    float32             up to 512 rows and D 32: err <= 2e-6 of the tensor's largest value; or, if torch misses this
                        bound, err <= f·torch
                        otherwise: err <= 5e-6 of the largest value, or err <= f·torch
    float64             err <= 1e-12 of the largest value or of 1
    lse                 is always float32: float32's rule with the largest value or 1; f·torch only for float32 inputs

float32 needs the bound f·torch for scores in the hundreds, for example of distant keys with ALiBi. A bound relative to
torch's error alone misses errors if the softmax is sharp, hence the absolute bounds. If gradients cancel (one key: dq =
dk = 0), no float32 arithmetic is within such bounds: gradients follow from ds = P∘(dP − delta), and delta =
rowsum(o∘do) is only as exact as the rounding of o and the sums in float32. So a gradient that misses its bound may have
the error that this rounding of delta causes. Likewise, if the terms p·v of o cancel, o may have the error of their
rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashpoint_contract.judging import Cause
from flashpoint_contract.options import GRADS, Direction, Options, ProblemError
from flashpoint_contract.spec import Spec
from flashpoint_contract.tensors import INPUT_TENSORS, JUDGED, TAKEN
from flashpoint_contract.wording.hints import did_you_mean
from flashpoint_kernels.dispatching.dispatch import backend_for, run
from flashpoint_kernels.judging import captured
from flashpoint_kernels.judging.exact import bounds
from flashpoint_kernels.problems.memory import check_memory
from flashpoint_kernels.problems.modes import exact_products
from flashpoint_kernels.problems.problem import DTYPES, Problem
from flashpoint_kernels.reference_backend import formula

# Absolute bounds for answers up to 1 (scaled for larger answers): a few rounding units of the dtype.
_ABSOLUTE = {"float16": {"o": 4 * 2.0**-10, "grad": 8 * 2.0**-10}, "bfloat16": {"o": 4 * 2.0**-7, "grad": 8 * 2.0**-7}}


@dataclass(frozen=True)
class TensorErrors:
    """The distance of one tensor from float64. If both have the same infinity, or both NaN, the error is 0."""

    max_abs: float  # inf if an element is NaN or infinite in one of the two, and not the same in the other
    max_rel: float  # max_abs over the largest float64 value
    rms: float  # over values that are finite in both tensors, like cosine
    cosine: float
    worst_index: tuple[int, ...] | None  # the position of max_abs; None for an empty tensor
    worst_value: float | None
    worst_expected: float | None


@dataclass(frozen=True)
class Decade:
    """The number of elements with an error from 10^exponent to below 10^(exponent+1); None means an error of 0."""

    exponent: int | None  # for infinite errors 309, which is beyond float64's range
    count: int


@dataclass(frozen=True, kw_only=True)
class Judgement(TensorErrors):
    """One answer: its errors, its bound, and the errors of torch's plain attention in the same dtype."""

    name: str
    bound: float  # bound for max_abs; for a caller's answers, the max_abs at which `excess` would be 1
    rule: str  # the reason for the bound
    ok: bool
    excess: float  # largest error / bound; a caller's answers have a bound for each element, L of judging.exact.bounds
    imprecise: bool = False  # right, but with larger errors than float32 scores, or torch's plain attention, would have
    where: str = ""  # which sequences, heads, rows and columns are wrong, of a caller's answer
    torch: TensorErrors
    histogram: tuple[Decade, ...]  # all elements, smallest errors first


@dataclass(frozen=True)
class Verification:
    """The result of `verify`. `backend` is "given" if the caller passed the answers."""

    backend: str
    dtype: str
    ok: bool
    tensors: tuple[Judgement, ...]
    causes: tuple[Cause, ...] = ()  # known mistakes that give the caller's wrong answers

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists and numbers; a number may be infinite."""
        return asdict(self)


@dataclass(frozen=True)
class Progress:
    """The progress of a verification: `done` of `total` blocks, and the stage of the next block.

    A block is one call of the backend, or some queries of all heads of a sequence. `stage` is backend, float64, torch,
    rounding or causes. The last two are only needed for an answer beyond its bound, and then increase `total`.
    """

    done: int
    total: int
    stage: str
    direction: Direction


class _Work:
    """Count the blocks of a verification, and report its progress."""

    def __init__(self, tell: Callable[[Progress], None] | None) -> None:
        self.total = 0
        self._begun = 0
        self._tell = tell

    def begin(self, stage: str, problem: Problem) -> None:
        """Report the start of a block, and that earlier blocks are done."""
        if self._tell is not None:
            self._tell(Progress(self._begun, self.total, stage, problem.spec.direction))
        self._begun += 1

    def more(self, stage: str, problem: Problem) -> Callable[[], None]:
        """Return a function that reports the start of a block that the total does not yet include."""

        def begin() -> None:
            self.total += 1
            self.begin(stage, problem)

        return begin

    def of(self, stage: str, problem: Problem) -> Callable[[], None]:
        return partial(self.begin, stage, problem)


def verify(
    tensors: Mapping[str, Tensor],
    options: Options | None = None,
    *,
    answers: Mapping[str, Tensor] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Verification:
    """Compare answers with float64: those of a backend, which runs the problem, or your own.

    Memory is O(Sq + Sk) in float64 (see `reference_backend`), time O(Sq·Sk).

    Args:
        tensors: Tensors by their names, as `attention` takes them: q (B, Hq, Sq, D), k (B, Hk, Sk, D), v (B, Hk, Sk,
            Dv), … With `do` (B, Hq, Sq, Dv) the gradients that `options.grads` names are judged, too.
        options: Options of `attention`; `backend` names the one that runs. None is the defaults.
        answers: Your own answers, which are judged in place of a backend's: any of o (B, Hq, Sq, Dv), lse (B, Hq, Sq),
            dq, dk, dv, dattn_mask and dsinks (of their inputs' shapes). With dropout, `dropout_seed` is needed.
        progress: Called with a `Progress` before each block of work. An exception that it raises ends the verification.

    Returns:
        The errors of each tensor, their bounds, and the verdict `ok`.

    Raises:
        ProblemError: as `attention`; and answers whose names or shapes do not fit.
    """
    options = options or Options()
    if answers is not None and options.dropout_p and options.dropout_seed is None:
        raise ProblemError([("dropout_seed", "is required: answers with dropout can only be checked with their seed")])
    _check_names(tensors)
    inputs = {name: t for name, t in tensors.items() if name in TAKEN["forward"]}
    forward = _poisoned(inputs, replace(options, return_lse=True), "forward")
    options = replace(options, dropout_seed=forward.seed)
    problems = [forward]
    if "do" in tensors:
        problems.append(_poisoned(tensors, options, "backward"))
    work = _Work(progress)
    allows_tf32 = forward.spec.dtype == "float32" and options.precision == "tf32"
    if answers is None:
        backend = backend_for(problems[-1].spec, str(forward.device))
        work.total += len(problems) + (0 if allows_tf32 else sum(2 * formula.blocks(problem) for problem in problems))
        work.begin("backend", forward)
        run([forward], backend)
        for problem in problems[1:]:
            if not problem.spec.has_forward:
                problem.tensors |= forward.outputs
            work.begin("backend", problem)
            run([problem], backend)
        answers = {name: t for problem in problems for name, t in problem.outputs.items()}
    else:
        backend = "given"
        _check_answers(answers, problems)
        problems = [problem for problem in problems if not answers.keys().isdisjoint(problem.outputs)]
    if backend == "given" or allows_tf32:
        work.total += sum(bounds.blocks(problem) + formula.blocks(problem) for problem in problems)
        return replace(_given(problems, answers, forward.spec.dtype, work), backend=backend)
    judged = []
    for problem in problems:
        names = [name for name in problem.outputs if name in answers]
        exact = _solve(problem, torch.float64, work.of("float64", problem))
        plain = _solve(problem, DTYPES[problem.spec.dtype], work.of("torch", problem))
        of_problem = [_judge(problem.spec, name, answers[name], exact[name], plain[name]) for name in names]
        if not all(t.ok for t in of_problem):
            noise = _noise(problem, forward, work)  # takes about as long as the two calls of `_solve` above
            of_problem = [t if t.ok or t.name not in noise else _forgiven(t, *noise[t.name]) for t in of_problem]
        judged += of_problem
    return Verification(backend, forward.spec.dtype, all(t.ok for t in judged), tuple(judged))


def _given(problems: list[Problem], answers: Mapping[str, Tensor], dtype: str, work: _Work) -> Verification:
    """Judge the answers that a caller passed."""
    judged: list[Judgement] = []
    causes: list[Cause] = []
    for problem in problems:
        given = {name: answers[name] for name in problem.outputs if name in answers}
        inputs = {name: t for name, t in problem.tensors.items() if name not in ("o", "lse")}
        problem = replace(problem, tensors=inputs, outputs={name: problem.outputs[name] for name in given})
        plain = _solve(problem, DTYPES[problem.spec.dtype], work.of("torch", problem))
        held_answers = captured.held(problem, given, partial(_usual, problem.spec, plain), work.of("float64", problem))
        for name, held in held_answers.items():
            exact = held.limits.value
            difference = _difference(answers[name], exact)
            errors = _errors(answers[name], exact, difference)
            bound = errors.max_abs / held.excess if held.excess else _largest(held.limits.allowed)
            judged.append(Judgement(
                **vars(errors), name=name, bound=bound, rule=_of_elements(problem.spec, name), ok=held.ok,
                excess=held.excess, imprecise=held.imprecise, where=held.where,
                torch=_errors(plain[name], exact, _difference(plain[name], exact)), histogram=_histogram(difference),
            ))  # fmt: skip
        if not causes:
            causes = captured.explain(problem, given, held_answers, work.more("causes", problem))
    return Verification("given", dtype, all(t.ok for t in judged), tuple(judged), tuple(causes))


def _usual(spec: Spec, plain: Mapping[str, Tensor], name: str, exact: Tensor) -> float:
    """Return the bound for a backend's error in the answer `name`, from the error of torch's plain attention."""
    of_torch = _errors(plain[name], exact, _difference(plain[name], exact)).max_abs
    return _bound(spec, name, _largest(exact), of_torch)[0]


def _of_elements(spec: Spec, name: str) -> str:
    if spec.dtype == "float32" and spec.options.precision == "tf32":
        return "the rounding of TF32, element by element"
    if spec.dtype in ("float32", "float64") or name == "lse":
        return f"the rounding of {'float32' if name == 'lse' else spec.dtype}, element by element"
    return f"the rounding of {spec.dtype}, scores included, element by element"


def _check_names(tensors: Mapping[str, Tensor]) -> None:
    """Raise ProblemError for tensors that are never read: the caller meant another name."""
    taken = INPUT_TENSORS if "do" in tensors else TAKEN["forward"]
    errors = [(name, "needs do" if name in INPUT_TENSORS else _unknown(name)) for name in tensors if name not in taken]
    if errors:
        raise ProblemError(errors)


def _unknown(name: str) -> str:
    known = f"; known are {', '.join(INPUT_TENSORS)}, and as answers o, lse, {', '.join(GRADS)}"
    return f"unknown tensor{did_you_mean(name, (*INPUT_TENSORS, *JUDGED)) or known}"


def _poisoned(tensors: Mapping[str, Tensor], options: Options, direction: Direction) -> Problem:
    """Return the problem with NaN in its outputs, so that unwritten elements are noticed."""
    problem = Problem.create(tensors, options, direction)
    for t in problem.outputs.values():
        t.fill_(float("nan"))
    return problem


def _check_answers(answers: Mapping[str, Tensor], problems: list[Problem]) -> None:
    check_memory(**answers)
    expected = {name: t for problem in problems for name, t in problem.outputs.items()}
    errors = []
    for name, t in answers.items():
        if name not in expected:
            errors.append((name, f"is not an answer of this problem; answers are {', '.join(expected)}"))
        elif t.shape != expected[name].shape:
            errors.append((name, f"shape {list(t.shape)} must be {list(expected[name].shape)}"))
    if errors:
        raise ProblemError(errors)


def _solve(problem: Problem, dtype: torch.dtype, block: Callable[[], None]) -> dict[str, Tensor]:
    """Return the answers of the plain formula, computed and stored in `dtype`."""
    problem = replace(problem, outputs={name: torch.empty_like(t, dtype=dtype) for name, t in problem.outputs.items()})
    with torch.no_grad(), torch.autocast(problem.device.type, enabled=False), exact_products():
        solve = formula.solve_forward if problem.spec.direction == "forward" else formula.solve_backward
        solve(problem, dtype, block)
    return problem.outputs


def _noise(problem: Problem, forward: Problem, work: _Work) -> dict[str, tuple[float, str]]:
    """Return the error of each answer that unavoidable float32 rounding causes, and a description of the rounding.

    A sum has the rounding errors of its terms, which may be far larger than the sum. For o, the error is the largest
    Σ p·|v| times four rounding units: two for the sum and two for p. For gradients, the error comes from delta. Because
    delta contains −dlse, it is the gradient for do = 0 and a dlse of the size of delta's error.
    """
    unit, float32 = (torch.finfo(dtype).eps / 2 for dtype in (DTYPES[problem.spec.dtype], torch.float32))
    v = forward.tensors["v"]
    sizes = {"v": v.abs()}
    if forward.spec.quantized:  # |−128| does not fit int8
        sizes = {"v": v.float().abs(), "v_scale": forward.tensors["v_scale"].abs()}
    terms = replace(forward, tensors=forward.tensors | sizes)
    more = [forward] if problem is forward else [forward, forward, problem]
    work.total += sum(map(formula.blocks, more))
    largest = _solve(terms, torch.float64, work.of("rounding", forward))["o"]
    if problem is forward:
        return {"o": (4 * min(unit, float32) * _largest(largest), "the rounding of rowsum(p*v)")}
    do = problem.canonical("do", problem.tensors["do"]).double()
    o = problem.canonical("o", _solve(forward, torch.float64, work.of("rounding", forward))["o"])
    # `dlse` is the error of delta = rowsum(o∘do). The rounding errors of o's elements are independent: two units times
    # the norm of o∘do exceed three standard deviations of their sum. The errors of a running sum are not independent:
    # count one unit for the sum in delta, one for the sum in dP, and the four units of o, which P also brings into dS.
    sums = (problem.canonical("o", largest) * do.abs()).sum(-1)
    dlse = 2 * unit * (o * do).norm(dim=-1) + 6 * min(unit, float32) * sums
    dlse = dlse.reshape(problem.spec.lse_shape)
    nothing = torch.zeros_like(problem.tensors["do"])
    shifted = replace(problem, tensors=problem.tensors | {"do": nothing, "dlse": dlse})
    moved = _solve(shifted, torch.float64, work.of("rounding", problem))
    return {name: (_largest(t), "the rounding of rowsum(o*do)") for name, t in moved.items()}


def _forgiven(judged: Judgement, noise: float, rule: str) -> Judgement:
    """Return the verdict on an answer that exceeds its bound; the bound becomes `noise` if that is larger."""
    if noise <= judged.bound:
        return judged
    return replace(judged, bound=noise, rule=rule, ok=judged.max_abs <= noise, excess=judged.max_abs / noise)


def _judge(spec: Spec, name: str, answer: Tensor, exact: Tensor, plain: Tensor) -> Judgement:
    difference = _difference(answer, exact)
    errors = _errors(answer, exact, difference)
    of_torch = _errors(plain, exact, _difference(plain, exact))
    bound, rule = _bound(spec, name, _largest(exact), of_torch.max_abs)
    return Judgement(
        **vars(errors), name=name, bound=bound, rule=rule, ok=errors.max_abs <= bound,
        excess=errors.max_abs / bound if bound else math.inf if errors.max_abs else 0.0, torch=of_torch,
        histogram=_histogram(difference),
    )  # fmt: skip


def _errors(answer: Tensor, exact: Tensor, difference: Tensor) -> TensorErrors:
    max_abs = float(difference.max()) if difference.numel() else 0.0
    largest = _largest(exact)
    finite = answer.isfinite() & exact.isfinite()
    a, e = answer.double()[finite], exact[finite]
    norms = float(a.norm() * e.norm())
    worst = None
    if difference.numel():
        worst = tuple(int(n) for n in torch.unravel_index(difference.argmax(), difference.shape))
    return TensorErrors(
        max_abs=max_abs,
        max_rel=max_abs / largest if largest else max_abs,
        rms=float((a - e).square().mean().sqrt()) if a.numel() else 0.0,
        cosine=float(a @ e) / norms if norms else float(a.norm() == e.norm()),
        worst_index=worst,
        worst_value=float(answer[worst]) if worst is not None else None,
        worst_expected=float(exact[worst]) if worst is not None else None,
    )


def _largest(exact: Tensor) -> float:
    finite = exact[exact.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _histogram(difference: Tensor) -> tuple[Decade, ...]:
    exponents, counts = torch.unique(difference.log10().floor(), return_counts=True)
    names = {-math.inf: None, math.inf: 309}
    return tuple(
        Decade(names[exponent] if math.isinf(exponent) else int(exponent), count)
        for exponent, count in zip(exponents.tolist(), counts.tolist(), strict=True)
    )


def _difference(answer: Tensor, exact: Tensor) -> Tensor:
    """Return |answer − exact| in float64: 0 if both are the same infinity or both NaN, ∞ if only one is not finite."""
    answer = answer.double()
    same = (answer == exact) | (answer.isnan() & exact.isnan())
    return (answer - exact).abs().nan_to_num(nan=float("inf"), posinf=float("inf")).masked_fill(same, 0.0)


def _bound(spec: Spec, name: str, largest: float, torch_max_abs: float) -> tuple[float, str]:
    """Return the maximum for max_abs, and the reason in words."""
    factor = 2 if name in ("o", "lse") else 3
    if spec.dtype == "float64" and name != "lse":
        return 1e-12 * max(largest, 1.0), "1e-12 of the largest value"
    if spec.dtype == "float32" or name == "lse":
        small = max(spec.q_len, spec.kv_len) <= 512 and max(spec.head_dim, spec.value_dim) <= 32
        relative = 2e-6 if small else 5e-6
        bound = relative * (max(largest, 1.0) if name == "lse" else largest)
        if spec.dtype == "float32" and torch_max_abs > (bound if small else bound / factor):
            return factor * torch_max_abs, f"{factor} x torch's float32 error"
        return bound, f"{relative:g} of the largest value"
    relative = factor * torch_max_abs + 1e-5
    absolute = _ABSOLUTE[spec.dtype]["o" if name == "o" else "grad"] * max(largest, 1.0)
    if relative < absolute:
        return relative, f"{factor} x torch's {spec.dtype} error + 1e-5"
    return absolute, f"the absolute bound of {spec.dtype}"
