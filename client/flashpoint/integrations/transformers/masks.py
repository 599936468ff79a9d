"""Masks of a forward over a `RemoteCache`: options that the server applies, and a tensor only if it is needed.

transformers asks the cache for the sizes of a mask, and passes them to the mask function, `held_mask`. One size is a
`LengthInCache`, in which `held_mask` finds the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import sdpa_mask

from flashpoint_contract.transformers import LazyMask, lazy_mask


class LengthInCache(int):
    """A number of keys (an int) that also refers to the cache that holds them."""

    cache: object

    def __new__(cls, length: int, cache: object) -> LengthInCache:
        made = super().__new__(cls, length)
        made.cache = cache
        return made


class HeldMask(LazyMask):
    """A mask of a forward over `cache`."""

    cache: object
    padding: Tensor | None  # (B, Sk), false for padding tokens
    plain: bool  # the mask is causal, with this window and padding, and hides nothing else
    window: int | None  # number of tokens


def held_mask(
    *, batch_size: int, q_length: int, kv_length: int, attention_mask: Tensor | None = None,
    local_size: int | None = None, allow_is_causal_skip: bool = True, allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False, config: Any = None, device: Any = "cpu", **rest: Any,
) -> Tensor | None:  # fmt: skip
    """Return a `HeldMask` for the keys of a `RemoteCache`, otherwise the mask of `lazy_mask`."""
    arguments = {
        **rest, "batch_size": batch_size, "q_length": q_length, "kv_length": int(kv_length), "use_vmap": use_vmap,
        "attention_mask": attention_mask, "local_size": local_size, "config": config, "device": device,
    }  # fmt: skip
    if not isinstance(kv_length, LengthInCache):
        return lazy_mask(
            **arguments, allow_is_causal_skip=allow_is_causal_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        )  # fmt: skip

    def make() -> Tensor:
        made = sdpa_mask(**arguments, allow_is_causal_skip=False)
        assert made is not None  # `sdpa_mask` returns None only if it may skip the mask
        return made

    sizes = (batch_size, 1, q_length, int(kv_length))
    mask = HeldMask.of(sizes, rest.get("dtype", torch.float32), device, causal=False, make=make)
    mask.cache = kv_length.cache
    mask.padding = attention_mask
    # transformers allows skipping the mask only if it would be causal within `local_size`, a window or a chunk.
    in_window = local_size is None or local_size == getattr(config, "sliding_window", None)
    chunked = local_size is not None and getattr(config, "attention_chunk_size", None) is not None
    mask.plain = allow_is_causal_skip and not use_vmap and in_window and not chunked
    mask.window = local_size
    return mask


def packed_mask(mask: Tensor, columns: Tensor | None, rows: Tensor | None) -> Tensor:
    """Select from a mask (B|1,H|1,Sq,Sk) the `columns` (B, n) and `rows` (B, m) of valid tokens; None selects all."""
    mask = mask.allowed() if isinstance(mask, LazyMask) else mask
    if columns is not None:
        mask = mask.expand(len(columns), -1, -1, -1)
        mask = mask.gather(3, columns.to(mask.device)[:, None, None, :].expand(-1, *mask.shape[1:3], -1))
    if rows is not None:
        mask = mask.expand(len(rows), -1, -1, -1)
        at = rows.to(mask.device)[:, None, :, None]
        mask = mask.gather(2, at.expand(-1, mask.shape[1], -1, mask.shape[3]))
    return mask
