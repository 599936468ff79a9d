"""The library's two operators in torch's dispatcher: `flashpoint::attention` and `flashpoint::attention_backward`.

`torch.compile` and `torch.export` see one node for each operator, whose output shapes they know without running it
(the fake kernels). For autograd, the second operator is registered as the gradient of the first. Users call
functional.py, which checks arguments that the dispatcher would coerce.

The dispatcher takes longer than the kernel of a short call. So a call does not use it unless something observes the
call: torch.compile, a transform such as vmap, a profiler or a dispatch mode. Without the dispatcher, `_Attention` is
the autograd function of `flashpoint::attention`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashpoint_contract.options import OPTIONS, Direction, Flag, Kind, Number, OneOf, Options, Pair, ProblemError
from flashpoint_contract.spec import plan
from flashpoint_contract.tensors import BACKWARD_TENSORS, FORWARD_TENSORS, TENSORS
from flashpoint_kernels.dispatching.dispatch import backend_for, run
from flashpoint_kernels.operators.torch_rules import refuse_batched_gradients, refuse_transforms
from flashpoint_kernels.problems.modes import traced
from flashpoint_kernels.problems.problem import Problem, tensor_info
from flashpoint_kernels.problems.strides import empty_like, laid_like

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
_GIVEN = ("do", "o", "lse", "dlse")
_BOTH = tuple(name for name in FORWARD_TENSORS if name in BACKWARD_TENSORS)
_FORWARD_ONLY = frozenset(FORWARD_TENSORS) - frozenset(_BOTH)
_ORDINARY = frozenset({Tensor, torch.nn.Parameter, type(None)})  # not subclasses, which may redefine operations
_SEED_BITS = (1 << 64) - 1


def _arguments(names: Sequence[str]) -> str:
    """Return the part of an operator's schema that declares these tensors and the seed."""
    return ", ".join(f"Tensor{'' if name in 'qkv' else '?'} {name}" for name in (*names, "dropout_seed"))


_library = torch.library.Library("flashpoint", "DEF")  # type: ignore[no-untyped-call]
_given = "Tensor do, Tensor? o, Tensor? lse, Tensor? dlse"
for _schema in (
    f"attention({_arguments(FORWARD_TENSORS)}, str options) -> (Tensor o, Tensor lse)",
    f"attention_backward({_arguments(_BOTH)}, {_given}, str options, str[] grads) -> Tensor[]",
):
    _library.define(_schema, tags=torch.Tag.pt2_compliant_tag)  # type: ignore[no-untyped-call]


def attention(tensors: Mapping[str, Tensor | None], options: Options) -> tuple[Tensor, Tensor]:
    """Return (o, lse) from the operator. Without a seed, each call with dropout draws one from torch's generator."""
    inputs = [tensors[name] for name in FORWARD_TENSORS]
    refuse_transforms(tensors.items())
    drawn = options.dropout_p and options.dropout_seed is None
    seed = torch.randint(1 << 53, (), dtype=torch.int64, device="cpu") if drawn else _seed(options)
    if _is_direct(inputs):
        call: Callable[..., Any] = _Attention.apply if _differentiates(inputs) else _attention
    else:
        call = torch.ops.flashpoint.attention.default
    o, lse = call(*inputs, seed, _text(options))
    return o, lse


def attention_backward(tensors: Mapping[str, Tensor | None], options: Options) -> list[Tensor]:
    """Call the operator, and return the gradients that `options.grads` names."""
    inputs, given = [tensors[name] for name in _BOTH], [tensors[name] for name in _GIVEN]
    refuse_transforms(tensors.items())
    return _backward(*inputs, _seed(options), *given, _text(options), options.grads)


def _backward(*arguments: Any) -> list[Tensor]:
    """Return the gradients for the operator's arguments; use the dispatcher only if a tracer or autograd needs it."""
    if traced():  # it records no list of strings, such as `grads`
        raise RuntimeError(
            "gradients of attention cannot be computed inside torch.jit.trace: differentiate the answers of the trace"
        )
    tensors = arguments[:-2]
    direct = _is_direct(tensors) and not _differentiates(tensors)
    call = _attention_backward if direct else torch.ops.flashpoint.attention_backward.default
    answers: list[Tensor] = call(*arguments)
    return answers


def _is_direct(tensors: Sequence[Tensor | None]) -> bool:
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


def _differentiates(tensors: Iterable[Tensor | None]) -> bool:
    """Return whether autograd records a call with these tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _text(options: Options) -> str:
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


def _seed(options: Options) -> Tensor | None:
    """Return the seed as a tensor for the operators: its 64 bits in an int64 on the CPU, like a drawn seed."""
    seed = options.dropout_seed
    if seed is None:
        return None
    return torch.tensor(seed if seed < 1 << 63 else seed - (1 << 64), dtype=torch.int64, device="cpu")


@lru_cache(1024)
def _options_of(text: str, grads: tuple[str, ...] | None, seeded: bool) -> Options:
    """Return the `Options` of an operator's arguments. If a seed is given, it is 0 here: the cache then ignores it."""
    given = ast.literal_eval(text) | ({"dropout_seed": 0} if seeded else {})
    return Options(**given, return_lse=True) if grads is None else Options(**given, grads=grads)


def _named(names: Sequence[str], values: Sequence[Tensor | None]) -> dict[str, Tensor]:
    return {name: t for name, t in zip(names, values, strict=True) if t is not None}


