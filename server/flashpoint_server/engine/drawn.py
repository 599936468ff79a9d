"""A problem drawn from a seed, for a verification whose caller sends no tensors. Needs torch."""

from __future__ import annotations

import torch
from torch import Tensor

from flashpoint.errors import invalid
from flashpoint.shape_schema import Shape
from flashpoint.verify_schema import VerifyRequest
from flashpoint_kernels.problem import DTYPES


def draw(request: VerifyRequest, device: str) -> dict[str, Tensor]:
    """The tensors of a request by their names, `do` among them where gradients are judged; the same on every device.

    q, k, v, do, a float mask and sinks are standard normal; slopes are ALiBi's own (Press et al. 2022), a boolean mask
    lets three keys in four be seen, lengths are any from 1 to the whole. Raises InvalidInputError for two masks.
    """
    shape, extras = request.shape, request.extras
    if {"bool_mask", "float_mask"} <= set(extras):
        raise invalid("extras", "a problem has one mask")
    generator = torch.Generator().manual_seed(request.seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(device, DTYPES[request.dtype])

    def rows(heads: int, length: int, dim: int) -> Tensor:
        sizes = {
            "bhsd": (shape.batch, heads, length, dim),
            "bshd": (shape.batch, length, heads, dim),
            "thd": (shape.batch * length, heads, dim),
        }
        return normal(*sizes[request.layout])

    tensors = {
        "q": rows(shape.q_heads, shape.q_len, shape.head_dim),
        "k": rows(shape.kv_heads, shape.kv_len, shape.head_dim),
        "v": rows(shape.kv_heads, shape.kv_len, shape.value_dim),
    }
    if request.direction != "forward":
        tensors["do"] = rows(shape.q_heads, shape.q_len, shape.value_dim)
    if request.layout == "thd":
        for name, length in (("cu_seqlens_q", shape.q_len), ("cu_seqlens_k", shape.kv_len)):
            tensors[name] = torch.arange(shape.batch + 1) * length
    if "float_mask" in extras:
        tensors["attn_mask"] = normal(1, shape.q_heads, shape.q_len, shape.kv_len)
    if "bool_mask" in extras:
        seen = torch.rand(shape.batch, 1, shape.q_len, shape.kv_len, generator=generator) < 0.75
        tensors["attn_mask"] = seen.to(device)
    if "alibi_slopes" in extras:
        heads = torch.arange(1, shape.q_heads + 1)
        tensors["alibi_slopes"] = torch.exp2(-8.0 * heads / shape.q_heads).to(device)
    if "sinks" in extras:
        tensors["sinks"] = normal(shape.q_heads)
    for name, length in (("q_lengths", shape.q_len), ("kv_lengths", shape.kv_len)):
        if name in extras:
            tensors[name] = _lengths(shape, length, generator)
    return tensors


def _lengths(shape: Shape, length: int, generator: torch.Generator) -> Tensor:
    return torch.randint(min(1, length), length + 1, (shape.batch,), generator=generator)
