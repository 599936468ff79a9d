"""Launches: any mix of problems with the same launch key, in one grouped launch per kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from flashpoint_kernels.problem import Problem, launch_key, with_forwards
from flashpoint_kernels.triton_backend import lists
from flashpoint_kernels.triton_backend import table as columns
from flashpoint_kernels.triton_backend.backward import attention_backward_kv, attention_backward_q, attention_delta
from flashpoint_kernels.triton_backend.backward_inputs import attention_backward_mask, attention_backward_sinks
from flashpoint_kernels.triton_backend.calls import Call, start_compiling
from flashpoint_kernels.triton_backend.config import (
    chip_of,
    config_for,
    exact,
    hopper_tiles,
    keys_of_device,
    padded,
    parts_of,
    takes_hopper,
)
from flashpoint_kernels.triton_backend.configurations import Config, Tile
from flashpoint_kernels.triton_backend.forward import attention_forward, merge_parts
from flashpoint_kernels.triton_backend.groups import Constants
from flashpoint_kernels.triton_backend.schedule import (
    Cut,
    Shape,
    forward_list,
    forward_parts,
    gradient_parts,
    key_parts,
    mask_parts,
    query_parts,
    work_list,
)
from flashpoint_kernels.triton_backend.table import Table
from flashpoint_kernels.triton_backend.upload import Upload

_TYPES = {
    "bool": tl.int8,
    "float16": tl.float16,
    "bfloat16": tl.bfloat16,
    "float32": tl.float32,
    "float64": tl.float64,
}

# A program keeps its descriptors at an offset of 512 bytes times its number; Triton before 3.9 computes it in int32.
PROGRAMS_OF_HOPPER = 2**31 // 512

_SHAPE = [
    column.value
    for column in (
        columns.Q_LEN, columns.Q_ROWS, columns.KV_LEN, columns.KV_ROWS, columns.OFFSET, columns.LEFT, columns.RIGHT,
        columns.GROUP,
    )
]  # fmt: skip


@dataclass(eq=False)
class Launch:
    """Problems that run together: their joint table, their common constants, and the tiles."""

    problems: list[Problem]
    tables: list[Table]
    hopper: bool
    config: Config

    def __post_init__(self) -> None:
        self.shapes = tuple(shape for t in self.tables for shape in _shapes(t))
        self.first_row = np.cumsum([0, *(len(t.ints) for t in self.tables)]).tolist()
        self.heads = max(p.spec.q_heads for p in self.problems)
        self.kv_heads = max(p.spec.kv_heads for p in self.problems)
        self.upload = Upload(self.device)

    @cached_property
    def shared(self) -> Constants:
        """Return the constants of all kernels, except those of their tiles."""
        spec = self.problems[0].spec
        mask = spec.tensors["attn_mask"].dtype if spec.has("attn_mask") else None
        block_d, block_dv = padded(spec.head_dim), padded(spec.value_dim)
        return Constants(
            LEVEL=spec.level,
            DTYPE=_TYPES[spec.dtype],
            MASK_DTYPE=mask and _TYPES["float32" if mask == "float64" else mask],
            TF32=spec.dtype == "float32" and spec.options.precision == "tf32",
            ALIGNED=self.tables[0].aligned,
            BLOCK_D=block_d,
            BLOCK_DV=block_dv,
            EVEN=(block_d, block_dv) == (spec.head_dim, spec.value_dim),
            PAGED=spec.paged,
            KEYS=keys_of_device(spec, self.device),
            BLOCKS=spec.has("block_mask"),
        )

    @cached_property
    def _tables(self) -> tuple[int, int]:
        """Return the numbers in the upload of the joint table's integers and floats."""
        ints = np.concatenate([t.ints for t in self.tables])
        if self.problems[0].spec.direction == "backward":
            self.stats = self.place_stats(ints)
        return self.upload.add(ints), self.upload.add(np.concatenate([t.floats for t in self.tables]))

    def column(self, column: Any, after: int = 0) -> np.ndarray:
        """Return a column of the joint table, or the column at `after` places behind it."""
        return np.concatenate([t.ints[:, column.value + after] for t in self.tables])

    @property
    def table(self) -> Tensor:
        return self.upload.view(self._tables[0])

    @property
    def floats(self) -> Tensor:
        return self.upload.view(self._tables[1])

    def items(self, number: int) -> Tensor:
        """Return a work list on the device. The table is added to the upload first, so one copy transfers both."""
        _ = self._tables
        return self.upload.view(number)

    @property
    def device(self) -> torch.device:
        return self.problems[0].device

    @property
    def dims(self) -> tuple[int, int]:
        return self.problems[0].spec.head_dim, self.problems[0].spec.value_dim

    def place_stats(self, ints: np.ndarray) -> Tensor:
        """Allocate memory for the output of `attention_delta`, two rows per head, and write its addresses into the
        table.

        In every layout a sequence has its own whole blocks of queries, so a block is loaded and stored without a mask.
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
        self, kernel: Any, items: np.ndarray, heads: int, tile: Tile, args: Callable[[Tensor], tuple[Any, ...]],
        *names: str, most: int | None = None, **constants: Any,
    ) -> Call:  # fmt: skip
        """Return a call with one program per item and head, at most `most`. `args` makes the arguments from the
        device's items.

        `names` are the names of constants in `shared`.
        """
        chosen = Constants(**{name: getattr(self.shared, name) for name in names}, **constants)
        number = self.upload.add(items)
        programs = min(len(items) * heads, len(items) * heads if most is None else most)
        return Call(kernel, programs, tile, self.device, lambda: args(self.items(number)), chosen)


_OF_HOPPER = ("LEVEL", "DTYPE", "ALIGNED", "BLOCK_D", "BLOCK_DV", "EVEN")
_ALL = ("LEVEL", "DTYPE", "MASK_DTYPE", "TF32", "ALIGNED", "BLOCK_D", "BLOCK_DV", "EVEN", "BLOCKS")
_FORWARD = ("LEVEL", "DTYPE", "MASK_DTYPE", "TF32", "ALIGNED", "BLOCK_DV", "PAGED", "KEYS", "BLOCKS")
_VALUES = ("DTYPE", "ALIGNED", "BLOCK_DV", "EVEN")


def forward(problems: Sequence[Problem]) -> None:
    """Write `o` and, if requested, `lse` of every problem. All problems have the same launch key."""
    prepare(problems)()


def backward(problems: Sequence[Problem]) -> None:
    """Write the requested gradients of every problem, from its `o` and `lse`. All problems have the same launch key."""
    prepare(problems)()


def prepare(problems: Sequence[Problem]) -> Callable[[], None]:
    """Return a function that runs the problems and writes their outputs. The problems have one direction and launch
    key.

    The function can be called again with other numbers in the same memory: tensors, outputs, page numbers and scales.
    It does not see new lengths, which are read here, nor new values of tensors that are copied here: masks in float64,
    tensors whose rows are not contiguous, and per-head numbers, lse and scales that are not float32. From the second
    call on it copies nothing from the host, so a CUDA graph can capture it. A gradient needs `o` and `lse`.
    """
    if problems and problems[0].spec.direction == "forward":
        calls = list(forward_calls(problems))
        return lambda: _run(calls)
    scratch = [scratch_of(problem) for problem in problems]
    calls = list(backward_calls(problems, scratch))
    empty = [problem.outputs["dattn_mask"] for problem in problems if "dattn_mask" in problem.outputs]

    def run() -> None:
        for gradient in empty:
            gradient.zero_()  # without queries or keys there is no program that writes it
        _run(calls)
        for problem, extra in zip(problems, scratch, strict=True):
            if "dsinks" in extra:
                problem.outputs["dsinks"].copy_(extra["dsinks"])

    return run


def _run(calls: Iterable[Call]) -> None:
    for call in calls:
        call.run()


def compiled(problems: Sequence[Problem]) -> bool:
    """Return whether this process has compiled every kernel of `run(problems, "triton")`. True when interpreting.

    The problems have one direction and one launch key. Nothing is sent to the device.
    """
    return all(call.compiled for call in _calls(problems))


def compile_ahead(problems: Sequence[Problem]) -> Future[None]:
    """Compile in a thread what `run(problems, "triton")` needs; when it is done, `compiled(problems)` is true.

    Nothing is launched, and no output is written. The future raises Triton's errors. Triton's disk cache
    (TRITON_CACHE_DIR) is shared: kernels that another process has compiled are loaded from it.
    """
    return start_compiling(lambda: _calls(problems))


def _calls(problems: Sequence[Problem]) -> Iterator[Call]:
    if problems[0].spec.direction == "forward":
        yield from forward_calls(problems)
        return
    forwards, whole = with_forwards(problems)
    yield from forward_calls(forwards)
    yield from backward_calls(whole, [scratch_of(problem) for problem in whole])


def forward_calls(problems: Sequence[Problem], tiles: Config | None = None) -> Iterator[Call]:
    """Yield the calls of `forward`, in order. benchmarks/gpu.py passes `tiles` that are not in the device's table."""
    for launch in _launches(problems, [{} for _ in problems], tiles):
        if launch.hopper:
            yield _forward_hopper(launch)
        else:
            yield from _forward_blocks(launch, 0)
        for rows in launch.config.packed_rows:
            yield from _forward_blocks(launch, rows)


