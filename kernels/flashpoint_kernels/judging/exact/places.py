"""Describe the positions of wrong elements: their sequences, heads, rows and columns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_TILES = (256, 128, 64, 32, 16)


def index(at: Sequence[int], name: str, ragged: bool = False) -> str:
    """Return the position of an element in words, such as `batch 0, head 3, row 17, column 5`."""
    row = "key" if name in ("dk", "dv") else "row"
    axes: tuple[str, ...] = ("batch", "head", row, "column") if not ragged else (row, "head", "column")
    if name == "lse" and ragged:
        axes = ("head", "row")
    if name in ("dattn_mask", "dsinks"):
        axes = ("batch", "head", "row", "key")[-len(at) :] if name == "dattn_mask" else ("head",)
    return ", ".join(f"{axis} {i}" for axis, i in zip(axes, at, strict=False))


def where(wrong: Tensor, name: str) -> str:
    """Describe in words the sequences, heads, rows and columns that have wrong elements. `wrong`: bool (B, H, S, d).

    An axis is omitted if every index on it has wrong elements.
    """
    if wrong.ndim == 3:
        wrong = wrong[..., None]
    if wrong.ndim != 4 or not bool(wrong.any()):
        return ""
    row, column = "key" if name in ("dk", "dv") else "row", "key" if name == "dattn_mask" else "column"
    parts = []
    for axis, word in ((0, "sequence"), (1, "head"), (2, row), (3, column)):
        hit = wrong.any(dim=[a for a in range(4) if a != axis])
        if bool(hit.all()):
            continue
        parts.append(f"{_listed(hit, word)} of {len(hit)}")
    total = int(wrong.sum())
    share = "all elements" if total == wrong.numel() else f"{total} of {wrong.numel()} elements"
    return "; ".join([share, *parts])


def _listed(hit: Tensor, word: str) -> str:
    at = torch.nonzero(hit)[:, 0].tolist()
    first, last, size = at[0], at[-1], len(hit)
    if len(at) == 1:
        return f"{word} {first}" + (" (the last)" if first == size - 1 else "")
    step = at[1] - at[0]
    if at == list(range(first, last + 1)):
        text = f"{word}s {first} to {last}"
        tile = next((t for t in _TILES if first and first % t == 0 and last == size - 1), None)
        if tile:
            text += f" (from a multiple of {tile} to the end)"
        return text
    if step > 1 and at == list(range(first, last + 1, step)):
        return f"every {step}. {word} from {first}"
    if len(at) <= 6:
        return f"{word}s {', '.join(map(str, at))}"
    return f"{len(at)} {word}s from {first} to {last}"
