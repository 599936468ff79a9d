"""Functions of the programs whose threads tests count (tests/kernels/native/test_teams.py).

Does not import conftest, which sets OMP_WAIT_POLICY.
"""

from __future__ import annotations

import hashlib
import os
import time

import torch

from flashpoint_kernels import attention, attention_backward


def threads() -> int:
    """Return the number of threads of this process."""
    return len(os.listdir("/proc/self/task"))


def call_torch() -> None:
    """Run an operator of torch that needs all of its threads."""
    torch.ones(1 << 20, dtype=torch.float32, device="cpu").add_(1)


def answers(seed: int = 0) -> str:
    """Return the checksum of a forward and a gradient, which are large enough for four threads.

    They are so small that torch's operators take one thread: in a forked child they would wait for the parent's.
    """
    digest, generator = hashlib.sha256(), torch.Generator().manual_seed(seed)
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v, do = (torch.randn(1, 4, 120, 64, generator=generator, device="cpu").to(dtype) for _ in range(4))
        o, lse = attention(q, k, v, causal=True, return_lse=True)
        for t in (o, *attention_backward(do, q, k, v, o=o, lse=lse, causal=True)):
            digest.update(t.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


_team = 0  # threads of torch's last call in `added`


def added(count: int) -> int:
    """Return how many threads calls of ours add to those of torch, which has `count`."""
    global _team
    torch.set_num_threads(count)
    fewest, deadline = threads() - max(0, _team - count), time.monotonic() + 60
    call_torch()
    while count < _team and threads() > fewest and time.monotonic() < deadline:
        time.sleep(0.01)  # threads of a larger team end after the call that needed fewer
    before, _team = threads(), count
    for _ in range(3):
        answers()
        call_torch()
    return threads() - before


def of_denormal_numbers() -> str:
    """Return the checksum of o for values that are denormal numbers."""
    q, k = torch.ones(2, 4, 4, 256, 32, dtype=torch.float32, device="cpu")
    v = torch.full(q.shape, 500, dtype=torch.int32, device="cpu").view(torch.float32)
    o = attention(q, k, v)
    assert o.view(torch.int32).any()
    return hashlib.sha256(o.numpy().tobytes()).hexdigest()
