"""Requests of random lengths, batches and head counts, and functions that run several in one launch by Triton."""

from __future__ import annotations

import random

import torch

from flashpoint_kernels import Options, Problem
from flashpoint_kernels.problems.problem import launch_key
from flashpoint_kernels.triton_backend.host import launch
from tests.conftest import DEVICE


def drawn_request(
    rng: random.Random, seed: int, options: dict[str, object], *, dim: int = 16
) -> dict[str, torch.Tensor]:
    """Return tensors of a request with random lengths, batch and head counts, in the layout of `options`."""
    g = torch.Generator().manual_seed(seed)
    kv_heads, group = rng.choice([1, 1, 2]), rng.choice([1, 1, 2])
    batch, q_len, kv_len = rng.choice([1, 1, 2]), rng.choice([1, 5, 33]), rng.choice([1, 7, 40, 70])

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g).to(DEVICE)

    heads = kv_heads * group
    if options["layout"] == "thd":
        cu_q, cu_k = [0, 3, 3, 3 + q_len], [0, kv_len, kv_len + 2, kv_len + 4]
        q, k, v = normal(cu_q[-1], heads, dim), normal(cu_k[-1], kv_heads, dim), normal(cu_k[-1], kv_heads, dim)
        lengths = {"cu_seqlens_q": torch.tensor(cu_q), "cu_seqlens_k": torch.tensor(cu_k)}
    else:
        shape = (lambda s, h: (batch, h, s, dim)) if options["layout"] == "bhsd" else (lambda s, h: (batch, s, h, dim))
        q, k, v = normal(*shape(q_len, heads)), normal(*shape(kv_len, kv_heads)), normal(*shape(kv_len, kv_heads))
        lengths = (
            {"kv_lengths": torch.tensor([rng.randint(0, kv_len) for _ in range(batch)])} if rng.random() < 0.3 else {}
        )
    if seed % 2:
        sequences = 3 if options["layout"] == "thd" else batch
        lengths["offset"] = torch.linspace(-2, kv_len, sequences).long()
    return {"q": q, "k": k, "v": v, **lengths}


def run_forward(requests: list[tuple[dict[str, torch.Tensor], Options]]) -> list[dict[str, torch.Tensor]]:
    problems = [Problem.create(tensors, options) for tensors, options in requests]
    assert len({launch_key(p.spec, "triton") for p in problems}) == 1
    for problem in problems:
        for t in problem.outputs.values():
            t.fill_(float("nan"))
    launch.forward(problems)
    return [p.outputs for p in problems]


def run_backward(requests: list[tuple[dict[str, torch.Tensor], Options]]) -> list[dict[str, torch.Tensor]]:
    problems = [Problem.create(tensors, options, "backward") for tensors, options in requests]
    for problem in problems:
        for t in problem.outputs.values():
            t.fill_(float("nan"))
    launch.backward(problems)
    return [p.outputs for p in problems]