def _forward_request(*arguments: Any) -> tuple[dict[str, Tensor], Options, Tensor | None]:
    *inputs, seed, text = arguments
    return _named(FORWARD_TENSORS, inputs), _options_of(text, None, seed is not None), seed


def _backward_request(*arguments: Any) -> tuple[dict[str, Tensor], Options, Tensor | None]:
    *inputs, text, grads = arguments
    seed = inputs.pop(len(_BOTH))
    return _named((*_BOTH, *_GIVEN), inputs), _options_of(text, tuple(grads), seed is not None), seed


def _solve(
    tensors: dict[str, Tensor], options: Options, seed: Tensor | None, direction: Direction
) -> dict[str, Tensor]:
    number = None if seed is None else int(seed) & _SEED_BITS
    problem = Problem.create(tensors, options, direction, fixed_pages=True, seed=number)
    run([problem], backend_for(problem.spec, str(problem.device)))
    return problem.outputs


def _attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    request = _forward_request(*arguments)
    answers = _solve(*request, "forward")
    return laid_like(answers["o"], request[0]["q"]), answers["lse"]


def _attention_backward(*arguments: Any) -> list[Tensor]:
    request = _backward_request(*arguments)
    answers = _solve(*request, "backward")
    return [laid_like(answers[name], request[0][name[1:]]) for name in arguments[-1]]


def _check_known(tensors: dict[str, Tensor], options: Options, direction: Direction) -> None:
    """Check the sizes now if they are all numbers. Symbolic sizes are checked when the operator runs."""
    if all(isinstance(n, int) for t in tensors.values() for n in t.shape):
        plan({name: tensor_info(name, t) for name, t in tensors.items()}, options, direction)


def _fake_attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    tensors, options, _ = _forward_request(*arguments)
    _check_known(tensors, options, "forward")
    q, v = tensors["q"], tensors["v"]
    lse_shape: Sequence[int] = q.shape[:-1]
    if options.layout == "thd":
        lse_shape = (q.shape[1], q.shape[0])
    elif q.ndim == 4 and options.layout == "bshd":
        lse_shape = (q.shape[0], q.shape[2], q.shape[1])
    o = laid_like(empty_like(q, (*q.shape[:-1], v.shape[-1])), q)
    return o, q.new_empty(lse_shape, dtype=torch.float32)


def _fake_attention_backward(*arguments: Any) -> list[Tensor]:
    tensors, options, _ = _backward_request(*arguments)
    _check_known(tensors, options, "backward")
    inputs = [tensors[name[1:]] for name in options.grads]
    return [laid_like(empty_like(t, t.shape), t) for t in inputs]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save the inputs, o and lse for the backward, which recomputes the probabilities from them."""
    for name, needed in zip(FORWARD_TENSORS, ctx.needs_input_grad, strict=False):
        if needed and not TENSORS[name].gradient:
            raise ProblemError([(name, "has no gradient: pass a tensor that does not require one")])
    ctx.set_materialize_grads(False)
    ctx.options = inputs[-1]
    ctx.alone = [
        name for name, t in zip(FORWARD_TENSORS, inputs, strict=False) if t is not None and name in _FORWARD_ONLY
    ]
    tensors = [t for name, t in zip((*FORWARD_TENSORS, ""), inputs, strict=False) if name not in _FORWARD_ONLY]
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if ctx.alone:
        raise ProblemError([(min(ctx.alone), "is only for the forward: pages and 8-bit keys have no gradients")])
    *inputs, o, lse = ctx.saved_tensors
    needed = [name for name, yes in zip(FORWARD_TENSORS, ctx.needs_input_grad, strict=False) if yes]
    grads = gradients(inputs, do, o, lse, dlse, ctx.options, needed)
    return *(grads.get(name) for name in FORWARD_TENSORS), None, None


def gradients(
    inputs: Sequence[Tensor | None], do: Tensor | None, o: Tensor, lse: Tensor, dlse: Tensor | None, options: str,
    needed: Sequence[str],
) -> dict[str, Tensor]:  # fmt: skip
    """Return the gradients of the inputs in `needed`.

    `inputs` are the common arguments of both operators, the seed last.
    """
    refuse_transforms((("do", do), ("dlse", dlse)))
    refuse_batched_gradients(do, dlse)
    do = torch.zeros_like(o) if do is None else do
    grads = [f"d{name}" for name in needed]
    answers = _backward(*inputs, do, o, lse, dlse, options, grads)
    return dict(zip(needed, answers, strict=True))


def plain_inputs(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor | None]:
    """Return the tensor arguments of both operators for a call with only q, k and v."""
    return [*({"q": q, "k": k, "v": v}.get(name) for name in _BOTH), None]


class _Attention(torch.autograd.Function):
    """The operator `flashpoint::attention` as an autograd function, without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        answers = _attention(*arguments)
        _save(ctx, arguments, answers)
        return answers

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return _differentiate(ctx, *gradients)


def _refuse_second_order(ctx: Any, *_: Any) -> None:
    raise RuntimeError("second-order gradients of attention are not available")


for _name, _kernel, _fake in (
    ("attention", _attention, _fake_attention),
    ("attention_backward", _attention_backward, _fake_attention_backward),
):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"flashpoint::{_name}", _fake, lib=_library)
torch.library.register_autograd("flashpoint::attention", _differentiate, setup_context=_save, lib=_library)
torch.library.register_autograd("flashpoint::attention_backward", _refuse_second_order, lib=_library)
