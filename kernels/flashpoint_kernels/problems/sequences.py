"""Make views of consecutive sequences of canonical tensors (see problem.py), and copies of any sequences or pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashpoint_contract.options import ProblemError
from flashpoint_contract.spec import Row, Spec
from flashpoint_contract.tensors import TENSORS


def consecutive(rows: Sequence[Row]) -> bool:
    """Return whether sequences of equal lengths are adjacent in memory, so that one view contains them."""
    return rows[-1].index - rows[0].index == len(rows) - 1


def _span(name: str, row: Row) -> tuple[int, int]:
    """Return the first row and the number of valid rows of a sequence in the canonical view of a tensor."""
    return (row.kv_start, row.kv_len) if TENSORS[name].of_keys else (row.q_start, row.q_len)


def viewed(name: str, view: Tensor, rows: Sequence[Row]) -> Tensor:
    """Return a view (n, …) of consecutive sequences."""
    row, count = rows[0], len(rows)
    if TENSORS[name].per_head:
        return view if view.ndim == 1 or len(view) == 1 else view.narrow(0, row.index, count)
    start, length = _span(name, row)
    if view.shape[0] > 1 or row.batch != rows[-1].batch:
        view = view.narrow(0, row.batch, count)
    elif count > 1:  # packed: (1, H, n·length, …) becomes (n, H, length, …)
        return parted(view[0].narrow(1, start, count * length), 1, (count, length)).transpose(0, 1)
    return view if length == view.shape[2] else view.narrow(2, start, length)


def gathered(name: str, view: Tensor, rows: Sequence[Row]) -> Tensor:
    """Return a copy (n, …) of sequences of equal lengths that need not be adjacent in memory."""
    if TENSORS[name].per_head:
        index = torch.tensor([row.index for row in rows], dtype=torch.int64, device=view.device)
        return view if view.ndim == 1 else view.index_select(0, index)
    start, length = _span(name, rows[0])
    if rows[0].batch != rows[-1].batch:
        valid = view.narrow(2, start, length)
        return valid.index_select(0, torch.tensor([row.batch for row in rows], dtype=torch.int64, device=view.device))
    return parted(view[0].index_select(1, _positions(name, view, rows)), 1, (len(rows), length)).transpose(0, 1)


def scatter(name: str, view: Tensor, rows: Sequence[Row], answer: Tensor) -> None:
    """Write a result back to the rows from which `gathered` copied."""
    start, length = _span(name, rows[0])
    if rows[0].batch != rows[-1].batch:
        index = torch.tensor([row.batch for row in rows], dtype=torch.int64, device=view.device)
        view.narrow(2, start, length).index_copy_(0, index, answer.to(view.dtype))
    else:
        view[0].index_copy_(1, _positions(name, view, rows), answer.transpose(0, 1).flatten(1, 2))


def _positions(name: str, view: Tensor, rows: Sequence[Row]) -> Tensor:
    """Return the rows of sequences of equal lengths in a packed tensor, one sequence after another."""
    starts = torch.tensor([_span(name, row)[0] for row in rows], dtype=torch.int64, device=view.device)
    return (starts[:, None] + torch.arange(_span(name, rows[0])[1], dtype=torch.int64, device=view.device)).flatten()


def parted(t: Tensor, dim: int, sizes: tuple[int, int]) -> Tensor:
    """Return a view of `t` with one dimension split into two, where the first of the two is outer."""
    return t.view(*t.shape[:dim], *sizes, *t.shape[dim + 1 :])


def of_mask(mask: Tensor, rows: Sequence[Row], first: int) -> Tensor:
    """Return the part of a mask for some sequences; the mask starts at sequence `first`.

    A shared mask is returned whole.
    """
    if mask.shape[0] == 1:
        return mask
    if consecutive(rows):
        return mask.narrow(0, rows[0].batch - first, len(rows))
    return mask.index_select(
        0, torch.tensor([row.batch - first for row in rows], dtype=torch.int64, device=mask.device)
    )


def check_pages(spec: Spec, rows: Sequence[Row], table: Tensor) -> None:
    """Raise ProblemError if a page number that is read is out of range.

    A `table` that is not on the CPU is not checked, because this would wait for the device. Backends then never read
    outside the pool, and the answers of sequences with wrong page numbers are undefined.
    """
    if spec.pool == 0 and any(row.kv_len for row in rows):
        raise ProblemError([("block_table", "contains a page number, but k and v have no pages")])
    if table.device.type != "cpu":
        return
    pages = torch.tensor([_pages(spec, row) for row in rows], dtype=torch.int64, device="cpu")
    read = pages[:, None] > torch.arange(table.shape[1], dtype=torch.int64, device="cpu")
    wrong = ((table < 0) | (table >= spec.pool)) & read
    if wrong.any():
        sequence, place = wrong.nonzero()[0].tolist()
        number = int(table[sequence, place])
        raise ProblemError(
            [("block_table", f"[{sequence}, {place}] is page {number}, but k has {spec.pool} pages, from 0")]
        )


def gathered_pages(spec: Spec, view: Tensor, table: Tensor, rows: Sequence[Row]) -> Tensor:
    """Copy the keys of sequences of equal lengths, (n,Hk,sk,…), out of canonical pages (pool,Hk,page_size,…).

    From `table`, only the page numbers of these keys are read.
    """
    count, length = _pages(spec, rows[0]), rows[0].kv_len
    index = torch.tensor([row.index for row in rows], dtype=torch.int64, device=table.device)
    numbers = table.index_select(0, index)[:, :count].flatten()
    if table.device.type != "cpu":  # page numbers on a device were not checked
        numbers = numbers.clamp(0, max(spec.pool - 1, 0))
    pages = view.transpose(1, 2).index_select(0, numbers)
    together = pages.view(len(rows), count * spec.page_size, *pages.shape[2:])
    return together.transpose(1, 2)[:, :, :length]


def _pages(spec: Spec, row: Row) -> int:
    """Return the number of pages that contain a sequence's keys."""
    return -(-row.kv_len // spec.page_size)
