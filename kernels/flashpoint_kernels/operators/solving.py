"""Compute the operators' answers from lists of tensors and `Options`. In torch's dispatcher, options are text."""

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

# In the dispatcher, options are one string argument: a Python literal of those that are not the default. With one
# argument for each option, torch's time for a call with a gradient grows with the square of their number. Measured at
# (1,1,4,8) on one CPU core: 330 µs with 22 arguments, 230 µs with one string; the library itself takes 115 µs.
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


def literal(options: Options) -> str:
    """Return the options that are not the default, as a literal: "{'causal': True}". The seed is passed as a tensor."""
    given = [
        f"'{name}': {kind(value)!r}"
        for name, kind in _OPTIONS.items()
        if (value := getattr(options, name)) != OPTIONS[name].default
    ]
    return "{" + ", ".join(given) + "}"


def seed_of(options: Options) -> Tensor | None:
    """Return the seed as a tensor for the operators: its 64 bits in an int64 on the CPU, like a drawn seed."""
    seed = options.dropout_seed
    if seed is None:
        return None
    return torch.tensor(seed if seed < 1 << 63 else seed - (1 << 64), dtype=torch.int64, device="cpu")


@lru_cache(1024)
def _options_of(text: str, grads: tuple[str, ...] | None, seeded: bool) -> Options:
    given = ast.literal_eval(text) | ({"dropout_seed": 0} if seeded else {})
    return Options(**given, return_lse=True) if grads is None else Options(**given, grads=grads)


@lru_cache(1024)
def forward_options(options: Options, seeded: bool) -> Options:
    """Return the options of a forward that returns o and lse. A seed is a tensor; it is 0 here: caches then ignore it.

    `seeded` says whether there is a seed, which may be drawn.
    """
    seed = 0 if seeded else None
    return replace(options, return_lse=True, return_key_weights=False, grads=GRADS[:3], dropout_seed=seed)


@lru_cache(1024)
def backward_options(options: Options, grads: tuple[str, ...]) -> Options:
    """Return the options of a gradient, from its own or from those of its forward. The seed is 0, if there is one."""
    seed = None if options.dropout_seed is None else 0
    return replace(options, return_lse=False, return_key_weights=False, grads=grads, dropout_seed=seed)


def of_operator(seed: int, *arguments: Any) -> tuple[Any, ...]:
    """Return an operator's arguments with `Options` in place of their text and of the gradients' names.

    `seed` is the number of the argument that is the seed.
    """
    *tensors, text = arguments if isinstance(arguments[-1], str) else arguments[:-1]
    grads = None if text is arguments[-1] else tuple(arguments[-1])
    return *tensors, _options_of(text, grads, tensors[seed] is not None)


def named(names: Sequence[str], values: Sequence[Tensor | None]) -> dict[str, Tensor]:
    return {name: t for name, t in zip(names, values, strict=True) if t is not None}


def _solved(
    tensors: dict[str, Tensor], options: Options, seed: Tensor | None, direction: Direction
) -> dict[str, Tensor]:
    problem = Problem.create(tensors, options, direction, fixed_pages=True, seed=_number(seed))
    run([problem], backend_for(problem.spec, str(problem.device)))
    return problem.outputs


def _number(seed: Tensor | None) -> int | None:
    return None if seed is None else int(seed) & _SEED_BITS


def attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return o and lse. Arguments: FORWARD_TENSORS, the seed, options as `forward_options` returns them."""
    *inputs, seed, options = arguments
    tensors = named(FORWARD_TENSORS, inputs)
    answers = _solved(tensors, options, seed, "forward")
    return laid_like(answers["o"], tensors["q"]), answers["lse"]


def attention_backward(*arguments: Any) -> list[Tensor]:
    """Return the gradients. Arguments: BOTH, the seed, GIVEN, options as `backward_options` returns them."""
    *inputs, options = arguments
    seed = inputs.pop(len(BOTH))
    tensors = named((*BOTH, *GIVEN), inputs)
    answers = _solved(tensors, options, seed, "backward")
    return [laid_like(answers[name], tensors[name[1:]]) for name in options.grads]


def tangents(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the tangents of o and lse: see `derivatives.Tangents`."""
    count = len(BOTH)
    *tensors, seed, o, lse = arguments[: count + 3]
    *dots, options = arguments[count + 3 :]
    inputs = named(BOTH, tensors)
    options = forward_options(options, seed is not None)
    problem = Problem.create(inputs, options, "forward", outputs={"o": o, "lse": lse}, seed=_number(seed))
    found = _differentiated(problem, inputs | {"o": o, "lse": lse}, named(SMOOTH, dots))
    return found["o"], found["lse"]


def second(*arguments: Any) -> list[Tensor]:
    """Return the tangents of o, lse and the named gradients: see `derivatives.Second`."""
    *tensors, options = arguments
    count = len(BOTH)
    seed = tensors.pop(count)
    given, dots = named((*BOTH, *GIVEN), tensors[: count + 4]), named((*SMOOTH, "do", "dlse"), tensors[count + 4 :])
    found = _differentiated(Problem.create(given, options, "backward", seed=_number(seed)), given, dots)
    return [found[name] for name in ("o", "lse", *options.grads)]


def _differentiated(problem: Problem, tensors: dict[str, Tensor], dots: dict[str, Tensor]) -> dict[str, Tensor]:
    backend = derivative_backend(problem.spec, str(problem.device))
    answers = {name: problem.empty_like_output(name) for name in ("o", "lse")}
    if problem.spec.direction == "backward":
        answers |= problem.outputs
    given = {name: in_memory(name, t) for name, t in tensors.items()}
    of_tangents = replace(problem, tensors={n: in_memory(n, t) for n, t in dots.items()}, outputs=answers)
    run([replace(problem, tensors=given, outputs={}, tangents=of_tangents)], backend)
    like = {"o": "q"} | {name: name[1:] for name in GRADS}
    return {name: laid_like(t, tensors[like[name]]) if name in like else t for name, t in answers.items()}


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
