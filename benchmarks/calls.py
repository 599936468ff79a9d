"""Time calls of the library in two commits: `python benchmarks/calls.py [launch-overhead] --beside CHECKOUT`.

CHECKOUT is a checkout of another commit with compiled kernels. Each checkout has its own process, with the same Python
and packages. In each round, both make many calls, one checkout after the other; only the fastest call counts, because
other programs disturb it least. A row has each checkout's median over the rounds, and the median ratio of the times.

By default, it times `flashpoint_kernels.attention` on the CPU at (1,8,N,D), without and with the gradient, for each
dtype, D and N. Target: no call takes more than 5% longer here than in CHECKOUT. Writes cpu-calls-<cpu>.json in some
minutes.

`launch-overhead` times the host part of a call on a GPU, without a GPU: the code of `backend="triton"` up to the
driver's launch. Triton looks up the compiled kernel and stops there, and tensors are on the CPU. The shortcut for plain
calls on a CPU is disabled, because a GPU has none. The times do not contain the driver, the copy to the device, or
pinned memory for this copy. Writes launch-overhead-<cpu>.json.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

from record import ROOT, commit
from runner import Args, apart, in_turn, medians, option, ratio, run, run_named, target

Call = Callable[[], Any]
LENGTHS = (1, 16, 64, 128, 512, 2048)
DIMS = (16, 40, 64, 80, 128, 256)
TYPES = ("float32", "float16", "bfloat16")
CALLS, SECONDS = 1000, 0.05  # `timed` repeats a CPU call at most CALLS times and for at most SECONDS
SLOWER = 1.05  # largest allowed ratio to the time in CHECKOUT
ARCH = 90  # the architecture whose launches are timed
LAUNCHES = 60  # `timed` repeats a launch this many times


def timed(make: Callable[[], Mapping[str, Call]], max_calls: int, seconds: float) -> dict[str, Callable[..., Any]]:
    """Return two functions: `names()` lists the names of the calls that `make` builds; `fastest(name)` times one call.

    `fastest` repeats the call `max_calls` times or for `seconds`, whichever ends first, and returns the shortest time
    in µs.
    """
    calls = make()

    def fastest(name: str) -> float:
        call, taken = calls[name], []
        while len(taken) < max_calls and sum(taken) < 1e6 * seconds:
            began = time.perf_counter_ns()
            call()
            taken.append((time.perf_counter_ns() - began) / 1e3)
        return min(taken)

    return {"names": lambda: list(calls), "fastest": fastest}


def in_turns(
    make: Callable[[], Mapping[str, Call]], beside: Path | None, rounds: int, max_calls: int,
    seconds: float = float("inf"), **variables: str,
) -> dict[str, Any]:  # fmt: skip
    """Time the calls that `make` builds, in this checkout and, if `beside` is given, also in that checkout.

    Return the commit of `beside`, and one row of times for each call. `make` imports our packages only when it runs in
    the process of a checkout, so that they come from that checkout.
    """
    trees = {"us": ROOT} | ({"us_beside": beside.resolve()} if beside else {})
    rows = []
    with contextlib.ExitStack() as stack:
        sides = {}
        for side, tree in trees.items():
            # The process that `apart` starts inherits this sys.path.
            with mock.patch.object(sys, "path", [str(tree / "kernels"), str(tree / "contract"), *sys.path]):
                sides[side] = stack.enter_context(apart(timed, make, max_calls, seconds, **variables))
        for name in sides["us"]("names"):
            ways = {side: lambda ask=ask, name=name: ask("fastest", name) for side, ask in sides.items()}
            times = list(in_turn(ways, rounds))
            row = {"call": name, **medians(times, digits=1)}
            rows.append(row | ({"ratio": round(ratio(times, "us", "us_beside"), 3)} if beside else {}))
            print(rows[-1], flush=True)
    return {"environment": {"beside": commit(beside)} if beside else {}, "rounds": rounds, "rows": rows}


def cpu_cases() -> dict[str, Call]:
    """Return calls without options on the CPU, by name: the forward pass alone, and with the gradients."""
    import torch

    from flashpoint_kernels import attention

    def with_gradient(leaves: list[torch.Tensor], do: torch.Tensor) -> None:
        torch.autograd.grad(attention(*leaves), leaves, do)

    calls: dict[str, Call] = {}
    for dtype, dim, length in product(TYPES, DIMS, LENGTHS):
        drawn = torch.randn(4, 1, 8, length, dim, generator=torch.Generator().manual_seed(0))
        *qkv, do = drawn.to(getattr(torch, dtype))
        calls[f"forward, {dtype}, D {dim}, N {length}"] = partial(attention, *qkv)
        leaves = [t.clone().requires_grad_() for t in qkv]
        calls[f"with gradient, {dtype}, D {dim}, N {length}"] = partial(with_gradient, leaves, do)
    return calls


def cpu_calls(args: Args) -> dict[str, Any]:
    result = in_turns(cpu_cases, args.beside, args.rounds, CALLS, SECONDS)
    slowest = max(result["rows"], key=lambda row: row.get("ratio", 0.0))
    if args.beside is None:
        return result
    return {**result, "targets": [target(slowest["call"], slowest["ratio"], "of the time before", most=SLOWER)]}


def launch_cases() -> dict[str, Call]:
    """Return the calls that `launch-overhead` times, by name.

    The cases "one key more in each call" start with half of the keys, and start again with half after the last key.
    """
    import torch

    from flashpoint_kernels import Options, Problem, attention
    from flashpoint_kernels.triton_backend import prepare

    def tensors(batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int) -> list[torch.Tensor]:
        shapes = (batch, heads, q_len, 128), (batch, kv_heads, kv_len, 128), (batch, kv_heads, kv_len, 128)
        return [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]

    def forward(*sizes: int) -> Call:
        q, k, v = tensors(*sizes)
        return lambda: attention(q, k, v, causal=True, backend="triton")

    def growing(new: bool, *sizes: int) -> Call:
        q, k, v = tensors(*sizes)
        length = [sizes[-1] // 2]

        def call() -> None:
            length[0] = length[0] + 1 if length[0] < sizes[-1] else sizes[-1] // 2
            k_now, v_now = k[:, :, : length[0]], v[:, :, : length[0]]
            if new:
                k_now, v_now = torch.empty(k_now.shape, dtype=k.dtype), torch.empty(v_now.shape, dtype=v.dtype)
            attention(q, k_now, v_now, causal=True, backend="triton")

        return call

    def with_lengths(*sizes: int) -> Call:
        q, k, v = tensors(*sizes)
        lengths = torch.arange(sizes[0], dtype=torch.int32) + sizes[-1] // 2

        def call() -> None:
            lengths.copy_((lengths + 1) % sizes[-1])
            attention(q, k, v, causal=True, kv_lengths=lengths, backend="triton")

        return call

    def with_gradients(backward: bool, *sizes: int) -> Call:
        q, k, v = (t.requires_grad_() for t in tensors(*sizes))

        def call() -> None:
            o = attention(q, k, v, causal=True, backend="triton")
            if backward:
                torch.autograd.grad(o, (q, k, v), o.detach())

        return call

    def prepared(*sizes: int) -> Call:
        q, k, v = tensors(*sizes)
        return prepare([Problem.create({"q": q, "k": k, "v": v}, Options(causal=True))])

    decode = 1, 32, 8, 1, 4096
    return {
        "decode, batch 1": forward(*decode),
        "decode, batch 64": forward(64, 32, 8, 1, 512),
        "prefill": forward(1, 16, 16, 4096, 4096),
        "decode, one key more in each call": growing(False, *decode),
        "decode, one key more in each call, in new memory": growing(True, *decode),
        "decode with kv_lengths, batch 64": with_lengths(64, 32, 8, 1, 1024),
        "forward with gradients, decode": with_gradients(False, *decode),
        "forward with gradients, prefill": with_gradients(False, 1, 16, 16, 1024, 1024),
        "forward and backward": with_gradients(True, 1, 16, 16, 1024, 1024),
        "prepared, two kernels": prepared(*decode),
        "prepared, one kernel": prepared(1, 16, 16, 4096, 4096),
    }


def stopped_launches() -> dict[str, Call]:
    """Patch Triton so that each launch ends before it calls the CUDA driver, and return the calls of `launch_cases`."""
    from triton.runtime.jit import JITFunction

    from flashpoint_kernels.dispatching import dispatch
    from flashpoint_kernels.operators import plain
    from flashpoint_kernels.triton_backend.tools.ahead import pretend

    pretend(ARCH)
    run = JITFunction.run
    JITFunction.run = lambda *args, **options: run(*args, **{**options, "warmup": True})
    dispatch._INTERPRETED = True  # this lets the backend `triton` run on the CPU
    plain.attention = lambda *_: None  # disables the shortcut for CPU tensors, as for calls on a GPU
    return launch_cases()


def launch_overhead(args: Args) -> dict[str, Any]:
    result = in_turns(stopped_launches, args.beside, args.rounds, LAUNCHES, TRITON_INTERPRET="0")
    result["environment"]["arch"] = f"sm_{ARCH}"
    return {**result, "calls": LAUNCHES}


if __name__ == "__main__":
    beside = option(None, "a checkout of another commit", type=Path)
    run_named(
        cpu_calls=partial(run, cpu_calls, packages=("torch",), beside=beside, rounds=option(5)),
        launch_overhead=partial(run, launch_overhead, packages=("torch", "triton"), beside=beside, rounds=option(20)),
    )
