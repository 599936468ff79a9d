"""Calls with the result types that mypy must infer. _client/test_attending.py checks this file, which never runs."""

from typing import Any, assert_type

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import flashpoint
import flashpoint.torch
from flashpoint import Meta
from flashpoint_kernels import attention

Numbers = NDArray[Any]


def with_numpy(client: flashpoint.Client, cache: flashpoint.Cache, x: NDArray[np.float32]) -> None:
    assert_type(client.attention(x, x, x), Numbers)
    assert_type(client.attention(x, x, x, causal=True, return_lse=True), tuple[Numbers, Numbers])
    assert_type(client.attention(x, x, x, window=(4, 0), with_meta=True), tuple[Numbers, Meta])
    assert_type(client.attention(x, x, x, return_lse=True, with_meta=True), tuple[tuple[Numbers, Numbers], Meta])
    assert_type(client.attention(x, caches=[cache], layer=1), Numbers)
    assert_type(client.attention_grad(x, x, x, x, grads=["dq"]), tuple[Numbers, ...])
    assert_type(client.attention_grad(x, x, x, x, with_meta=True), tuple[tuple[Numbers, ...], Meta])
    assert_type(cache.attention(x, x, x, layer=2, causal=True), Numbers)
    assert_type(cache.attention(x, return_lse=True), tuple[Numbers, Numbers])
    saved = client.attention(x, x, x, save=True)
    assert_type(saved, flashpoint.SavedAttention)
    assert_type(client.attention_grad(x, saved=saved), tuple[Numbers, ...])


def with_torch(client: flashpoint.Client, cache: flashpoint.Cache, x: Tensor) -> None:
    assert_type(client.attention(x, x, x), Tensor)
    assert_type(client.attention(x, x, x, return_lse=True), tuple[Tensor, Tensor])
    assert_type(client.attention_grad(x, x, x, x), tuple[Tensor, ...])
    assert_type(cache.attention(x, x, x, at=4), Tensor)
    assert_type(flashpoint.torch.attention(x, x, x, client=client, causal=True), Tensor)
    assert_type(flashpoint.torch.attention(x, x, x, client=[client], return_lse=True), tuple[Tensor, Tensor])


async def awaited(client: flashpoint.AsyncClient, cache: flashpoint.AsyncCache, x: NDArray[np.float32]) -> None:
    assert_type(await client.attention(x, x, x), Numbers)
    assert_type(await client.attention(x, x, x, return_lse=True, with_meta=True), tuple[tuple[Numbers, Numbers], Meta])
    assert_type(await client.attention(torch.ones(1, 1, 2, 4), caches=[cache]), Tensor)
    assert_type(await client.attention_grad(x, x, x, x), tuple[Numbers, ...])
    assert_type(await cache.attention(x, x, x, with_meta=True), tuple[Numbers, Meta])


def without_a_server(x: Tensor) -> None:
    assert_type(attention(x, x, x, causal=True, window=(4, 0)), Tensor)
    assert_type(attention(x, x, x, backend="tiled", return_lse=True), tuple[Tensor, Tensor])


def either(client: flashpoint.Client, x: Tensor | NDArray[np.float32], flag: bool) -> Any:
    return client.attention(x, x, x, return_lse=flag)
