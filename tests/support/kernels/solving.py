"""Small helpers of the kernel tests: seeded normal tensors, and a run into outputs poisoned with NaN."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flashpoint_contract.options import Direction
from flashpoint_contract.spec import Spec, plan
from flashpoint_kernels import Options, Problem, run, verify
from flashpoint_kernels.problems.problem import tensor_info
from tests.conftest import DEVICE


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return standard normal numbers on the device under test."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def qkv(
    batch: int, heads: int, q_len: int, kv_len: int, dim: int, *, kv_heads: int | None = None,
    value_dim: int | None = None, dtype: torch.dtype = torch.float32, seed: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
    """Return q, k, v and do in layout bhsd."""
    kv_heads, value_dim = kv_heads or heads, value_dim or dim
    return {
        "q": normal(batch, heads, q_len, dim, seed=seed, dtype=dtype),
        "k": normal(batch, kv_heads, kv_len, dim, seed=seed + 1, dtype=dtype),
        "v": normal(batch, kv_heads, kv_len, value_dim, seed=seed + 2, dtype=dtype),
        "do": normal(batch, heads, q_len, value_dim, seed=seed + 3, dtype=dtype),
    }


MEMORY = ("plain", "apart", "slice", "turned", "odd")


def restrided(t: Tensor, memory: str) -> Tensor:
    """Return the same numbers with other strides or another address; `memory` is one of MEMORY.

    "apart": every second element of wider rows, between NaN; "slice": a slice of wider rows; "turned": the last two
    dimensions transposed in memory; "odd": one element after an aligned address; "plain": as they are.
    """
    if memory == "apart":
        return torch.stack([t, torch.full_like(t, torch.nan)], -1)[..., 0]
    if memory == "slice":
        return torch.nn.functional.pad(t, (3, 5))[..., 3 : 3 + t.shape[-1]]
    if memory == "turned":
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    if memory == "odd":
        return torch.nn.functional.pad(t.flatten(), (1, 0))[1:].view(t.shape)
    return t


def spec_of(tensors: Mapping[str, Tensor], options: Options, direction: Direction) -> Spec:
    return plan({name: tensor_info(name, t) for name, t in tensors.items()}, options, direction)


def poisoned(tensors: Mapping[str, Tensor], options: Options, direction: Direction) -> Problem:
    problem = Problem.create(tensors, options, direction)
    for t in problem.outputs.values():
        t.fill_(float("nan"))
    return problem


def forward(backend: str, tensors: Mapping[str, Tensor], **options: object) -> dict[str, Tensor]:
    """Return o and lse as `backend` computes them."""
    inputs = {name: t for name, t in tensors.items() if name not in ("do", "dlse", "o", "lse")}
    problem = poisoned(inputs, Options(return_lse=True, **options), "forward")  # type: ignore[arg-type]
    run([problem], backend)
    return problem.outputs


def backward(backend: str, tensors: Mapping[str, Tensor], **options: object) -> dict[str, Tensor]:
    """Return the gradients that the option `grads` names."""
    problem = poisoned(tensors, Options(**options), "backward")  # type: ignore[arg-type]
    run([problem], backend)
    return problem.outputs


def check(backend: str, tensors: Mapping[str, Tensor], **options: object) -> None:
    """Assert by `verify` that the answers of a backend are right."""
    report = verify(tensors, Options(backend=backend, **options))  # type: ignore[arg-type]
    assert report.ok, [e for e in report.tensors if not e.ok]


def forward_of(tensors: Mapping[str, Tensor], **options: object) -> Problem:
    """Return the forward problem whose outputs are o and lse."""
    inputs = {name: t for name, t in tensors.items() if name not in ("do", "dlse", "o", "lse")}
    return Problem.create(inputs, Options(return_lse=True, **options))  # type: ignore[arg-type]
