"""The states that a process can be in, or the tensors of a call, for the test of ambient states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class State:
    """A state: how to enter it, how it changes the inputs of a call, and what is expected of a call in it.

    `expected` is "equal" (the bits of the plain state), "forward" (the same without gradients), "cast" (the bits of
    inputs that were converted to bfloat16), or "refused", with a pattern of the error's text.
    """

    expected: str = "equal"
    enter: Callable[[], AbstractContextManager[Any]] = nullcontext
    change: Callable[[Tensors], Tensors] = lambda t: t
    text: str = ""


@contextmanager
def _set(write: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    write(value)
    try:
        yield
    finally:
        write(before)


def default_dtype(dtype: torch.dtype) -> State:
    return State(enter=lambda: _set(torch.set_default_dtype, dtype, torch.float32))


def threads(count: int) -> State:
    return State(enter=lambda: _set(torch.set_num_threads, count, torch.get_num_threads()))


def _allow_tf32(allowed: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = allowed


@contextmanager
def _both(one: State, other: State) -> Iterator[None]:
    with one.enter(), other.enter():
        yield


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    """A subclass of Tensor that changes nothing."""


def _each(change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda t: {name: change(x) for name, x in t.items()}


def _of_numbers(change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return _each(lambda x: change(x) if x.is_floating_point() and x.dtype.itemsize > 1 else x)


def _conjugate(x: Tensor) -> Tensor:
    """Return x as the imaginary part of a conjugate, whose memory has −x."""
    if x.dtype not in (torch.float32, torch.float64):
        return torch._neg_view(-x)
    found: Tensor = torch.complex(torch.zeros_like(x), -x).conj().imag
    return found


@contextmanager
def _dual_level() -> Iterator[None]:
    with forward_ad.dual_level():
        yield


STATES: Mapping[str, State] = {
    "default dtype bfloat16": default_dtype(torch.bfloat16),
    "default dtype float16": default_dtype(torch.float16),
    "default dtype float64": default_dtype(torch.float64),
    'with torch.device("meta")': State(enter=lambda: torch.device("meta")),
    'set_default_device("meta")': State(enter=lambda: _set(torch.set_default_device, "meta", None)),
    'set_default_device("cuda")': State(enter=lambda: _set(torch.set_default_device, "cuda", None)),
    "bfloat16 on meta": State(
        enter=lambda: _both(STATES["default dtype bfloat16"], STATES['with torch.device("meta")'])
    ),
    "no_grad": State("forward", torch.no_grad),
    "inference_mode": State("forward", torch.inference_mode),
    "set_grad_enabled(True)": State(enter=torch.enable_grad),
    "autocast": State("cast", lambda: torch.autocast("cpu", torch.bfloat16)),
    "autocast, disabled": State(enter=lambda: torch.autocast("cpu", torch.bfloat16, enabled=False)),
    "deterministic algorithms": State(enter=lambda: _set(torch.use_deterministic_algorithms, True, False)),
    "TF32 allowed": State(enter=lambda: _set(_allow_tf32, True, False)),
    'set_float32_matmul_precision("medium")': State(
        enter=lambda: _set(torch.set_float32_matmul_precision, "medium", "highest")
    ),
    'set_float32_matmul_precision("high")': State(
        enter=lambda: _set(torch.set_float32_matmul_precision, "high", "highest")
    ),
    "flush to zero": State(enter=lambda: _set(torch.set_flush_denormal, True, False)),
    "1 thread": threads(1),
    "5 threads": threads(5),
    "forward-mode level": State(enter=_dual_level),
    "function mode": State(enter=FunctionMode),
    "dispatch mode": State(enter=DispatchMode),
    "anomaly detection": State(enter=lambda: torch.autograd.set_detect_anomaly(True)),
    "subclass": State(change=_each(lambda x: x.as_subclass(Subclass))),
    "negative bit": State(change=_of_numbers(lambda x: torch._neg_view(-x))),
    "conjugate": State(change=_of_numbers(_conjugate)),
    "inference tensors": State("forward", torch.inference_mode, _each(torch.clone)),
}
