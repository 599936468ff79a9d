"""Compute the two operators' answers from the operators' arguments: a list of tensors, and options as text."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashpoint_contract.options import GRADS, OPTIONS, Direction, Flag, Kind, Number, OneOf, Options, Pair
from flashpoint_contract.tensors import BACKWARD_TENSORS, FORWARD_TENSORS, TENSORS
from flashpoint_kernels.dispatching.dispatch import backend_for, derivative_backend, run
from flashpoint_kernels.problems.memory import in_memory
from flashpoint_kernels.problems.problem import Problem
from flashpoint_kernels.problems.strides import laid_like

# Options are one string argument: a Python literal of those that are not the default. With one argument for each
# option, torch's time for a call with a gradient grows with the square of their number. Measured at (1,1,4,8) on one
# CPU core: 330 µs with 22 arguments, 230 µs with one string; the library itself takes 115 µs.
_PLAIN: dict[type[Kind], Callable[[Any], Any]] = {
    OneOf: str, Flag: bool, Number: float, Pair: lambda pair: (int(pair[0]), int(pair[1])),
}  # fmt: skip
_OPTIONS = {
    name: _PLAIN[type(option.kind)]
    for name, option in OPTIONS.items()
    if option.direction is None and type(option.kind) in _PLAIN
}
GIVEN = ("do", "o", "lse", "dlse")
BOTH = tuple(name for name in FORWARD_TENSORS if name in BACKWARD_TENSORS)
SMOOTH = tuple(name for name in BOTH if TENSORS[name].gradient)  # the inputs that have gradients, and directions
FORWARD_ONLY = frozenset(FORWARD_TENSORS) - frozenset(BOTH)
_ORDINARY = frozenset({Tensor, torch.nn.Parameter, type(None)})  # not subclasses, which may redefine operations
_SEED_BITS = (1 << 64) - 1


def text_of(options: Options) -> str:
    """Return `literal(options)`, from a cache except under torch.compile, which would warn about the cache."""
    return literal(options) if torch.compiler.is_compiling() else _remembered(options)


def literal(options: Options) -> str:
    """Return the options that are not the default, as a literal: "{'causal': True}". The seed is passed as a tensor."""
    given = [
        f"'{name}': {kind(value)!r}"
        for name, kind in _OPTIONS.items()
        if (value := getattr(options, name)) != OPTIONS[name].default
    ]
    return "{" + ", ".join(given) + "}"


_remembered = lru_cache(1024)(literal)


def seed_of(options: Options) -> Tensor | None:
    """Return the seed as a tensor for the operators: its 64 bits in an int64 on the CPU, like a drawn seed."""
    seed = options.dropout_seed
    if seed is None:
        return None
    return torch.tensor(seed if seed < 1 << 63 else seed - (1 << 64), dtype=torch.int64, device="cpu")


@lru_cache(1024)
def options_of(text: str, grads: tuple[str, ...] | None, seeded: bool) -> Options:
    """Return the `Options` of an operator's arguments. If a seed is given, it is 0 here: the cache then ignores it."""
    given = ast.literal_eval(text) | ({"dropout_seed": 0} if seeded else {})
    return Options(**given, return_lse=True) if grads is None else Options(**given, grads=grads)


def named(names: Sequence[str], values: Sequence[Tensor | None]) -> dict[str, Tensor]:
    return {name: t for name, t in zip(names, values, strict=True) if t is not None}


def forward_request(*arguments: Any) -> tuple[dict[str, Tensor], Options, Tensor | None]:
    *inputs, seed, text = arguments
    return named(FORWARD_TENSORS, inputs), options_of(text, None, seed is not None), seed


def backward_request(*arguments: Any) -> tuple[dict[str, Tensor], Options, Tensor | None]:
    *inputs, text, grads = arguments
    seed = inputs.pop(len(BOTH))
    return named((*BOTH, *GIVEN), inputs), options_of(text, tuple(grads), seed is not None), seed


def _solved(
    tensors: dict[str, Tensor], options: Options, seed: Tensor | None, direction: Direction
) -> dict[str, Tensor]:
    problem = Problem.create(tensors, options, direction, fixed_pages=True, seed=_number(seed))
    run([problem], backend_for(problem.spec, str(problem.device)))
    return problem.outputs


def _number(seed: Tensor | None) -> int | None:
    return None if seed is None else int(seed) & _SEED_BITS


def attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    request = forward_request(*arguments)
    answers = _solved(*request, "forward")
    return laid_like(answers["o"], request[0]["q"]), answers["lse"]


def attention_backward(*arguments: Any) -> list[Tensor]:
    request = backward_request(*arguments)
    answers = _solved(*request, "backward")
    return [laid_like(answers[name], request[0][name[1:]]) for name in arguments[-1]]


def tangents(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the tangents of o and lse: see `derivatives.Tangents`."""
    count = len(BOTH)
    *tensors, seed, o, lse = arguments[: count + 3]
    *dots, text = arguments[count + 3 :]
    inputs = named(BOTH, tensors)
    options = options_of(text, None, seed is not None)
    problem = Problem.create(inputs, options, "forward", outputs={"o": o, "lse": lse}, seed=_number(seed))
    found = _differentiated(problem, inputs | {"o": o, "lse": lse}, named(SMOOTH, dots))
    return found["o"], found["lse"]


def second(*arguments: Any) -> list[Tensor]:
    """Return the tangents of o, lse and the named gradients: see `derivatives.Second`."""
    *tensors, text, names = arguments
    count = len(BOTH)
    seed = tensors.pop(count)
    given, dots = named((*BOTH, *GIVEN), tensors[: count + 4]), named((*SMOOTH, "do", "dlse"), tensors[count + 4 :])
    options = options_of(text, tuple(names), seed is not None)
    found = _differentiated(Problem.create(given, options, "backward", seed=_number(seed)), given, dots)
    return [found[name] for name in ("o", "lse", *names)]


def _differentiated(problem: Problem, tensors: dict[str, Tensor], dots: dict[str, Tensor]) -> dict[str, Tensor]:
    backend = derivative_backend(problem.spec, str(problem.device))
    answers = {name: problem.empty_like_output(name) for name in ("o", "lse")}
    if problem.spec.direction == "backward":
        answers |= problem.outputs
    given = {name: in_memory(name, t) for name, t in tensors.items()}
    of_tangents = replace(problem, tensors={n: in_memory(n, t) for n, t in dots.items()}, outputs=answers)
    run([replace(problem, tensors=given, outputs={}, tangents=of_tangents)], backend)
    return {name: laid_like(t, tensors[name[1:] if name in GRADS else "q"]) for name, t in answers.items()}


def is_direct(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether a call needs no dispatcher.

    That is, no tracer, transform, profiler or dispatch mode is active, and the tensors are plain: no subclass of
    `Tensor`, and not on the meta device.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or forward_ad._current_level >= 0:
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None or torch._C._is_tracing():
        return False
    if torch._C._autograd._profiler_enabled() or tensors[0].is_meta:  # type: ignore[union-attr]  # q
        return False
    return _ORDINARY.issuperset(map(type, tensors))
