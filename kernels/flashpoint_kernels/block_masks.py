"""Make block masks: a boolean for each block of a mask. The mask is a tensor, or a function of the positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from flashpoint_contract.options import OPTIONS, ProblemError
from flashpoint_kernels.operators.torch_rules import overridable
from flashpoint_kernels.problems.memory import check_memory

SIZE: tuple[int, int] = OPTIONS["block_size"].default
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@overridable
def create_block_mask(
    mask: Rule | Tensor,
    batch: int | None = None,
    heads: int | None = None,
    q_len: int | None = None,
    kv_len: int | None = None,
    device: torch.device | str = "cpu",
    block_size: int | Sequence[int] = SIZE,
) -> Tensor:
    """Return the block mask of a mask: a block is true where the mask is true for any query and key in it.

    `attention` skips the blocks that are false. In a block that is true, every query sees every key: pass the finer
    mask as well, as `causal`, `window` or `attn_mask`.

    Args:
        mask: A function of (b, h, i, j) that returns whether query i of head h of sequence b sees key j, as
            FlexAttention's `mask_mod` (Dong et al. 2024). It gets integer tensors that broadcast to (batch, heads,
            queries, keys), and returns booleans that do: `lambda b, h, i, j: i - j < 256`, `lambda b, h, i, j:
            document[i] == document[j]`. Or a dense mask, booleans of (…, Sq, Sk).
        batch: B, if `mask` is a function. None or 1 if the mask is the same for all sequences.
        heads: Hq, if `mask` is a function. None or 1 if the mask is the same for all heads.
        q_len: Sq, needed if `mask` is a function.
        kv_len: Sk, needed if `mask` is a function.
        device: Device of the block mask of a function, and of the tensors that the function gets.
        block_size: (Mq, Mk), or one number for both: multiples of 16. Give the same to `attention`.

    Returns:
        Booleans (batch or 1, heads or 1, ceil(Sq/Mq), ceil(Sk/Mk)); for a dense mask (…, ceil(Sq/Mq), ceil(Sk/Mk)). A
        function is called for one row of blocks at a time, so the whole mask is never in memory.

    Raises:
        ProblemError: a ValueError that names the wrong argument.
    """
    rows, columns = _size(block_size)
    if isinstance(mask, Tensor):
        return _of_dense(mask, rows, columns)
    sizes = {"batch": batch or 1, "heads": heads or 1, "q_len": q_len, "kv_len": kv_len}
    if wrong := [name for name, n in sizes.items() if not isinstance(n, int) or n < 0]:
        raise ProblemError((name, "must be an integer of 0 or more if the mask is a function") for name in wrong)
    return _of_rule(mask, sizes, (rows, columns), torch.device(device))


def _size(given: int | Sequence[int]) -> tuple[int, int]:
    size: Any = (given, given) if isinstance(given, int) else tuple(given)
    if error := OPTIONS["block_size"].kind.error(size):
        raise ProblemError([("block_size", error)])
    return size[0], size[1]


def _of_rule(rule: Rule, sizes: dict[str, Any], block: tuple[int, int], device: torch.device) -> Tensor:
    batch, heads, q_len, kv_len = sizes.values()

    def along(axis: int, *bounds: int) -> Tensor:
        shape = [1] * 4
        shape[axis] = -1
        return torch.arange(*bounds, dtype=torch.int64, device=device).view(shape)

    def found() -> Iterator[Tensor]:
        for start in range(0, q_len, block[0]):
            i = along(2, start, min(start + block[0], q_len))
            seen = rule(along(0, batch), along(1, heads), i, along(3, kv_len))
            full = batch, heads, i.numel(), kv_len
            if not isinstance(seen, Tensor) or seen.dtype != torch.bool:
                raise ProblemError([("mask", "must return a tensor of booleans")])
            try:
                yield _of_dense(seen.expand(full), *block)
            except RuntimeError:
                shapes = f"{list(seen.shape)} do not broadcast to {list(full)}"
                raise ProblemError([("mask", f"must return booleans with a shape that broadcasts: {shapes}")]) from None

    none = torch.zeros(batch, heads, 0, -(-kv_len // block[1]), dtype=torch.bool, device=device)
    return torch.cat([none, *found()], dim=2)


def _of_dense(mask: Tensor, rows: int, columns: int) -> Tensor:
    if mask.dtype != torch.bool or mask.ndim < 2:
        raise ProblemError([("mask", "must be a function, or a tensor of booleans (…, Sq, Sk)")])
    check_memory(mask=mask)
    for axis, size in ((-1, columns), (-2, rows)):
        count = -(-mask.shape[axis] // size)
        padded = torch.nn.functional.pad(mask, [0, 0] * (-1 - axis) + [0, count * size - mask.shape[axis]])
        at = mask.ndim + axis
        mask = padded.reshape(*mask.shape[:at], count, size, *mask.shape[at + 1 :]).any(at + 1)
    return mask
