"""Autograd functions of attention that are closed under differentiation, for transforms and second derivatives.

`torch.library` has no rule for forward mode, and functions with `setup_context` take 40 µs more, so ops.py uses these
only while a transform of torch.func or a level of dual numbers is active, and for the gradients of gradients.

With x = (q, k, v, attn_mask, sinks), F(x) = (o, lse) and L = <do, o> + <dlse, lse>:

    function     answers                                     its backward                 its tangent
    Attention    F(x)                                        Gradients                    Tangents
    Gradients    G = dL/dx                                   Tangents, or Second          Second
    Tangents     the tangent of F along ẋ                    Second and Gradients         raises
    Second       the tangents of F and of G along ẋ, ḋo, …   Second for ẋ, ḋo, …          raises

The backward of G for u is the derivative along u: for do and dlse that of F, for x that of G, because second
derivatives are symmetric. o and lse, which G takes, follow from x: they have no gradients of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashpoint_contract.options import Options, ProblemError
from flashpoint_contract.tensors import FORWARD_TENSORS, TENSORS
from flashpoint_kernels.operators import solving
from flashpoint_kernels.operators.solving import BOTH, FORWARD_ONLY, SMOOTH, backward_options, literal, named
from flashpoint_kernels.problems.modes import traced

THIRD = "third-order derivatives of attention are not available"
TWICE = "a tangent of attention has no tangent of its own: take the outer derivative in reverse mode"


def transformed() -> bool:
    """Return whether a transform of torch.func or a level of dual numbers is active."""
    if torch.compiler.is_compiling():
        return False
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def _looped(function: Any, info: Any, in_dims: Sequence[int | None], arguments: Sequence[Any]) -> Any:
    """Answer vmap: call the function for each element of the batch, and stack the answers."""
    rows = []
    for n in range(info.batch_size):
        parts = (a if dim is None else a.select(dim, n) for a, dim in zip(arguments, in_dims, strict=True))
        rows.append(function.apply(*parts))
    answers = tuple(torch.stack(column) for column in zip(*rows, strict=True))
    return answers, (0,) * len(answers)


def looped(function: Any) -> Any:
    """Return the autograd function, decorated: vmap loops over the batch."""

    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return _looped(function, info, in_dims, arguments)

    function.vmap = staticmethod(vmap)
    return function


def is_batched(*tensors: object) -> bool:
    """Return whether a tensor has a batch dimension of the vmap of `is_grads_batched`, which is not `torch.vmap`."""
    return any(isinstance(t, Tensor) and torch._C._dispatch_keys(t).has("Batched") for t in tensors)


def applied(function: Any, *arguments: Any, level: int | None = None) -> Any:
    """Apply an autograd function; loop over the batch dimensions of `is_grads_batched`, which it cannot see.

    `level` is the number of nested batch dimensions that may be left.
    """
    if not is_batched(*arguments):
        return function.apply(*arguments)
    if level is None:
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()
    # A tensor without this level gets a dimension of size 1.
    parts = [torch._remove_batch_dim(a, level, 1, 0) if isinstance(a, Tensor) else a for a in arguments]
    size = max(len(part) for part in parts if isinstance(part, Tensor))
    rows = []
    for n in range(size):
        row = (part[n if len(part) > 1 else 0] if isinstance(part, Tensor) else part for part in parts)
        rows.append(applied(function, *row, level=level - 1))
    return tuple(torch._add_batch_dim(torch.stack(column), 0, level) for column in zip(*rows, strict=True))


def keep(ctx: Any, *tensors: Tensor | None) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def _directions(names: Sequence[str], dots: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """Return the tangents by the names of their inputs. Raises ProblemError for an input that has no derivative."""
    found = named(names, dots)
    if wrong := [name for name in found if name not in SMOOTH and name not in ("do", "o", "lse", "dlse")]:
        raise ProblemError([(name, "has no derivative: pass a tensor without a tangent") for name in wrong])
    return found


def _in_order(found: Mapping[str, Tensor]) -> list[Tensor | None]:
    return [found.get(name) for name in SMOOTH]


class PlainAttention(torch.autograd.Function):
    """`Attention` without a rule for transforms, which takes less time."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        answers = solving.attention(*arguments)
        save(ctx, arguments, answers)
        return answers

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return differentiate(ctx, *gradients)


