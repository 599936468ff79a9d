"""Sequences whose block tables share pages, computed in one call and each alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashpoint_kernels import attention, quantize
from tests.support.kernels.solving import normal


def tree(shared: list[int], own: list[int], page: int, seed: int) -> tuple[Tensor, Tensor, int]:
    """Return a block table, the lengths and the number of pages.

    Sequence n has shared[n] + own[n] keys, and shares the whole pages of its first shared[n] keys with sequence 0.
    """
    lengths = [keys + more for keys, more in zip(shared, own, strict=True)]
    width = -(-max(lengths) // page)
    table = torch.full((len(own), width), 2**31 - 1, dtype=torch.int32)
    count = 0
    for row, (keys, length) in enumerate(zip(shared, lengths, strict=True)):
        common = keys // page if row else 0
        common = min(common, lengths[0] // page)
        table[row, :common] = table[0, :common]
        needed = -(-length // page) - common
        table[row, common : common + needed] = torch.arange(count, count + needed)
        count += needed
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).int()
    there = table < count
    return torch.where(there, order[table.clamp(max=count - 1).long()], table), torch.tensor(lengths), count


def check(shared: list[int], own: list[int], page: int, q_len: int, group: int, dtype: torch.dtype,
          kind: torch.dtype | None, backend: str = "cpu", **options: Any) -> None:  # fmt: skip
    """Check that each sequence has the same bits as in a call with only this sequence.

    The answer must also be close to that of backend reference.
    """
    table, lengths, count = tree(shared, own, page, seed=len(own))
    q = normal(len(own), 2 * group, q_len, 32, seed=1).to(dtype)
    t = {name: normal(count, 2, page, 32, seed=n).to(dtype) for n, name in enumerate("kv")}
    if kind is not None:
        for name in "kv":
            t[name], t[f"{name}_scale"] = quantize(t[name], kind)
    options |= {"causal": True, "return_lse": True}
    o, lse = attention(q, **t, block_table=table, kv_lengths=lengths, backend=backend, **options)
    for n in range(len(own)):
        one = {"block_table": table[n : n + 1], "kv_lengths": lengths[n : n + 1]} | options
        alone = attention(q[n : n + 1], **t, **one, backend=backend)
        assert torch.equal(o[n : n + 1], alone[0])
        assert torch.equal(lse[n : n + 1], alone[1])
        right = attention(q[n : n + 1], **t, **one, backend="reference")
        tolerance = {torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(alone[0], right[0], rtol=tolerance, atol=tolerance)
