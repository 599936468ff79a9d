"""Each public function, for tensors without memory, traced and dual tensors, and those of a wrapper subclass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

from tests.kernels.ambient.calls import CALLS, Call, Tensors
from tests.kernels.ambient.test_states import difference

# Tensors that the caller's own function uses: torch's operators read them.
_FREED = (  # the third and fourth are torch's own words, for views of such a tensor, and for its modules
    "has no memory",
    "is not in memory, because its storage has",
    "out of bounds for storage of size",
    "its data is not allocated",
)
_REFUSED_BY_TRACE = (
    "gradients of attention cannot be computed inside torch.jit.trace",
    "torch.jit.trace cannot record",
    "score_mod: is not available under torch.jit.trace",
    "cu_seqlens_q: must start at 0, never decrease, and end at",  # a trace cannot read where the last sequence ends
)
_BY_ADDRESS = ("run", "verify", "verify bfloat16", "nano_attention")  # functions below torch's dispatcher
_CAPTURED = {("flex_attention", "bias"), ("create_block_mask rule", "x")}


def freed(t: Tensor) -> Tensor:
    """Return a tensor like t whose storage was freed, at an offset in it."""
    both = torch.stack([t, t])
    view = both[1]
    both.untyped_storage().resize_(0)
    return view


def shrunk(t: Tensor) -> Tensor:
    """Return a tensor like t whose storage is half as large as its elements need, with the strides of t."""
    view = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)
    view.untyped_storage().resize_(view.untyped_storage().nbytes() // 2)
    return view


def answers_of(call: Call, t: Tensors) -> Mapping[str, Tensor]:
    return call.run(t, ())


@pytest.mark.parametrize("damaged", [freed, shrunk])
@pytest.mark.parametrize("name", CALLS)
def test_each_function_refuses_freed_storage_by_name(name: str, damaged: Callable[[Tensor], Tensor]) -> None:
    call = CALLS[name]
    inputs = call.inputs()
    answers_of(call, inputs)  # the next call of these shapes takes a cached route
    for key, t in inputs.items():
        if (name, key) in _CAPTURED or key == "do" or (name == "Block" and damaged is shrunk):
            continue  # torch's operators read these tensors
        try:
            found: object = answers_of(call, inputs | {key: damaged(t)})
        except (ValueError, RuntimeError) as error:
            found = str(error)
        assert isinstance(found, str), f"{key} was not refused"
        assert any(text in found for text in _FREED), f"{key}: {found}"


@pytest.mark.parametrize("name", CALLS)
def test_each_function_takes_efficient_zero_tensors(name: str) -> None:
    call = CALLS[name]
    inputs = call.inputs()
    for key, t in inputs.items():
        if not t.is_floating_point() or t.dtype.itemsize == 1:
            continue
        expected = answers_of(call, inputs | {key: torch.zeros_like(t)})
        found = answers_of(call, inputs | {key: torch._efficientzerotensor(t.shape, dtype=t.dtype)})
        assert found.keys() == expected.keys()
        for n in found:  # torch's operators choose the sign of a zero
            assert found[n].dtype == expected[n].dtype
            assert torch.equal(found[n], expected[n]), (key, n)


class Wrapper(Tensor):
    """A subclass that holds its elements in another tensor, as DTensor does, and computes with that one."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Wrapper:
        made = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=held.device
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Wrapper, lambda t: t.held, (args, kwargs or {}))
        return tree_map_only(Tensor, Wrapper, func(*args, **kwargs))


def test_each_function_unwraps_a_wrapper_subclass() -> None:
    wrong = {}
    for name, call in CALLS.items():
        inputs = call.inputs()
        expected = answers_of(call, inputs)
        try:
            found = answers_of(call, {n: Wrapper(t) for n, t in inputs.items()})
        except Exception as error:
            if name not in _BY_ADDRESS or "the subclass Wrapper holds its elements elsewhere" not in str(error):
                wrong[name] = f"{type(error).__name__}: {error}"[:200]
            continue
        found = {n: t.held if isinstance(t, Wrapper) else t for n, t in found.items()}
        if text := difference(found, expected, False):
            wrong[name] = text
    assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_dual_numbers_are_differentiated() -> None:
    wrong = {}
    for name, call in CALLS.items():
        if not call.leaves:
            continue
        inputs = call.inputs()
        with forward_ad.dual_level():
            key = call.leaves[0]
            dual = inputs | {key: forward_ad.make_dual(inputs[key], torch.ones_like(inputs[key]))}
            found = answers_of(call, dual)
            if forward_ad.unpack_dual(found["o0"]).tangent is None:
                wrong[name] = "the derivative was dropped"
    assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())


def of_values(call: Call, names: list[str]) -> Callable[..., tuple[Tensor, ...]]:
    """Return the call as a function of tensors in the order of `names`."""

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        return tuple(answers_of(call, dict(zip(names, values, strict=True))).values())

    return function


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_jit_trace_records_or_refuses() -> None:
    wrong = {}
    for name, call in CALLS.items():
        inputs = call.inputs()
        if not inputs:  # a trace records functions of tensors
            continue
        expected = answers_of(call, inputs)
        try:
            traced = torch.jit.trace(of_values(call, list(inputs)), tuple(inputs.values()), check_trace=False)
            found = dict(zip(expected, traced(*inputs.values()), strict=True))
        except (ValueError, RuntimeError) as error:
            if not any(text in str(error) for text in _REFUSED_BY_TRACE):
                wrong[name] = f"{type(error).__name__}: {error}"[:300]
            continue
        if text := difference(found, expected, False):
            wrong[name] = text
    assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())