def _forward_blocks(launch: Launch, rows: int) -> Iterator[Call]:
    """Yield the forward's calls for sequences with packed blocks of `rows` rows, or with 0, with blocks of one head."""
    tile = launch.config.forward_of(rows)
    block_d, block_rest = parts_of(launch.dims[0])
    items, merges, slots = forward_list(launch.shapes, Cut(launch.config, rows))
    heads, block_dv = launch.kv_heads if rows else launch.heads, padded(launch.dims[1])
    make = partial(lists.of_queries, launch, items, tile, rows > 0, items[:, 2:4])
    items, listed = yield from _listed(launch, items, make)

    @cache
    def parts() -> tuple[Tensor, Tensor]:
        size = slots * heads * tile.block_m
        return launch.scratch(size * block_dv), launch.scratch(size)

    yield launch.call(
        attention_forward, items, heads, tile,
        lambda items: (launch.table, launch.floats, items, listed(), *parts(), heads, *launch.dims),
        *_FORWARD, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_D=block_d, BLOCK_REST=block_rest,
        EVEN=exact(*launch.dims), PACKED=rows > 0,
    )  # fmt: skip
    yield launch.call(
        merge_parts, merges, heads, launch.config.merge_of(rows),
        lambda merges: (launch.table, merges, *parts(), heads, launch.dims[1]),
        *_VALUES, BLOCK_M=tile.block_m, PACKED=rows > 0,
    )  # fmt: skip


