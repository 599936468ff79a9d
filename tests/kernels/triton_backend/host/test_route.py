"""A repeated call uses the cached route of its launch, so that it makes no plans, options or constants again."""

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from flashpoint_kernels import Options, Problem, attention
from flashpoint_kernels.triton_backend.host import launch, route
from flashpoint_kernels.triton_backend.host.config import config_for
from tests.conftest import DEVICE
from tests.support.kernels.routes import forget
from tests.support.kernels.solving import qkv

# Functions that a repeated call must not enter; for classes, `__init__`.
MADE = {"replace", "_planned", "Code.__init__", "Constants.__init__", "Route.__init__", "Options.__init__"}


def made_by(call: Callable[[], Any]) -> Counter[str]:
    """Return how often a call enters each Python function, by qualified name without the module."""
    counts: Counter[str] = Counter()

    def count(frame: Any, event: str, _: object) -> None:
        # Count calls from flashpoint_kernels alone: `Spec.with_keys`, in the contract, must call `replace`.
        if event == "call" and frame.f_back.f_globals["__name__"].startswith("flashpoint_kernels."):
            owner = frame.f_locals.get("self")
            name = frame.f_code.co_name
            counts[f"{type(owner).__name__}.{name}" if name == "__init__" else name] += 1

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return counts


def decode(q_len: int = 1, kv_len: int = 150) -> dict[str, Tensor]:
    return {name: t for name, t in qkv(1, 4, q_len, kv_len, 16, kv_heads=2).items() if name != "do"}


def test_a_call_that_repeats_another_makes_nothing_but_tables_and_answers() -> None:
    t = decode(kv_len=70)
    leaves = {name: x.clone().requires_grad_() for name, x in t.items()}

    def differentiated() -> None:
        o = attention(**leaves, causal=True, backend="triton")
        torch.autograd.grad(o.sum(), list(leaves.values()))

    for call in (lambda: attention(**t, causal=True, backend="triton"), differentiated):
        call()
        again = made_by(call)
        assert not MADE & again.keys()
        assert again["_made_lists"] == again["_made_gradients"] == 0


def test_a_loop_stays_on_the_route_whatever_its_lengths() -> None:
    """All calls of a loop use one route if each has one key more, in the same or new memory, or other lengths."""
    keys = config_for(torch.device(DEVICE), "float32", 16, 16, 0).split_keys + 36  # enough to be split
    t, lengths, options = decode(kv_len=keys + 50), torch.tensor([keys]), Options(causal=True)

    def made(tensors: dict[str, Tensor]) -> list[Any]:
        return [call.args() for call in launch.forward_calls([Problem.create(tensors, options)])]

    def growing(n: int) -> list[Any]:
        return made(t | {name: t[name][:, :, :n] for name in ("k", "v")})

    def growing_anew(n: int) -> list[Any]:
        return made(t | {name: t[name][:, :, :n].clone() for name in ("k", "v")})

    def with_lengths(_: int) -> list[Any]:
        return made(t | {"kv_lengths": lengths.add_(1)})

    for call in (growing, growing_anew, with_lengths):
        assert len(call(keys)) == 2, "the keys are split"
        counts: Counter[str] = Counter()
        for n in range(keys + 1, keys + 9):
            counts += made_by(partial(call, n))
        assert counts["_made_lists"] <= 1  # a loop makes new lists once in `least_keys` keys, and this one adds 8
        assert not MADE & counts.keys() - ({"replace"} if counts["_made_lists"] else set())


def test_no_call_of_a_launch_is_without_programs() -> None:
    for q_len in (1, 30):
        t = decode(q_len)
        forward = Problem.create(t, Options(return_lse=True))
        assert all(call.programs for call in launch.forward_calls([forward]))
        launch.forward([forward])
        gradient = Problem.create(t | forward.outputs | {"do": torch.ones_like(t["q"])}, Options(), "backward")
        assert all(call.programs for call in launch.backward_calls([gradient], [{}]))


def test_routes_are_bounded_and_hold_no_tensor() -> None:
    t = decode()
    attention(**t, backend="triton")
    problem = Problem.create(t, Options(return_lse=True, backend="triton"))
    kept_route = route.route_of(problem, True, False, None)
    assert kept_route is route.route_of(problem, True, False, None)
    assert not any(torch.is_tensor(x) for x in vars(kept_route).values())
    kept, tiles = weakref.ref(kept_route), kept_route.config
    del kept_route
    for keys in range(300):  # as many other routes as a process never keeps
        route.route_of(problem, True, False, replace(tiles, split_keys=1 + keys))
    gc.collect()
    assert kept() is None


def test_threads_share_routes() -> None:
    """Threads that make their first calls at the same time, on one route and on several, get equal kernel calls."""
    problems = [
        Problem.create(decode(q_len, kv_len), Options(causal=True, window=window))
        for q_len in (1, 9) for kv_len in (40, 150) for window in ((-1, -1), (5, 5))
    ]  # fmt: skip

    def made(problem: Problem) -> list[Any]:
        calls = list(launch.forward_calls([problem]))
        return [(call.kernel.__name__, call.programs, call.tile, call.constants) for call in calls]

    expected = [made(problem) for problem in problems]
    forget()
    with ThreadPoolExecutor(8) as pool:
        calls = list(pool.map(made, problems * 20))
    assert calls == expected * 20
    assert len({id(call.code) for _ in range(3) for call in launch.forward_calls(problems[:1])}) == 1


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_a_loop_with_lengths_on_the_device_does_not_wait_for_it() -> None:
    """After two calls, a call with lengths on the device does not wait for the device, and sees changes of lengths."""
    t = decode(kv_len=150)
    lengths = torch.tensor([60], device=DEVICE)
    for _ in range(2):
        attention(**t, kv_lengths=lengths, backend="triton")
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = attention(**t, kv_lengths=lengths, backend="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    lengths.add_(30)
    longer = attention(**t, kv_lengths=lengths, backend="triton")
    assert not torch.equal(actual, longer)
    assert torch.equal(longer, attention(**t, kv_lengths=torch.tensor([90]), backend="triton"))