@looped
class Attention(torch.autograd.Function):
    """F: the tensors, options and answers of the operator `flashpoint::attention`."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        if solving.is_direct(arguments[:-1]):
            return solving.attention(*arguments)
        *tensors, options = arguments
        answers: tuple[Tensor, Tensor] = torch.ops.flashpoint.attention.default(*tensors, literal(options))
        return answers

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        save(ctx, inputs, output)
        ctx.save_for_forward(*_kept(inputs), *output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return differentiate(ctx, *gradients)

    @staticmethod
    def jvp(ctx: Any, *dots: Any) -> tuple[Tensor | None, Tensor | None]:
        directions = _directions(FORWARD_TENSORS, dots[: len(FORWARD_TENSORS)])
        if not directions:
            return None, None
        _refuse_forward_only(ctx)
        *inputs, o, lse = ctx.saved_tensors
        answers: tuple[Tensor, Tensor] = applied(Tangents, *inputs, o, lse, *_in_order(directions), ctx.options)
        return answers


@looped
class Gradients(torch.autograd.Function):
    """G: the tensors of the operator `flashpoint::attention_backward`, and its options."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        *tensors, options = arguments
        if solving.is_direct(tensors):
            return tuple(solving.attention_backward(*arguments))
        return tuple(torch.ops.flashpoint.attention_backward.default(*tensors, literal(options), [*options.grads]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.options = inputs
        keep(ctx, *tensors)

    @staticmethod
    def backward(ctx: Any, *along: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, do, o, lse, dlse = ctx.saved_tensors
        none = (None,) * (len(inputs) + 5)
        u = named([name[1:] for name in ctx.options.grads], along)
        if not u:
            return none
        wanted = [name for name, yes in zip(BOTH, ctx.needs_input_grad, strict=False) if yes]
        if wrong := [name for name in wanted if name not in SMOOTH]:
            raise ProblemError([(name, "has no gradient: pass a tensor that does not require one") for name in wrong])
        found: dict[str, Tensor] = {}
        if wanted:
            options = _of_inputs(ctx.options, wanted)
            o_dot, lse_dot, *grads = applied(Second, *inputs, do, o, lse, dlse, *_in_order(u), None, None, options)
            found = dict(zip(wanted, grads, strict=True))
        else:
            o_dot, lse_dot = applied(Tangents, *inputs, o, lse, *_in_order(u), ctx.options)
        of_do, of_dlse = (ctx.needs_input_grad[len(inputs) + n] for n in (0, 3))
        lse_dot = None if dlse is None or not of_dlse else lse_dot.to(dlse.dtype)
        return *(found.get(name) for name in BOTH), None, o_dot if of_do else None, None, None, lse_dot, None

    @staticmethod
    def jvp(ctx: Any, *dots: Any) -> tuple[Tensor | None, ...]:
        *inputs, do, o, lse, dlse = ctx.saved_tensors
        of_inputs, given = dots[: len(BOTH)], dots[len(inputs) : len(inputs) + 4]
        directions = _directions((*BOTH, "do", "o", "lse", "dlse"), (*of_inputs, *given))
        if not directions:
            return (None,) * len(ctx.options.grads)
        if not directions.keys() - {"o", "lse"}:
            raise ProblemError(
                [(min(directions), "is the forward's answer: its tangent follows from those of q, k, v")]
            )
        do_dot, _, _, dlse_dot = given
        _, _, *grads = applied(Second, *inputs, do, o, lse, dlse, *_in_order(directions), do_dot, dlse_dot, ctx.options)
        return tuple(grads)


@looped
class Tangents(torch.autograd.Function):
    """The tangents of o and lse. Arguments: inputs with the seed, o, lse, directions of `SMOOTH`, options."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        *tensors, options = arguments
        if solving.is_direct(tensors):
            return solving.tangents(*arguments)
        answers: tuple[Tensor, Tensor] = torch.ops.flashpoint.attention_tangents.default(*tensors, literal(options))
        return answers

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.options = inputs
        keep(ctx, *tensors)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, o, lse = ctx.saved_tensors[: len(BOTH) + 3]
        dots = ctx.saved_tensors[len(BOTH) + 3 :]
        found: dict[str, Tensor] = {}
        of_dots: dict[str, Tensor] = {}
        if do is None and dlse is None:
            return (None,) * (len(inputs) + 3 + len(dots))
        do = torch.zeros_like(o) if do is None else do
        needs = ctx.needs_input_grad
        if wanted := [name for name, yes in zip(BOTH, needs, strict=False) if yes]:
            options = _of_inputs(ctx.options, wanted)
            _, _, *grads = applied(Second, *inputs, do, o, lse, dlse, *dots, None, None, options)
            found = dict(zip(wanted, grads, strict=True))
        if linear := [name for name, yes in zip(SMOOTH, needs[len(inputs) + 2 :], strict=False) if yes]:
            grads = applied(Gradients, *inputs, do, o, lse, dlse, _of_inputs(ctx.options, linear))
            of_dots = dict(zip(linear, grads, strict=True))
        return *(found.get(name) for name in BOTH), None, None, None, *_in_order(of_dots), None

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        raise RuntimeError(TWICE)


@looped
class Second(torch.autograd.Function):
    """The tangents of o, lse and of gradients.

    Arguments: inputs with the seed, do, o, lse, dlse, directions of `SMOOTH`, of do and of dlse, options.
    """

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        *tensors, options = arguments
        if solving.is_direct(tensors):
            return tuple(solving.second(*arguments))
        return tuple(torch.ops.flashpoint.attention_second.default(*tensors, literal(options), [*options.grads]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.options = inputs
        ctx.given = [isinstance(t, Tensor) for t in tensors]
        keep(ctx, *tensors)

    @staticmethod
    def backward(ctx: Any, do_dot: Tensor | None, dlse_dot: Tensor | None, *along: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of the directions, in which this function is linear, and its own transpose."""
        tensors = ctx.saved_tensors
        fixed = len(BOTH) + 5  # inputs, seed, do, o, lse, dlse
        if any(asks(ctx, n) for n in range(fixed)):
            raise RuntimeError(THIRD)
        u = named([name[1:] for name in ctx.options.grads], along)
        wanted = [name for name, yes in zip(SMOOTH, ctx.needs_input_grad[fixed:], strict=False) if yes]
        options = _of_inputs(ctx.options, wanted or SMOOTH[:1])
        o_dot, lse_dot, *grads = applied(Second, *tensors[:fixed], *_in_order(u), do_dot, dlse_dot, options)
        found = dict(zip(wanted, grads, strict=False))
        of_do, of_dlse = (t if yes else None for t, yes in zip((o_dot, lse_dot), ctx.given[-2:], strict=True))
        return *(None,) * fixed, *_in_order(found), of_do, of_dlse, None

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        raise RuntimeError(THIRD)


def asks(ctx: Any, n: int) -> bool:
    """Return whether autograd asks for the gradient of argument n. Only the engine knows it for `grad(…, inputs)`."""
    if not ctx.needs_input_grad[n]:
        return False
    if not hasattr(ctx, "next_functions") or transformed():
        return True
    node, _ = ctx.next_functions[sum(ctx.given[:n])]
    return node is not None and bool(torch._C._will_engine_execute_node(node))


def _kept(inputs: Sequence[Any]) -> list[Tensor | None]:
    """Return the arguments of the forward that both operators take, the seed last."""
    return [t for name, t in zip((*FORWARD_TENSORS, ""), inputs, strict=False) if name not in FORWARD_ONLY]


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save the inputs, o and lse for the backward, which recomputes the probabilities from them."""
    for name, needed in zip(FORWARD_TENSORS, ctx.needs_input_grad, strict=False):
        if needed and not TENSORS[name].gradient:
            raise ProblemError([(name, "has no gradient: pass a tensor that does not require one")])
    ctx.set_materialize_grads(False)
    ctx.options = inputs[-1]
    ctx.alone = [
        name for name, t in zip(FORWARD_TENSORS, inputs, strict=False) if t is not None and name in FORWARD_ONLY
    ]
    ctx.save_for_backward(*_kept(inputs), *output)


def differentiate(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of the arguments of `flashpoint::attention`, from a context of `save`."""
    _refuse_forward_only(ctx)
    *inputs, o, lse = ctx.saved_tensors
    needed = [name for name, yes in zip(FORWARD_TENSORS, ctx.needs_input_grad, strict=False) if yes]
    if not needed or (do is None and dlse is None):
        return (None,) * (len(FORWARD_TENSORS) + 2)
    found = gradients(inputs, do, o, lse, dlse, ctx.options, needed)
    return *(found.get(name) for name in FORWARD_TENSORS), None, None


def gradients(
    inputs: Sequence[Tensor | None], do: Tensor | None, o: Tensor, lse: Tensor, dlse: Tensor | None, options: Options,
    needed: Sequence[str],
) -> dict[str, Tensor]:  # fmt: skip
    """Return the gradients of the inputs in `needed`.

    `inputs` are the common arguments of both operators, the seed last.
    """
    do = torch.zeros_like(o) if do is None else do
    return dict(zip(needed, backward(*inputs, do, o, lse, dlse, _of_inputs(options, needed)), strict=True))


def _of_inputs(options: Options, names: Sequence[str]) -> Options:
    """Return the options of the gradients of the inputs `names`."""
    return backward_options(options, tuple([f"d{name}" for name in names]))


def backward(*arguments: Any) -> Sequence[Tensor]:
    """Return the gradients for the arguments of `Gradients`; use the dispatcher only if a tracer needs it."""
    if traced():  # it records no list of strings, such as `grads`
        raise RuntimeError(
            "gradients of attention cannot be computed inside torch.jit.trace: differentiate the answers of the trace"
        )
    *tensors, options = arguments
    if not torch.compiler.is_compiling() and (transformed() or differentiates(tensors) or is_batched(*tensors)):
        answers: Sequence[Tensor] = applied(Gradients, *arguments)
    elif solving.is_direct(tensors):
        answers = solving.attention_backward(*arguments)
    else:
        answers = torch.ops.flashpoint.attention_backward.default(*tensors, literal(options), [*options.grads])
    return answers


def plain_inputs(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor | None]:
    """Return the tensor arguments of both operators for a call with only q, k and v."""
    return [*({"q": q, "k": k, "v": v}.get(name) for name in BOTH), None]


def differentiates(tensors: Iterable[Tensor | None]) -> bool:
    """Return whether autograd records a call with these tensors."""
    return torch.is_grad_enabled() and bool([t for t in tensors if t is not None and t.requires_grad])


def _refuse_forward_only(ctx: Any) -> None:
    if ctx.alone:
        raise ProblemError([(min(ctx.alone), "is only for the forward: pages and 8-bit keys have no gradients")])
