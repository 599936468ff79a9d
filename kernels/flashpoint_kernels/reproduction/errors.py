"""Compare our backends with PyTorch, and both with float64, at N 512, D 32 in float32.

A separate process (`python -m flashpoint_kernels.reproduction.errors DEVICE`) prints the differences as JSON: without a
GPU the Triton kernels need Triton's interpreter, which must be selected before Triton is imported.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor

from flashpoint_contract.options import Backend
from flashpoint_kernels import attention, attention_backward, available_backends

LENGTH, HEAD_DIM, BOUND = 512, 32, 1e-6
Answers = dict[str, Tensor]


def written_out(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Answers:
    """Return o and the gradients by the formula of attention in plain PyTorch, in the inputs' dtype."""
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    o = torch.softmax(leaves[0] @ leaves[1].mT * HEAD_DIM**-0.5, -1) @ leaves[2]
    return dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *torch.autograd.grad(o, leaves, do)), strict=True))


def ours(backend: Backend, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Answers:
    """Return o and the gradients from one of our backends."""
    o, _ = attention(q, k, v, return_lse=True, backend=backend)
    return dict(zip(("o", "dq", "dk", "dv"), (o, *attention_backward(do, q, k, v, backend=backend)), strict=True))


def errors(device: str) -> dict[str, dict[str, dict[str, float]]]:
    """Return the largest differences of each tensor, by backend and name.

    `torch` is the backend's difference from PyTorch, `exact` the backend's from float64, `its` PyTorch's from float64.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    q, k, v, do = (
        torch.randn(1, 1, LENGTH, HEAD_DIM, generator=generator, dtype=torch.float32, device="cpu").to(device)
        for _ in range(4)
    )
    plain = written_out(q, k, v, do)
    exact = written_out(*(t.double() for t in (q, k, v, do)))
    by_backend: dict[str, dict[str, dict[str, float]]] = {}
    for backend in (name for name in ("triton", "cpu", "torch", "tiled") if name in available_backends(device)):
        answers = ours(backend, q, k, v, do)
        by_backend[backend] = {
            name: {
                "torch": apart(t, plain[name]),
                "exact": apart(t, exact[name]),
                "its": apart(plain[name], exact[name]),
            }
            for name, t in answers.items()
        }
    return by_backend


def apart(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two tensors, computed in float64."""
    return float((a.double() - b.double()).abs().max())


if __name__ == "__main__":
    print(json.dumps(errors(sys.argv[1])))
