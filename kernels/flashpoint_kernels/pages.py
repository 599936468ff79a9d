"""Keys and values in pages: the pages that a problem names, and the rows of some of its sequences, brought together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashpoint_contract.options import ProblemError
from flashpoint_contract.spec import Row, Spec


def check(spec: Spec, rows: Sequence[Row], table: Tensor) -> None:
    """Refuse numbers beyond the pool, among those that are read. Raises ProblemError.

    A `table` on another device than the CPU is not looked at, which would wait for the device: backends then read
    nothing beyond the pool, and the answer of such a sequence is any.
    """
    if spec.pool == 0 and any(row.kv_len for row in rows):
        raise ProblemError([("block_table", "names a page where k and v have none")])
    if table.device.type != "cpu":
        return
    read = torch.tensor([_count(spec, row) for row in rows])[:, None] > torch.arange(table.shape[1])
    wrong = ((table < 0) | (table >= spec.pool)) & read
    if wrong.any():
        sequence, place = wrong.nonzero()[0].tolist()
        number = int(table[sequence, place])
        raise ProblemError(
            [("block_table", f"[{sequence}, {place}] is page {number}: the {spec.pool} pages of k count from 0")]
        )


def gathered(spec: Spec, view: Tensor, table: Tensor, rows: Sequence[Row]) -> Tensor:
    """Return a copy of the keys of sequences of equal lengths, (n,Hk,sk,…), from canonical pages (pool,Hk,page_size,…).

    Only the page numbers of those keys are read from `table`.
    """
    count, length = _count(spec, rows[0]), rows[0].kv_len
    index = torch.tensor([row.index for row in rows], device=table.device)
    numbers = table.index_select(0, index)[:, :count].flatten()
    if table.device.type != "cpu":  # where nobody has looked at them
        numbers = numbers.clamp(0, max(spec.pool - 1, 0))
    pages = view.transpose(1, 2).index_select(0, numbers)
    together = pages.view(len(rows), count * spec.page_size, *pages.shape[2:])
    return together.transpose(1, 2)[:, :, :length]


def _count(spec: Spec, row: Row) -> int:
    """The pages that hold a sequence's keys."""
    return -(-row.kv_len // spec.page_size)
