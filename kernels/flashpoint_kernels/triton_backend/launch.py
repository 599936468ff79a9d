"""Launches: any mix of problems that share a launch key, in one grouped launch a kernel."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from flashpoint_kernels.problem import Problem
from flashpoint_kernels.support import launch_key
from flashpoint_kernels.triton_backend import table as columns
from flashpoint_kernels.triton_backend.backward import attention_backward_kv, attention_backward_q, attention_delta
from flashpoint_kernels.triton_backend.backward_inputs import attention_backward_mask, attention_backward_sinks
from flashpoint_kernels.triton_backend.config import Config, config_for, padded
from flashpoint_kernels.triton_backend.forward import attention_forward, merge_parts
from flashpoint_kernels.triton_backend.interpret import INTERPRETED
from flashpoint_kernels.triton_backend.schedule import (
    Shape,
    assign_slots,
    forward_parts,
    key_parts,
    mask_parts,
    query_parts,
    work_list,
)
from flashpoint_kernels.triton_backend.table import Table

_TYPES = {
    "bool": tl.int8,
    "float16": tl.float16,
    "bfloat16": tl.bfloat16,
    "float32": tl.float32,
    "float64": tl.float64,
}


@dataclass(eq=False)
class Launch:
    """Problems that run together: their joint table on the device, the variant's constants, and the tiles."""

    problems: list[Problem]
    shapes: list[Shape]
    first_row: list[int]
    table: Tensor
    floats: Tensor
    alive: list[Tensor]
    heads: int
    kv_heads: int
    variant: dict[str, Any]
    config: Config

    @classmethod
    def of(cls, problems: list[Problem], tables: list[Table]) -> Launch:
        spec = problems[0].spec
        device = problems[0].device
        ints = np.concatenate([t.ints for t in tables])
        at = [
            columns.Q_LEN,
            columns.Q_ROWS,
            columns.KV_LEN,
            columns.KV_ROWS,
            columns.OFFSET,
            columns.LEFT,
            columns.RIGHT,
        ]
        block_d, block_dv = padded(spec.head_dim), padded(spec.value_dim)
        mask = spec.tensors["attn_mask"].dtype if spec.has("attn_mask") else None
        return cls(
            problems=problems,
            shapes=[Shape(*row) for row in ints[:, [column.value for column in at]].tolist()],
            first_row=np.cumsum([0, *(len(t.ints) for t in tables)]).tolist(),
            table=_to(ints, device),
            floats=_to(np.concatenate([t.floats for t in tables]), device),
            alive=[tensor for t in tables for tensor in t.alive],
            heads=max(p.spec.q_heads for p in problems),
            kv_heads=max(p.spec.kv_heads for p in problems),
            variant={
                "LEVEL": spec.level,
                "DTYPE": _TYPES[spec.dtype],
                "MASK_DTYPE": mask and _TYPES["float32" if mask == "float64" else mask],
                "PRECISION": spec.options.precision,
                "ALIGNED": tables[0].aligned,
                "BLOCK_D": block_d,
                "BLOCK_DV": block_dv,
                "EVEN": (block_d, block_dv) == (spec.head_dim, spec.value_dim),
            },
            config=config_for(device, spec.dtype, spec.head_dim, spec.value_dim, spec.level),
        )

    @property
    def device(self) -> torch.device:
        return self.problems[0].device

    @property
    def dims(self) -> tuple[int, int]:
        return self.problems[0].spec.head_dim, self.problems[0].spec.value_dim

    def constants(self, *names: str) -> dict[str, Any]:
        return {name: self.variant[name] for name in names}


def forward(problems: Sequence[Problem]) -> None:
    """Write `o` and, where asked, `lse` of every problem. All share one launch key."""
    for launch in _launches(problems, [{} for _ in problems]):
        config = launch.config
        items = work_list(launch.shapes, partial(forward_parts, config=config))
        merges, slots = assign_slots(items)
        block_m, block_dv = config.forward.block_m, launch.variant["BLOCK_DV"]
        part_o = torch.empty(slots * launch.heads * block_m * block_dv, dtype=torch.float32, device=launch.device)
        part_lse = torch.empty(slots * launch.heads * block_m, dtype=torch.float32, device=launch.device)
        _run(attention_forward, len(items) * launch.heads, config.forward)(
            launch.table, launch.floats, _to(items, launch.device), part_o, part_lse, launch.heads, *launch.dims,
            BLOCK_M=block_m, BLOCK_N=config.forward.block_n, **launch.variant,
        )  # fmt: skip
        _run(merge_parts, len(merges) * launch.heads, config.forward)(
            launch.table, _to(merges, launch.device), part_o, part_lse, launch.heads, launch.dims[1],
            BLOCK_M=block_m, **launch.constants("DTYPE", "ALIGNED", "BLOCK_DV", "EVEN"),
        )  # fmt: skip


