"""The library's two operators in torch's dispatcher: `flashpoint::attention` and `flashpoint::attention_backward`.

`torch.compile` and `torch.export` see one node for each operator, whose output shapes they know without running it
(the fake kernels). For autograd, the second operator is registered as the gradient of the first. Users call
functional.py, which checks arguments that the dispatcher would coerce.

The dispatcher takes longer than the kernel of a short call. So a call does not use it unless something observes the
call: torch.compile, a profiler or a dispatch mode. derivatives.py has
the autograd functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flashpoint_contract.options import Direction, Options, ProblemError
from flashpoint_contract.spec import plan
from flashpoint_contract.tensors import FORWARD_TENSORS
from flashpoint_kernels.operators import derivatives, sharding, solving
from flashpoint_kernels.operators.solving import (
    BOTH,
    GIVEN,
    SMOOTH,
    backward_options,
    forward_options,
    literal,
    named,
    of_operator,
    seed_of,
)
from flashpoint_kernels.operators.torch_rules import refuse_nested
from flashpoint_kernels.problems.problem import tensor_info
from flashpoint_kernels.problems.strides import empty_like, laid_like


def _arguments(names: Sequence[str]) -> str:
    """Return the part of an operator's schema that declares these tensors and the seed."""
    return ", ".join(f"Tensor{'' if name in 'qkv' else '?'} {name}" for name in (*names, "dropout_seed"))


_SEED = len(FORWARD_TENSORS)  # number of the forward's argument that is the seed
_library = torch.library.Library("flashpoint", "DEF")  # type: ignore[no-untyped-call]
_dots = ", ".join(f"Tensor? {name}_dot" for name in SMOOTH)
_given = "Tensor do, Tensor? o, Tensor? lse, Tensor? dlse"
for _schema in (
    f"attention({_arguments(FORWARD_TENSORS)}, str options) -> (Tensor o, Tensor lse)",
    f"attention_backward({_arguments(BOTH)}, {_given}, str options, str[] grads) -> Tensor[]",
    f"attention_tangents({_arguments(BOTH)}, Tensor o, Tensor lse, {_dots}, str options) -> (Tensor, Tensor)",
    f"attention_second({_arguments(BOTH)}, {_given}, {_dots}, Tensor? do_dot, Tensor? dlse_dot, str options, "
    "str[] grads) -> Tensor[]",
):
    _library.define(_schema, tags=torch.Tag.pt2_compliant_tag)  # type: ignore[no-untyped-call]


def attention(tensors: Mapping[str, Tensor | None], options: Options) -> tuple[Tensor, Tensor]:
    """Return (o, lse) from the operator. Without a seed, each call with dropout draws one from torch's generator."""
    inputs = [tensors[name] for name in FORWARD_TENSORS]
    refuse_nested(tensors.items())
    drawn = options.dropout_p and options.dropout_seed is None
    seed = torch.randint(1 << 53, (), dtype=torch.int64, device="cpu") if drawn else seed_of(options)
    call: Callable[..., Any]
    if derivatives.transformed():
        call = derivatives.Attention.apply
    elif solving.is_direct(inputs):
        call = derivatives.PlainAttention.apply if derivatives.differentiates(inputs) else solving.attention
    elif not torch.compiler.is_compiling() and sharding.used(inputs):
        return sharding.attention(attention, tensors, options)
    else:
        o, lse = torch.ops.flashpoint.attention.default(*inputs, seed, literal(options))
        return o, lse
    o, lse = call(*inputs, seed, forward_options(options, seed is not None))
    return o, lse


def attention_backward(tensors: Mapping[str, Tensor | None], options: Options) -> list[Tensor]:
    """Call the operator, and return the gradients that `options.grads` names."""
    inputs, given = [tensors[name] for name in BOTH], [tensors[name] for name in GIVEN]
    refuse_nested(tensors.items())
    if not torch.compiler.is_compiling():
        sharding.refuse("attention_backward", tensors.values())
    if derivatives.transformed() or derivatives.differentiates((*inputs, *given)):
        given = _with_answers(tensors, options)
    seed = seed_of(options)
    if not torch.compiler.is_compiling():  # which would warn about the cache of `backward_options`
        options = backward_options(options, options.grads)
    return list(derivatives.backward(*inputs, seed, *given, options))


def _with_answers(tensors: Mapping[str, Tensor | None], options: Options) -> list[Tensor | None]:
    """Return do, o, lse and dlse for a gradient that is differentiated, which needs o and lse.

    Raises ProblemError for a leaf o or lse that requires a gradient: its gradient would be missing.
    """
    for name in ("o", "lse"):
        if (t := tensors[name]) is not None and t.requires_grad and t.is_leaf:
            raise ProblemError([(name, "is the forward's answer and has no gradient of its own: detach it")])
    if tensors["lse"] is None:
        inputs = {name: tensors.get(name) for name in FORWARD_TENSORS}
        tensors = {**tensors, **dict(zip(("o", "lse"), attention(inputs, options), strict=True))}
    return [tensors[name] for name in GIVEN]


def _check_known(tensors: dict[str, Tensor], options: Options, direction: Direction) -> None:
    """Check the sizes now if they are all numbers. Symbolic sizes are checked when the operator runs."""
    if all(isinstance(n, int) for t in tensors.values() for n in t.shape):
        plan({name: tensor_info(name, t) for name, t in tensors.items()}, options, direction)


def _fake_attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    *inputs, _, options = of_operator(_SEED, *arguments)
    tensors = named(FORWARD_TENSORS, inputs)
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
    *inputs, options = of_operator(len(BOTH), *arguments)
    del inputs[len(BOTH)]
    tensors = named((*BOTH, *GIVEN), inputs)
    _check_known(tensors, options, "backward")
    like = [tensors[name[1:]] for name in options.grads]
    return [laid_like(empty_like(t, t.shape), t) for t in like]


def _fake_tangents(*arguments: Any) -> tuple[Tensor, Tensor]:
    o, lse = arguments[len(BOTH) + 1 : len(BOTH) + 3]
    return torch.empty_like(o), torch.empty_like(lse)


def _fake_second(*arguments: Any) -> list[Tensor]:
    inputs, o, lse = dict(zip(BOTH, arguments, strict=False)), *arguments[len(BOTH) + 2 : len(BOTH) + 4]
    like = [inputs[name[1:]] for name in arguments[-1]]
    return [torch.empty_like(o), torch.empty_like(lse), *(laid_like(empty_like(t, t.shape), t) for t in like)]


def _refuse_second_order(ctx: Any, *_: Any) -> None:
    raise RuntimeError("second-order gradients of attention are not available in a compiled program")


def _of_text(kernel: Callable[..., Any], seed: int) -> Callable[..., Any]:
    """Return the kernel of an operator, whose options are text; argument number `seed` is its seed."""
    return lambda *arguments: kernel(*of_operator(seed, *arguments))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    derivatives.save(ctx, of_operator(_SEED, *inputs), output)


for _name, _kernel, _number, _fake in (
    ("attention", solving.attention, _SEED, _fake_attention),
    ("attention_backward", solving.attention_backward, len(BOTH), _fake_attention_backward),
    ("attention_tangents", solving.tangents, len(BOTH), _fake_tangents),
    ("attention_second", solving.second, len(BOTH), _fake_second),
):
    _library.impl(_name, _of_text(_kernel, _number), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"flashpoint::{_name}", _fake, lib=_library)
torch.library.register_autograd("flashpoint::attention", derivatives.differentiate, setup_context=_save, lib=_library)
torch.library.register_autograd("flashpoint::attention_backward", _refuse_second_order, lib=_library)
