"""Time the host part of a GPU call without a GPU: `python benchmarks/launch_overhead.py --beside CHECKOUT`.

Times the code of `backend="triton"` up to the driver's launch: Triton looks up the compiled kernel and stops there, and
tensors are on the CPU. The times do not contain the driver, the copy to the device, pinned memory for this copy, or the
path for plain calls on the CPU. CHECKOUT is a checkout of another commit; calls here and there alternate
(checkouts.py). Writes benchmarks/results/launch-overhead-<cpu>.json.
"""

from __future__ import annotations

from typing import Any

from checkouts import BESIDE, Call, in_turns
from runner import Args, Option, run

ARCH = 90
CALLS = 60  # calls of one case in one turn


def cases() -> dict[str, Call]:
    """Return the calls by name. When a call with growing keys has used all keys, it starts again with half of them."""
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


def calls() -> dict[str, Call]:
    """Return the calls, each of which ends before Triton calls the driver."""
    from flashpoint_kernels.dispatching import dispatch
    from flashpoint_kernels.operators import plain
    from flashpoint_kernels.triton_backend.tools.ahead import pretend

    pretend(ARCH)
    stop_before_the_driver()
    dispatch._INTERPRETED = True  # this lets the backend `triton` run on the CPU
    plain.attention = lambda *_: None  # the plain path answers only on a CPU: disable it, as on a GPU
    return cases()


def stop_before_the_driver() -> None:
    """Make each launch end before Triton calls the driver."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def stopped(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = stopped


def measure(args: Args) -> dict[str, Any]:
    result = in_turns(calls, args.beside, args.rounds, CALLS, TRITON_INTERPRET="0")
    result["environment"]["arch"] = f"sm_{ARCH}"
    return {**result, "calls": CALLS}


if __name__ == "__main__":
    packages = ("torch", "triton")
    run(measure, "launch-overhead", packages=packages, beside=BESIDE, rounds=Option(20))