def _listed(
    launch: Launch, items: np.ndarray, make: Callable[[], lists.Lists]
) -> Generator[Call, None, tuple[np.ndarray, Callable[[], Tensor | None]]]:
    """Yield the call that makes the lists of a launch with block masks.

    Return the items and a function for the lists.
    """
    if not launch.shared.BLOCKS:
        return items, lambda: None
    made = make()
    yield made.call
    return made.items, made.memory


def _forward_hopper(launch: Launch) -> Call:
    """Return the forward's call for Hopper: one program per multiprocessor; they divide the blocks of queries among
    them.
    """
    # Import it only when the path is requested: see hopper/.
    from flashpoint_kernels.triton_backend.hopper.forward import attention_forward_hopper

    tile = launch.config.forward
    items = work_list(launch.shapes, forward_parts, Cut(launch.config, 0))
    blocks = len(items) * launch.heads
    return launch.call(
        attention_forward_hopper, items, launch.heads, tile,
        lambda items: (launch.table, launch.floats, items, launch.heads, *launch.dims, blocks),
        *_OF_HOPPER, most=chip_of(launch.device).multiprocessors,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, STAGES=tile.num_stages,
    )  # fmt: skip


def _gradient_hopper(launch: Launch, name: str, items: np.ndarray, heads: int) -> Iterator[Call]:
    """Yield a gradient's calls for Hopper, by its name in `Config`, with at most PROGRAMS_OF_HOPPER programs each."""
    from flashpoint_kernels.triton_backend.hopper import backward

    kernels = {
        "backward_kv": backward.attention_backward_kv_hopper,
        "backward_q": backward.attention_backward_q_hopper,
    }
    tile: Tile = getattr(launch.config, name)
    most = max(PROGRAMS_OF_HOPPER // heads, 1)
    for first in range(0, max(len(items), 1), most):
        yield launch.call(
            kernels[name], items[first : first + most], heads, tile,
            lambda items: (launch.table, launch.floats, items, heads, *launch.dims),
            *_OF_HOPPER, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, STAGES=tile.num_stages,
        )  # fmt: skip


def scratch_of(problem: Problem) -> dict[str, Tensor]:
    """Return float32 memory in which dsinks is summed, if the problem asks for it."""
    if "dsinks" not in problem.outputs:
        return {}
    return {"dsinks": torch.zeros(problem.spec.q_heads, dtype=torch.float32, device=problem.device)}


def backward_calls(
    problems: Sequence[Problem], scratch: Iterable[dict[str, Tensor]], tiles: Config | None = None
) -> Iterator[Call]:
    """Yield the calls of `backward`, in order; `scratch` holds each problem's `scratch_of`."""
    for launch in _launches(problems, scratch, tiles):
        yield from _backward_of(launch)
        yield from _backward_masks(launch)
        yield from _backward_sinks(launch)


def _backward_of(launch: Launch) -> Iterator[Call]:
    tile = launch.config.delta
    yield launch.call(
        attention_delta, work_list(launch.shapes, query_parts, tile), launch.heads, tile,
        lambda items: (launch.table, items, launch.heads, launch.dims[1]),
        *_VALUES, BLOCK_M=tile.block_m,
    )  # fmt: skip
    of_hopper = hopper_tiles(*launch.dims) if launch.hopper else {}

    def products(
        kernel: Any, items: np.ndarray, heads: int, tile: Tile, make: Callable[[], lists.Lists], **constants: Any
    ) -> Iterator[Call]:
        items, listed = yield from _listed(launch, items, make)
        yield launch.call(
            kernel, items, heads, tile,
            lambda items: (launch.table, launch.floats, items, listed(), heads, *launch.dims),
            *_ALL, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, **constants,
        )  # fmt: skip

    tile = launch.config.backward_kv
    items = _asked(launch, work_list(launch.shapes, key_parts, tile), "dk", "dv")
    if "backward_kv" in of_hopper:
        yield from _gradient_hopper(launch, "backward_kv", items, launch.kv_heads)
    else:
        make = partial(lists.of_keys, launch, items, tile)
        yield from products(attention_backward_kv, items, launch.kv_heads, tile, make)
    for rows in (0, *launch.config.packed_rows):
        items = _asked(launch, work_list(launch.shapes, gradient_parts, Cut(launch.config, rows)), "dq")
        if "backward_q" in of_hopper and not rows:
            yield from _gradient_hopper(launch, "backward_q", items, launch.heads)
        else:
            heads, tile = launch.kv_heads if rows else launch.heads, launch.config.backward_q_of(rows)
            make = partial(lists.of_queries, launch, items, tile, rows > 0)
            yield from products(attention_backward_q, items, heads, tile, make, PACKED=rows > 0)


def _backward_masks(launch: Launch) -> Iterator[Call]:
    """Yield the calls for dattn_mask: one for each dtype of the masks (one in all, unless some masks are float64)."""
    tile = launch.config.backward_q
    items: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for problem, first in zip(launch.problems, launch.first_row, strict=False):
        if "dattn_mask" not in problem.outputs:
            continue
        spec = problem.spec
        view = problem.view("dattn_mask")
        own = [n if stride else 1 for n, stride in zip(view.shape, view.stride(), strict=True)]
        items[spec.tensors["attn_mask"].dtype] += [
            (first + b, *rest) for b, *rest in mask_parts(own, spec.q_len, spec.kv_len, spec.batch, spec.q_heads, tile)
        ]
    for dtype, listed in items.items():
        yield launch.call(
            attention_backward_mask, np.array(listed, np.int32), 1, tile,
            lambda items: (launch.table, launch.floats, items, *launch.dims),
            *(name for name in _ALL if name != "LEVEL"),
            LEVEL=2, DMASK_DTYPE=_TYPES[dtype], BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        )  # fmt: skip


def _backward_sinks(launch: Launch) -> Iterator[Call]:
    items = [
        (first, len(problem.rows))
        for problem, first in zip(launch.problems, launch.first_row, strict=False)
        if "dsinks" in problem.outputs
    ]
    tile = launch.config.backward_q
    yield launch.call(
        attention_backward_sinks, np.array(items, np.int32).reshape(-1, 2), launch.heads, tile,
        lambda items: (launch.table, items, launch.heads), BLOCK_M=tile.block_m,
    )  # fmt: skip


def _asked(launch: Launch, items: np.ndarray, *names: str) -> np.ndarray:
    """Return the work items of the problems that ask for any of these gradients."""
    asking = [any(name in problem.outputs for name in names) for problem in launch.problems]
    if all(asking):
        return items
    of_row = np.repeat(asking, [len(problem.rows) for problem in launch.problems])
    asked: np.ndarray = items[of_row[items[:, 0]]]
    return asked


def _launches(
    problems: Sequence[Problem], extras: Iterable[dict[str, Tensor]], tiles: Config | None
) -> Iterator[Launch]:
    """Group problems by the compiled variant that each needs alone, so that other problems never change a variant."""
    groups: dict[Any, tuple[list[Problem], list[Table]]] = {}
    for problem, extra in zip(problems, extras, strict=True):
        if not problem.rows:  # an empty batch has no program, and its sums are 0
            problem.clear_outputs()
            continue
        made = Table.of(problem, extra)
        variant = launch_key(problem.spec, "triton"), made.aligned, _goes_hopper(problem, made)
        group = groups.setdefault(variant, ([], []))
        group[0].append(problem)
        group[1].append(made)
    for (_key, _aligned, hopper), (members, tables) in groups.items():
        yield Launch(members, tables, hopper, tiles or _config(members[0], hopper))


def _goes_hopper(problem: Problem, table: Table) -> bool:
    """Return whether a problem uses the path for Hopper.

    Only the problem itself decides, not what is launched with it.
    """
    spec = problem.spec
    in_parts = exact(spec.head_dim, spec.value_dim) and parts_of(spec.head_dim)[1] > 0
    if spec.level > 0 or spec.dtype == "float32" or "wide_head_dim" in spec.features or spec.has("block_mask"):
        return False
    if (in_parts and spec.value_dim <= 128) or not table.describable or not takes_hopper(problem.device):
        return False
    config = _config(problem, hopper=True)
    parts = [forward_parts(shape, Cut(config, 0)).items[:, 3] for shape in _shapes(table)]
    return any(len(each) for each in parts) and not any((each >= 0).any() for each in parts)


def _config(problem: Problem, hopper: bool) -> Config:
    spec = problem.spec
    dims = spec.head_dim, spec.value_dim
    kinds = hopper, spec.paged, spec.quantized, spec.has("block_mask")
    return config_for(problem.device, spec.dtype, *dims, spec.level, *kinds)


def _shapes(table: Table) -> list[Shape]:
    return [Shape(*row) for row in table.ints[:, _SHAPE].tolist()]
