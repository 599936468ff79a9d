"""Keys and values in pages: check a block table, and copy the rows of sequences out of their pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashpoint_contract.options import ProblemError
from flashpoint_contract.spec import Row, Spec


def check(spec: Spec, rows: Sequence[Row], table: Tensor) -> None:
    """Raise ProblemError if a page number that is read is out of range.

    A `table` that is not on the CPU is not checked, because this would wait for the device. Backends then never read
    outside the pool, and the answers of sequences with wrong page numbers are undefined.
    """
    if spec.pool == 0 and any(row.kv_len for row in rows):
        raise ProblemError([("block_table", "contains a page number, but k and v have no pages")])
    if table.device.type != "cpu":
        return
    read = torch.tensor([_count(spec, row) for row in rows])[:, None] > torch.arange(table.shape[1])
    wrong = ((table < 0) | (table >= spec.pool)) & read
    if wrong.any():
        sequence, place = wrong.nonzero()[0].tolist()
        number = int(table[sequence, place])
        raise ProblemError(
            [("block_table", f"[{sequence}, {place}] is page {number}, but k has {spec.pool} pages, from 0")]
        )


def gathered(spec: Spec, view: Tensor, table: Tensor, rows: Sequence[Row]) -> Tensor:
    """Copy the keys of sequences of equal lengths, (n,Hk,sk,…), out of canonical pages (pool,Hk,page_size,…).

    From `table`, only the page numbers of these keys are read.
    """
    count, length = _count(spec, rows[0]), rows[0].kv_len
    index = torch.tensor([row.index for row in rows], device=table.device)
    numbers = table.index_select(0, index)[:, :count].flatten()
    if table.device.type != "cpu":  # these were not checked
        numbers = numbers.clamp(0, max(spec.pool - 1, 0))
    pages = view.transpose(1, 2).index_select(0, numbers)
    together = pages.view(len(rows), count * spec.page_size, *pages.shape[2:])
    return together.transpose(1, 2)[:, :, :length]


def _count(spec: Spec, row: Row) -> int:
    """Return the number of pages with a sequence's keys."""
    return -(-row.kv_len // spec.page_size)
