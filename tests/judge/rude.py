"""Functions that crash, hang, damage their process, or return something odd: the judge must survive each of them.

`RUDE` maps a function's name to the expected verdict and the code of a cause that must be reported ("": no such check).
"""

# mypy: ignore-errors
from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.judge.right import formula_in_float32 as right

RUDE: dict[str, tuple[str, str]] = {}
HANGS = ("hang", "hang_in_backward", "stopped", "writes_into_the_connection")


def rude(verdict: str, code: str = "") -> Callable[[Any], Any]:
    """Return a decorator that adds a function to `RUDE`, with its verdict and a code among its causes."""

    def add(function: Any) -> Any:
        RUDE[function.__name__] = verdict, code
        return function

    return add


@rude("wrong", "crash")
def segfault(q: Tensor, k: Tensor, v: Tensor) -> Any:
    ctypes.string_at(0)


@rude("wrong", "crash")
def exits(q: Tensor, k: Tensor, v: Tensor) -> Any:
    os._exit(0)


@rude("wrong", "exception")
def sys_exits(q: Tensor, k: Tensor, v: Tensor) -> Any:
    sys.exit(1)


@rude("wrong", "exception")
def interrupts(q: Tensor, k: Tensor, v: Tensor) -> Any:
    raise KeyboardInterrupt


@rude("wrong", "killed")
def kills_its_group(q: Tensor, k: Tensor, v: Tensor) -> Any:
    os.killpg(0, signal.SIGKILL)


@rude("wrong", "hang")
def hang(q: Tensor, k: Tensor, v: Tensor) -> Any:
    while True:
        pass


@rude("wrong", "hang")
def stopped(q: Tensor, k: Tensor, v: Tensor) -> Any:
    os.kill(os.getpid(), signal.SIGSTOP)


@rude("wrong", "exception")
def recursion(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return recursion(q, k, v)


@rude("wrong", "memory")
def too_much_memory(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return right(q, k, v) + torch.zeros(1 << 44)[0]


@rude("wrong", "answer-form")
def nothing(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return None


@rude("wrong", "answer-form")
def empty_tuple(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return ()


@rude("wrong", "answer-form")
def an_array(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return np.zeros(q.shape, np.float32)


@rude("wrong", "answer-form")
def a_generator(q: Tensor, k: Tensor, v: Tensor) -> Any:
    yield right(q, k, v)


@rude("wrong", "answer-form")
def a_dict(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return {"o": right(q, k, v)}


@rude("wrong", "answer-form")
def other_shape(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return right(q, k, v)[..., :3]


@rude("wrong", "answer-form")
def one_number(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return torch.tensor(1.0)


@rude("wrong", "answer-form")
def float64(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return right(q, k, v).double()


@rude("wrong", "answer-form")
def integers(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return torch.zeros(q.shape, dtype=torch.int32)


@rude("wrong", "answer-form")
def complex_numbers(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return right(q, k, v).to(torch.complex64)


@rude("wrong", "answer-form")
def on_meta(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return torch.empty_like(q, device="meta")


@rude("wrong", "answer-form")
def sparse(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return right(q, k, v).to_sparse()


@rude("wrong", "answer-form")
def nested(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return torch.nested.nested_tensor(list(right(q, k, v)))


@rude("wrong", "answer-form")
def a_huge_view(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return q.new_zeros(1).expand(1 << 20, 1 << 10, 1 << 5, 8)


@rude("wrong", "constant")
def nan(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return torch.full_like(q, torch.nan)


@rude("wrong", "constant")
def zeros(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return torch.zeros_like(q)


@rude("wrong", "aliasing")
def its_input(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return q


class OddError(Exception):
    """An exception whose text raises an error."""

    def __str__(self) -> str:
        raise RuntimeError


@rude("not judged")
def odd_exception(q: Tensor, k: Tensor, v: Tensor) -> Any:
    raise OddError


@rude("not judged")
def odd_text(q: Tensor, k: Tensor, v: Tensor) -> Any:
    raise ValueError("\ud800\x00" + "x" * 100_000)


@rude("right")
def prints(q: Tensor, k: Tensor, v: Tensor) -> Any:
    print("x" * 1_000_000)
    os.write(1, b"\xff\xfe")
    return right(q, k, v)


@rude("wrong", "crash")
def closes_files(q: Tensor, k: Tensor, v: Tensor) -> Any:
    os.closerange(3, 100)
    return right(q, k, v)


@rude("wrong", "global-state")
def changes_the_default_type(q: Tensor, k: Tensor, v: Tensor) -> Any:
    torch.set_default_dtype(torch.float64)
    return right(q, k, v)


@rude("not judged")
def changes_the_default_device(q: Tensor, k: Tensor, v: Tensor) -> Any:
    torch.set_default_device("meta")
    return right(q, k, v)


@rude("wrong")
def patches_torch(q: Tensor, k: Tensor, v: Tensor) -> Any:
    torch.equal = lambda a, b: True
    torch.Tensor.clone = lambda t: t
    return torch.zeros_like(q)


@rude("right")
def forks(q: Tensor, k: Tensor, v: Tensor) -> Any:
    if os.fork() == 0:
        time.sleep(1000)
    return right(q, k, v)


@rude("wrong")
def lse_of_integers(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return right(q, k, v), torch.zeros(q.shape[:3], dtype=torch.int64)


@rude("wrong")
def lse_is_nan(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return right(q, k, v), torch.full(q.shape[:3], torch.nan)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kind: str) -> Tensor:
        ctx.kind, ctx.shapes = kind, (q.shape, k.shape, v.shape)
        return right(q, k, v)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        if ctx.kind == "crash":
            ctypes.string_at(0)
        elif ctx.kind == "hang":
            time.sleep(1000)
        elif ctx.kind == "raise":
            raise RuntimeError("there is no backward here")
        elif ctx.kind == "shape":
            return do[..., :3], None, None, None
        elif ctx.kind == "few":
            return do
        return (*(torch.full(shape, torch.nan) for shape in ctx.shapes), None)


@rude("wrong", "crash")
def crash_in_backward(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return _Backward.apply(q, k, v, "crash")


@rude("wrong", "hang")
def hang_in_backward(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return _Backward.apply(q, k, v, "hang")


@rude("wrong", "exception")
def raise_in_backward(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return _Backward.apply(q, k, v, "raise")


@rude("wrong", "exception")
def gradient_of_other_shape(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return _Backward.apply(q, k, v, "shape")


@rude("wrong")
def too_few_gradients(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return _Backward.apply(q, k, v, "few")


@rude("wrong", "constant")
def nan_gradients(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return _Backward.apply(q, k, v, "nan")


@rude("wrong", "crash")
def crash_at_some(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """Crash only for large values."""
    if float(q.abs().max()) > 100:
        ctypes.string_at(0)
    return right(q, k, v)


@rude("wrong")
def writes_into_the_connection(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """Write bytes that look like the start of a long answer into all open descriptors, the socket to the judge too."""
    for file in range(3, 30):
        with contextlib.suppress(OSError):
            os.write(file, b'{"garbage": 1}\n' * 10)
    return right(q, k, v)
