"""Group the rows of a benchmark into families. The rows of a family share a panel: see `Family`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from flashpoint_contract.schemas.benchmark import BenchmarkRow

Rows = Sequence[BenchmarkRow]


class Family(NamedTuple):
    """The values that the rows of a panel share. The batch may differ if each length has one batch."""

    dtype: str
    head_dim: int
    value_dim: int
    q_heads: int
    kv_heads: int
    causal: bool
    direction: str
    queries: int  # 0 if the rows have as many queries as keys
    batch: int  # 0 if the rows have different values
    length: int  # 0 if the rows have different values

    def __str__(self) -> str:
        """Return two lines: direction, mask and dtype; then the sizes."""
        sizes = [
            f"B {self.batch}" if self.batch else "",
            f"H {self.q_heads}" + (f"/{self.kv_heads}" if self.kv_heads != self.q_heads else ""),
            self._lengths(),
            f"D {self.head_dim}" + (f"/{self.value_dim}" if self.value_dim != self.head_dim else ""),
        ]
        what = f"{self.direction}{', causal' if self.causal else ''} · {self.dtype}"
        return f"{what}\n{' '.join(size for size in sizes if size)}"

    def _lengths(self) -> str:
        if not self.queries:
            return f"N {self.length}" if self.length else ""
        return f"N {self.queries}/{self.length or '…'}"


def families(rows: Rows) -> dict[Family, list[BenchmarkRow]]:
    """Return the rows of each family, in the order of `rows`. No family is empty."""
    by_family: dict[Family, list[BenchmarkRow]] = {}
    for row in rows:
        by_family.setdefault(_family(row), []).append(row)
    parts = [(family, part) for family, members in by_family.items() for part in _apart(members)]
    return {family._replace(batch=_same(row.batch for row in part), length=_same(row.kv_len for row in part)): part
            for family, part in parts}  # fmt: skip


def _family(row: BenchmarkRow) -> Family:
    return Family(
        dtype=row.dtype, head_dim=row.head_dim, value_dim=row.value_dim, q_heads=row.q_heads, kv_heads=row.kv_heads,
        causal=row.causal, direction=row.direction, queries=0 if row.q_len == row.kv_len else row.q_len,
        batch=0, length=0,
    )  # fmt: skip


def _apart(rows: list[BenchmarkRow]) -> list[list[BenchmarkRow]]:
    """Split rows by batch if a length has several batches."""
    if len({row.kv_len for row in rows}) == len({(row.kv_len, row.batch) for row in rows}):
        return [rows]
    return [[row for row in rows if row.batch == batch] for batch in dict.fromkeys(row.batch for row in rows)]


def _same(values: Iterable[int]) -> int:
    """Return the common value; 0 if the values differ."""
    every = set(values)
    return every.pop() if len(every) == 1 else 0
