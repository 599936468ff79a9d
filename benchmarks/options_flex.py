"""Time `flex_attention` of this library with score_mods that no option covers: section `flex_attention` of options.py.

The forward runs beside torch's flex_attention without torch.compile, which has no gradient on the CPU. The gradient,
also of captured tensors, runs beside the formula with its whole matrix and autograd; memory is measured, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from runner import pair, target
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torchs

from flashpoint_kernels import flex_attention
from flashpoint_kernels.timing.clock import peak_bytes

HEADS, LENGTH, DIM = 8, 2048, 64
WINDOW = 256
Mod = Callable[..., Tensor]


def kinds() -> dict[str, tuple[Mod, BlockMask | None, Sequence[Tensor]]]:
    """Return each kind's score_mod, mask, and captured tensors."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(HEADS, 2 * LENGTH, generator=generator, requires_grad=True)
    gain = torch.rand(HEADS, generator=generator, requires_grad=True)

    def window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i - j < WINDOW)

    blocks = create_block_mask(window, None, None, LENGTH, LENGTH, "cpu")
    return {
        "a sigmoid of scores": (lambda s, b, h, i, j: 4 * torch.sigmoid(s), None, ()),
        "a table of distances": (lambda s, b, h, i, j: s + table[h, i - j + LENGTH], None, (table,)),
        "a gain of each head": (lambda s, b, h, i, j: s * gain[h], None, (gain,)),
        "the same in a causal window": (lambda s, b, h, i, j: s * gain[h], blocks, (gain,)),
    }


def written_out(q: Tensor, k: Tensor, v: Tensor, score_mod: Mod, blocks: BlockMask | None) -> Tensor:
    """Return attention by the formula, with s (B,H,Sq,Sk) in memory."""
    s = q @ k.mT / math.sqrt(q.shape[-1])
    numbers = [torch.arange(n).view([-1 if axis == d else 1 for d in range(4)]) for axis, n in enumerate(s.shape)]
    s = score_mod(s, *numbers)
    if blocks is not None:
        s = s.masked_fill(~blocks.mask_mod(*numbers), -torch.inf)
    return torch.softmax(s, -1) @ v


def rows(rounds: int) -> Iterator[dict[str, Any]]:
    q, k, v, do = torch.randn(4, 1, HEADS, LENGTH, DIM, generator=torch.Generator().manual_seed(1))
    for name, (score_mod, blocks, captured) in kinds().items():
        with torch.no_grad():
            call = q, k, v, score_mod, blocks
            times = pair(partial(flex_attention, *call), partial(torchs, *call), rounds)
        yield {"kind": name, "pass": "forward", **times}
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]

        def gradient(attend: Mod) -> Any:
            out = attend(*leaves, score_mod, blocks)  # noqa: B023  # called in this round alone
            return torch.autograd.grad(out, (*leaves, *captured), do)  # noqa: B023

        ways = partial(gradient, flex_attention), partial(gradient, written_out)
        times = pair(*ways, rounds)
        mine, theirs = (peak_bytes(way, "cpu") or 0 for way in ways)
        yield {"kind": name, "pass": "with gradient", **times, "mib": mine >> 20, "other_mib": theirs >> 20}


def targets(measured: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the targets: forward as fast as torch's without a compiler, with gradient as fast as the formula."""
    made = []
    for gradient, other in (("forward", "torch's flex_attention, not compiled"), ("with gradient", "the formula")):
        if times := [row["times"] for row in measured if row["pass"] == gradient]:
            made.append(
                target(f"flex_attention {gradient}: {other}'s time / ours, least", min(times), "time", least=1.0)
            )
    return made
