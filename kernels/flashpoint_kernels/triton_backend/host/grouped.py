"""Launch problems together: make their joint table, upload it, and make the calls of kernels that read it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashpoint_kernels.problems.problem import Problem
from flashpoint_kernels.triton_backend.host.calls import Call, Code
from flashpoint_kernels.triton_backend.host.config import exact, parts_of, takes_hopper
from flashpoint_kernels.triton_backend.host.configurations import Config
from flashpoint_kernels.triton_backend.host.route import Route, config_of, route_of
from flashpoint_kernels.triton_backend.host.schedule import forward_lists
from flashpoint_kernels.triton_backend.host.stored import Pieces
from flashpoint_kernels.triton_backend.host.table import SHAPE, Table
from flashpoint_kernels.triton_backend.kernels import columns

_ALIGNMENT = 16  # bytes: the alignment that kernels are compiled for
_DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.float32): torch.float32}


class Upload:
    """Arrays that a launch reads, copied to its device together when the first is requested, from pinned memory.

    Arrays that are added later are copied later. This object keeps the copies in pinned memory and on the device.
    Kernels that run again read the same addresses and copy nothing, so a CUDA graph can capture a launch that has run
    once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: list[np.ndarray] = []
        self._views: list[Tensor] = []
        self._kept: list[Tensor] = []

    def add(self, array: np.ndarray) -> int:
        """Add a contiguous array, and return its index for `view`."""
        self._waiting.append(array)
        return len(self._views) + len(self._waiting) - 1

    def view(self, number: int) -> Tensor:
        """Return an array on the device, as one dimension."""
        if number >= len(self._views):
            self._copy()
        return self._views[number]

    def _copy(self) -> None:
        words = [-(-array.nbytes // _ALIGNMENT) * (_ALIGNMENT // 4) for array in self._waiting]
        host = torch.empty(sum(words), dtype=torch.int32, device="cpu", pin_memory=self._device.type == "cuda")
        there = host if self._device.type == "cpu" else torch.empty_like(host, device=self._device)
        numbers, start, of_dtype = host.numpy(), 0, {np.dtype(np.int32): there}
        for array, count in zip(self._waiting, words, strict=True):
            numbers[start : start + array.nbytes // 4] = array.reshape(-1).view(np.int32)
            view = of_dtype.get(array.dtype)
            if view is None:
                view = of_dtype.setdefault(array.dtype, there.view(_DTYPES[array.dtype]))
            first = start * 4 // array.itemsize
            self._views.append(view[first : first + array.size])
            start += count
        if there is not host:
            there.copy_(host, non_blocking=True)
        self._kept += [host, there]
        self._waiting.clear()


class Launch:
    """Problems that run together: their route, their joint table, and the arrays that their kernels read."""

    def __init__(self, route: Route, problems: list[Problem], tables: list[Table]) -> None:
        self.route, self.problems = route, problems
        self.device, self.dims, self.config = route.device, route.dims, route.config
        self.ints = tables[0].ints if len(tables) == 1 else np.concatenate([t.ints for t in tables])
        self.shapes = self.ints[:, SHAPE]
        self._alive = tables
        self.first_row = [0, *accumulate(len(t.ints) for t in tables)]
        self.heads = max([p.spec.q_heads for p in problems])
        self.kv_heads = max([p.spec.kv_heads for p in problems])
        self.upload = Upload(self.device)
        self.pieces: Pieces | None = None

    @cached_property
    def _tables(self) -> tuple[int, int]:
        """Return the upload's indices of the joint table's integers and of its floats."""
        if self.problems[0].spec.direction == "backward":
            self.stats = self.place_stats(self.ints)
        ints, floats = self.ints, self.scalars
        if self.pieces is not None:
            ints, floats = np.concatenate([ints, self.pieces.table(ints)]), floats[self.pieces.of_table]
        return self.upload.add(ints), self.upload.add(floats)

    @property
    def scalars(self) -> np.ndarray:
        """Return the floats of the joint table."""
        floats = [t.floats for t in self._alive]
        return floats[0] if len(floats) == 1 else np.concatenate(floats)

    def column(self, column: Any, after: int = 0) -> np.ndarray:
        """Return column `column` + `after` of the joint table's integers."""
        numbers: np.ndarray = self.ints[:, column.value + after]
        return numbers

    @property
    def table(self) -> Tensor:
        return self.upload.view(self._tables[0])

    @property
    def floats(self) -> Tensor:
        return self.upload.view(self._tables[1])

    def items(self, number: int) -> Tensor:
        """Return a work list on the device. Add the table to the upload first, so that one copy transfers both."""
        _ = self._tables
        return self.upload.view(number)

    def place_stats(self, ints: np.ndarray) -> Tensor:
        """Allocate memory for the output of `attention_delta`, and write its addresses into the table.

        The memory has two rows per head: lse and delta. Each sequence has its own whole blocks of queries in it, so
        kernels load and store a block without a mask.
        """
        block = self.config.delta.block_m
        rows = -(-ints[:, columns.Q_ROWS.value] // block) * block
        sizes = 2 * rows * ints[:, columns.HEADS.value]
        ends = np.cumsum(sizes)
        stats = self.scratch(int(ends[-1]))
        ints[:, columns.STATS.value] = stats.data_ptr() + stats.element_size() * (ends - sizes)
        ints[:, columns.STATS.value + 1] = 2 * rows
        return stats

    def scratch(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.float32, device=self.device)

    def call(
        self, code: Code, items: np.ndarray, heads: int, args: Callable[[Tensor], tuple[Any, ...]],
        most_programs: int | None = None,
    ) -> Call:  # fmt: skip
        """Return a call with one program per item and head, at most `most_programs`.

        `args` returns the kernel's arguments for a tensor of the items on the device.
        """
        number = self.upload.add(items)
        programs = len(items) * heads
        return Call(
            code, programs if most_programs is None else min(programs, most_programs), lambda: args(self.items(number))
        )


def launches(
    problems: Sequence[Problem], extras: Iterable[dict[str, Tensor]], tiles: Config | None
) -> Iterator[Launch]:
    """Group problems by route, and yield a launch for each group.

    A problem's route does not depend on the other problems, so they never change which kernels compute it.
    """
    groups: dict[Route, tuple[list[Problem], list[Table]]] = {}
    for problem, extra in zip(problems, extras, strict=True):
        if not problem.rows:  # an empty batch has no program; `prepare` writes zeros to its dattn_mask and dsinks
            continue
        made = Table(problem, extra)
        route = route_of(problem, made.aligned, _goes_hopper(problem, made), tiles)
        group = groups.setdefault(route, ([], []))
        group[0].append(problem)
        group[1].append(made)
    for route, (members, tables) in groups.items():
        yield Launch(route, members, tables)


def _goes_hopper(problem: Problem, table: Table) -> bool:
    """Return whether a problem uses the path for Hopper.

    Only the problem itself decides, not the other problems of the launch.
    """
    if not takes_hopper(problem.device):
        return False
    spec = problem.spec
    in_parts = exact(spec.head_dim, spec.value_dim) and parts_of(spec.head_dim)[1] > 0
    if spec.level > 0 or spec.dtype == "float32" or "wide_head_dim" in spec.features or spec.has("block_mask"):
        return False
    if (in_parts and spec.value_dim <= 128) or not table.describable:
        return False
    work = forward_lists(table.ints[:, SHAPE], config_of(problem, hopper=True))
    return bool(work) and work[0].rows == 0 and not work[0].slots