def backward(problems: Sequence[Problem]) -> None:
    """Write the gradients asked of every problem, from its `o` and `lse`. All share one launch key."""
    scratch = []
    for problem in problems:
        n, heads, length = problem.view("lse").shape
        # Two rows a head, see attention_delta: lse in base 2, and delta.
        extra = {"stats": torch.empty((n, heads, 2, length), dtype=torch.float32, device=problem.device)}
        if "dsinks" in problem.outputs:
            extra["dsinks"] = torch.zeros(problem.spec.q_heads, dtype=torch.float32, device=problem.device)
        scratch.append(extra)
    for launch in _launches(problems, scratch):
        config, variant = launch.config, launch.variant
        q_items = work_list(launch.shapes, partial(query_parts, tile=config.backward_q))
        q_list = _to(q_items, launch.device)
        _run(attention_delta, len(q_items) * launch.heads, config.backward_q)(
            launch.table, q_list, launch.heads, launch.dims[1], BLOCK_M=config.backward_q.block_m,
            **launch.constants("DTYPE", "ALIGNED", "BLOCK_DV", "EVEN"),
        )  # fmt: skip
        if wanted := _rows_with(launch, "dk", "dv"):
            kv_items = work_list(launch.shapes, partial(key_parts, tile=config.backward_kv))
            kv_items = kv_items[np.isin(kv_items[:, 0], wanted)]
            _run(attention_backward_kv, len(kv_items) * launch.kv_heads, config.backward_kv)(
                launch.table, launch.floats, _to(kv_items, launch.device), launch.kv_heads, *launch.dims,
                BLOCK_M=config.backward_kv.block_m, BLOCK_N=config.backward_kv.block_n, **variant,
            )  # fmt: skip
        if wanted := _rows_with(launch, "dq"):
            q_items = q_items[np.isin(q_items[:, 0], wanted)]
            _run(attention_backward_q, len(q_items) * launch.heads, config.backward_q)(
                launch.table, launch.floats, _to(q_items, launch.device), launch.heads, *launch.dims,
                BLOCK_M=config.backward_q.block_m, BLOCK_N=config.backward_q.block_n, **variant,
            )  # fmt: skip
        _backward_masks(launch)
        _backward_sinks(launch)
    for problem, extra in zip(problems, scratch, strict=True):
        if "dsinks" in extra:
            problem.outputs["dsinks"].copy_(extra["dsinks"])


def _backward_masks(launch: Launch) -> None:
    """dattn_mask of the problems that ask it, a launch for each dtype of theirs (one, but for float64 masks)."""
    tile = launch.config.backward_q
    items: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for problem, first in zip(launch.problems, launch.first_row, strict=False):
        if "dattn_mask" not in problem.outputs:
            continue
        spec = problem.spec
        problem.outputs["dattn_mask"].zero_()  # where there is no query or no key there is no program
        view = problem.view("dattn_mask")
        own = [n if stride else 1 for n, stride in zip(view.shape, view.stride(), strict=True)]
        if problem.rows:
            items[spec.tensors["attn_mask"].dtype] += [
                (first + b, *rest)
                for b, *rest in mask_parts(own, spec.q_len, spec.kv_len, spec.batch, spec.q_heads, tile)
            ]
    for dtype, listed in items.items():
        _run(attention_backward_mask, len(listed), tile)(
            launch.table, launch.floats, _to(np.array(listed, np.int32), launch.device), *launch.dims,
            DMASK_DTYPE=_TYPES[dtype], BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            **launch.constants("DTYPE", "MASK_DTYPE", "PRECISION", "ALIGNED", "BLOCK_D", "BLOCK_DV", "EVEN"),
        )  # fmt: skip


def _backward_sinks(launch: Launch) -> None:
    items = [
        (first, len(problem.rows))
        for problem, first in zip(launch.problems, launch.first_row, strict=False)
        if "dsinks" in problem.outputs
    ]
    tile = launch.config.backward_q
    _run(attention_backward_sinks, len(items) * launch.heads, tile)(
        launch.table, _to(np.array(items, np.int32).reshape(-1, 2), launch.device), launch.heads, BLOCK_M=tile.block_m
    )


def _rows_with(launch: Launch, *names: str) -> list[int]:
    """Table rows of the problems that ask any of these gradients."""
    return [
        row
        for problem, first in zip(launch.problems, launch.first_row, strict=False)
        if any(name in problem.outputs for name in names)
        for row in range(first, first + len(problem.rows))
    ]


def _launches(problems: Sequence[Problem], extras: Iterable[dict[str, Tensor]]) -> Iterator[Launch]:
    """Problems grouped by the compiled variant that each needs by itself, so that neighbours never change a variant."""
    groups: dict[Any, tuple[list[Problem], list[Table]]] = {}
    for problem, extra in zip(problems, extras, strict=True):
        if not problem.rows:  # an empty batch: no program, and sums over nothing
            problem.clear_outputs()
            continue
        made = Table.of(problem, extra)
        group = groups.setdefault((launch_key(problem.spec, "triton"), made.aligned), ([], []))
        group[0].append(problem)
        group[1].append(made)
    for members, tables in groups.values():
        with torch.cuda.device(members[0].device) if members[0].device.type == "cuda" else contextlib.nullcontext():
            yield Launch.of(members, tables)


def _to(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


def _run(kernel: Any, programs: int, tile: Any) -> Any:
    """The kernel, ready to be called with its arguments; nothing is launched where there is no program."""

    def call(*args: Any, **constants: Any) -> None:
        if programs == 0:
            return
        # NumPy warns of what a GPU does silently (−inf arithmetic, overflow of garbage that is masked after).
        with np.errstate(all="ignore") if INTERPRETED else contextlib.nullcontext():
            kernel[(programs,)](*args, **constants, num_warps=tile.num_warps, num_stages=tile.num_stages)

    return call
