"""Launch any mix of problems with the same launch key, grouped into one launch per kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashpoint_kernels.problems.problem import Problem, with_forwards
from flashpoint_kernels.triton_backend.host import lists
from flashpoint_kernels.triton_backend.host.calls import Call, Code, run_calls, start_compiling
from flashpoint_kernels.triton_backend.host.config import carries_float32, exact, parts_of, takes_hopper
from flashpoint_kernels.triton_backend.host.configurations import Config, Tile
from flashpoint_kernels.triton_backend.host.grouped import Launch
from flashpoint_kernels.triton_backend.host.route import (
    FORWARD,
    OF_HOPPER,
    TYPES,
    VALUES,
    Route,
    config_of,
    route_of,
)
from flashpoint_kernels.triton_backend.host.schedule import ForwardList, forward_lists, gradient_lists, mask_parts
from flashpoint_kernels.triton_backend.host.sharing import shared_parts
from flashpoint_kernels.triton_backend.host.table import SHAPE, Table
from flashpoint_kernels.triton_backend.kernels.backward import (
    attention_backward_kv,
    attention_backward_q,
    attention_delta,
)
from flashpoint_kernels.triton_backend.kernels.backward_inputs import attention_backward_mask, attention_backward_sinks
from flashpoint_kernels.triton_backend.kernels.cascade import attention_cascade
from flashpoint_kernels.triton_backend.kernels.forward import attention_forward, merge_parts

# Maximum programs of a launch. A program has its TMA descriptors at 512 bytes times its number; Triton before 3.9
# computes this offset in int32.
PROGRAMS_OF_HOPPER = 2**31 // 512

_NO_ITEMS = np.empty((0, 2), np.int32)


def forward(problems: Sequence[Problem]) -> None:
    """Write `o` and, if requested, `lse` of every problem. All problems have the same launch key."""
    prepare(problems)()


def backward(problems: Sequence[Problem]) -> None:
    """Write the requested gradients of every problem, from its `o` and `lse`. All problems have the same launch key."""
    prepare(problems)()


def prepare(problems: Sequence[Problem]) -> Callable[[], None]:
    """Return a function that runs problems of one direction and one launch key, and writes their outputs.

    The function can be called again after other values were written to the same memory: tensors, outputs, page numbers
    and scales. It ignores new lengths, which are read here, and new values of tensors that are copied here: masks in
    float64, tensors whose rows are not contiguous, and per-head numbers, lse and scales that are not float32. From the
    second call on it copies nothing from the host, so a CUDA graph can capture it. A gradient needs `o` and `lse`.
    """
    if problems and problems[0].spec.direction == "forward":
        calls = list(forward_calls(problems))
        return lambda: run_calls(calls)
    scratch = [scratch_of(problem) for problem in problems]
    calls = list(backward_calls(problems, scratch))
    empty = [problem.outputs["dattn_mask"] for problem in problems if "dattn_mask" in problem.outputs]

    def run() -> None:
        for gradient in empty:
            gradient.zero_()  # without queries or keys no program writes it
        run_calls(calls)
        for problem, extra in zip(problems, scratch, strict=True):
            if "dsinks" in extra:
                problem.outputs["dsinks"].copy_(extra["dsinks"])

    return run


def compiled(problems: Sequence[Problem]) -> bool:
    """Return whether this process has compiled every kernel of `run(problems, "triton")`. True when interpreting.

    The problems have one direction and one launch key. The function sends nothing to the device.
    """
    return all(call.compiled for call in _calls(problems))


def compile_ahead(problems: Sequence[Problem]) -> Future[None]:
    """Compile in a thread what `run(problems, "triton")` needs; when it is done, `compiled(problems)` is true.

    Nothing is launched, and no output is written. The future raises Triton's errors. Triton's disk cache
    (TRITON_CACHE_DIR) is shared: kernels that another process has compiled are loaded from it.
    """
    return start_compiling(lambda: _calls(problems))


def _calls(problems: Sequence[Problem]) -> Iterator[Call]:
    """Yield each call that problems with this launch key may need; calls that these do not need have empty grids."""
    if problems[0].spec.direction == "forward":
        yield from forward_calls(problems, every=True)
        return
    forwards, whole = with_forwards(problems)
    yield from forward_calls(forwards, every=True)
    yield from backward_calls(whole, [scratch_of(problem) for problem in whole], every=True)


def forward_calls(problems: Sequence[Problem], tiles: Config | None = None, *, every: bool = False) -> Iterator[Call]:
    """Yield the calls of `forward`, in order. benchmarks/gpu.py passes `tiles` that are not in the device's table.

    With `every`, also yield calls with an empty grid, whose kernels other problems with this launch key may need.
    """
    for launch in _launches(problems, [{} for _ in problems], tiles, every):
        work = forward_lists(launch.shapes, launch.config)
        if every:
            of_rows = {each.rows: each for each in work}
            none = np.empty((0, 5), np.int32), np.empty((0, 4), np.int32), 0
            work = tuple(of_rows.get(rows) or ForwardList(rows, *none) for rows in (0, *launch.config.packed_rows))
        for each in work:
            if launch.route.hopper and not each.rows:
                yield _forward_hopper(launch, each.items)
            else:
                yield from _forward_blocks(launch, each)


class _Parts:
    """Memory for o and lse of the parts of split sequences, allocated at first use."""

    def __init__(self, launch: Launch, slots: int, rows: int) -> None:
        self._launch, self._slots, self._rows = launch, slots, rows

    @cached_property
    def memory(self) -> tuple[Tensor, Tensor]:
        if not self._slots:
            return self._launch.floats, self._launch.floats  # any valid pointers: no program reads or writes there
        size = self._slots * self._rows
        return self._launch.scratch(size * self._launch.route.block_dims[1]), self._launch.scratch(size)


def _forward_blocks(launch: Launch, work: ForwardList) -> Iterator[Call]:
    """Yield the forward's calls for one kind of blocks: make lists of tiles, compute the blocks, merge their parts."""
    rows, items, route = work.rows, work.items, launch.route
    heads = launch.kv_heads if rows else launch.heads
    code, listed = _forward_code(route, rows), None
    if route.blocks:
        listed = lists.of_queries(launch, items, code.tile, rows > 0, items[:, 2:4])
        yield listed.call
    parts = _Parts(launch, work.slots * heads, code.tile.block_m)
    if _may_share(launch, work):
        cascade = shared_parts(launch.problems, launch.ints, launch.scalars, work)
        if len(cascade.items) or launch.every:
            items = cascade.alone
            members = launch.upload.add(cascade.members)
            yield launch.call(
                _forward_code(route, rows, attention_cascade), cascade.items, heads,
                lambda items: (
                    launch.table, launch.floats, items, launch.items(members), *parts.memory, heads, *launch.dims
                ),
            )  # fmt: skip
    yield launch.call(
        code, listed.items if listed else items, heads,
        lambda items: (
            launch.table, launch.floats, items, listed and listed.memory(), *parts.memory, heads, *launch.dims
        ),
    )  # fmt: skip
    if work.slots or launch.every:
        yield launch.call(
            _merge_code(route, rows), work.merges, heads,
            lambda merges: (launch.table, merges, *parts.memory, heads, launch.dims[1]),
        )  # fmt: skip


def _may_share(launch: Launch, work: ForwardList) -> bool:
    """Return whether one program may read keys in pages for several sequences.

    This requires split sequences in packed blocks, no masks and no dropout, and known page numbers. With
    `launch.every`, the number of parts and the page numbers do not count.
    """
    shared = launch.route.shared("PAGED", "LEVEL")
    if not work.rows or not shared["PAGED"] or shared["LEVEL"] > 1 or launch.route.blocks:
        return False
    several = work.slots > 0 and len(launch.ints) > 1
    return launch.every or (several and any(problem.pages is not None for problem in launch.problems))


def _forward_code(route: Route, rows: int, kernel: Any = attention_forward) -> Code:
    """Return the code of a forward's kernel for packed blocks of `rows` rows, or with 0, for blocks of one head."""

    def make() -> tuple[Tile, dict[str, Any]]:
        tile, (block_d, rest) = route.config.forward_of(rows), parts_of(route.dims[0])
        of_kernel = {"BLOCK_N": tile.block_n, "BLOCK_D": block_d, "BLOCK_REST": rest, "EVEN": exact(*route.dims)}
        return tile, route.shared(*FORWARD) | of_kernel | {"PACKED": rows > 0}

    return route.code(kernel, rows, make)


def _merge_code(route: Route, rows: int) -> Code:
    """Return the code that merges the parts of packed blocks of `rows` rows, or with 0, of blocks of one head."""

    def make() -> tuple[Tile, dict[str, Any]]:
        return route.config.merge_of(rows), route.shared(*VALUES) | {"PACKED": rows > 0}

    return route.code(merge_parts, rows, make)


def _forward_hopper(launch: Launch, items: np.ndarray) -> Call:
    """Return the forward's call for Hopper: at most one program per multiprocessor, which take the blocks in turn."""
    # Import it only when a problem uses it: see hopper/__init__.py.
    from flashpoint_kernels.triton_backend.hopper.forward import attention_forward_hopper

    blocks = len(items) * launch.heads
    return launch.call(
        _code_of_hopper(launch.route, attention_forward_hopper, "forward"), items, launch.heads,
        lambda items: (launch.table, launch.floats, items, launch.heads, *launch.dims, blocks),
        launch.route.multiprocessors,
    )  # fmt: skip


def _code_of_hopper(route: Route, kernel: Any, name: str) -> Code:
    """Return the code of a kernel for Hopper; `name` is the name of its tile in `Config`."""

    def make() -> tuple[Tile, dict[str, Any]]:
        tile: Tile = getattr(route.config, name)
        of_kernel = {"BLOCK_N": tile.block_n, "STAGES": tile.num_stages}
        return tile, route.shared(*OF_HOPPER) | of_kernel | {"CARRY_FLOAT32": carries_float32(name, *route.block_dims)}

    return route.code(kernel, name, make)


def _gradient_hopper(launch: Launch, name: str, items: np.ndarray, heads: int) -> Iterator[Call]:
    """Yield the calls for Hopper of a gradient's kernel, with at most PROGRAMS_OF_HOPPER programs each.

    `name` is the name of its tile in `Config`.
    """
    from flashpoint_kernels.triton_backend.hopper import backward

    kernels = {
        "backward_kv": backward.attention_backward_kv_hopper,
        "backward_q": backward.attention_backward_q_hopper,
    }
    if not (len(items) or launch.every):
        return
    code = _code_of_hopper(launch.route, kernels[name], name)
    items_of_launch = max(PROGRAMS_OF_HOPPER // heads, 1)
    for first in range(0, max(len(items), 1), items_of_launch):
        yield launch.call(
            code, items[first : first + items_of_launch], heads,
            lambda items: (launch.table, launch.floats, items, heads, *launch.dims),
        )  # fmt: skip


def scratch_of(problem: Problem) -> dict[str, Tensor]:
    """Return {"dsinks": zeros in float32, to which kernels add}; {} if the problem does not request dsinks."""
    if "dsinks" not in problem.outputs:
        return {}
    return {"dsinks": torch.zeros(problem.spec.q_heads, dtype=torch.float32, device=problem.device)}


def backward_calls(
    problems: Sequence[Problem], scratch: Iterable[dict[str, Tensor]], tiles: Config | None = None, *,
    every: bool = False,
) -> Iterator[Call]:  # fmt: skip
    """Yield the calls of `backward`, in order; `scratch` has the result of `scratch_of` for each problem.

    With `every`, also yield calls with an empty grid, whose kernels other problems with this launch key may need.
    """
    for launch in _launches(problems, scratch, tiles, every):
        yield from _backward_of(launch)
        yield from _backward_masks(launch)
        yield from _backward_sinks(launch)


def _backward_of(launch: Launch) -> Iterator[Call]:
    route, config = launch.route, launch.config
    work = gradient_lists(launch.shapes, config)
    delta = route.code(attention_delta, None, lambda: (config.delta, route.shared(*VALUES)))
    yield launch.call(
        delta, work.delta, launch.heads, lambda items: (launch.table, items, launch.heads, launch.dims[1])
    )
    items = _asked(launch, work.keys, "dk", "dv")
    if "backward_kv" in route.of_hopper:
        yield from _gradient_hopper(launch, "backward_kv", items, launch.kv_heads)
    else:
        yield from _products(launch, attention_backward_kv, None, items, launch.kv_heads)
    for rows in (0, *config.packed_rows) if launch.every else work.queries:
        items = _asked(launch, work.queries.get(rows, _NO_ITEMS), "dq")
        heads = launch.kv_heads if rows else launch.heads
        if "backward_q" in route.of_hopper and not rows:
            yield from _gradient_hopper(launch, "backward_q", items, heads)
        else:
            yield from _products(launch, attention_backward_q, rows, items, heads)


def _products(launch: Launch, kernel: Any, rows: int | None, items: np.ndarray, heads: int) -> Iterator[Call]:
    """Yield the calls of a gradient's kernel.

    `rows` is for dQ: the rows of its packed blocks, 0 for blocks of one head. For dK and dV it is None.
    """
    route, config = launch.route, launch.config
    if not (len(items) or launch.every):
        return

    def make() -> tuple[Tile, dict[str, Any]]:
        tile = config.backward_kv if rows is None else config.backward_q_of(rows)
        packed = {} if rows is None else {"PACKED": rows > 0}
        return tile, route.of_gradients | {"BLOCK_N": tile.block_n} | packed

    code, listed = route.code(kernel, rows, make), None
    if route.blocks:
        if rows is None:
            listed = lists.of_keys(launch, items, code.tile)
        else:
            listed = lists.of_queries(launch, items, code.tile, rows > 0)
        yield listed.call
    yield launch.call(
        code, listed.items if listed else items, heads,
        lambda items: (launch.table, launch.floats, items, listed and listed.memory(), heads, *launch.dims),
    )  # fmt: skip


def _backward_masks(launch: Launch) -> Iterator[Call]:
    """Yield the call for dattn_mask if a problem requests it. All masks of a launch have one dtype (`launch_key`)."""
    route, tile = launch.route, launch.config.backward_q
    items: list[tuple[int, ...]] = []
    dtype = None
    for problem, first in zip(launch.problems, launch.first_row, strict=False):
        if "dattn_mask" not in problem.outputs:
            continue
        spec = problem.spec
        view = problem.view("dattn_mask")
        sizes = [n if stride else 1 for n, stride in zip(view.shape, view.stride(), strict=True)]
        dtype = spec.tensors["attn_mask"].dtype
        items += [
            (first + b, *rest)
            for b, *rest in mask_parts(sizes, spec.q_len, spec.kv_len, spec.batch, spec.q_heads, tile)
        ]
    if dtype is not None:
        constants = {"LEVEL": 2, "DMASK_DTYPE": TYPES[dtype], "BLOCK_N": tile.block_n}
        code = route.code(attention_backward_mask, dtype, partial(_with, tile, route.of_gradients | constants))
        rows = np.array(items, np.int32)
        yield launch.call(code, rows, 1, lambda items: (launch.table, launch.floats, items, *launch.dims))


def _with(tile: Tile, constants: dict[str, Any]) -> tuple[Tile, dict[str, Any]]:
    return tile, constants


def _backward_sinks(launch: Launch) -> Iterator[Call]:
    items = [
        (first, len(problem.rows))
        for problem, first in zip(launch.problems, launch.first_row, strict=False)
        if "dsinks" in problem.outputs
    ]
    if items or launch.every:
        code = launch.route.code(attention_backward_sinks, None, lambda: (launch.config.backward_q, {}))
        rows = np.array(items, np.int32).reshape(-1, 2)
        yield launch.call(code, rows, launch.heads, lambda items: (launch.table, items, launch.heads))


def _asked(launch: Launch, items: np.ndarray, *names: str) -> np.ndarray:
    """Return the work items of the problems that request at least one of these gradients."""
    asking = [any(name in problem.outputs for name in names) for problem in launch.problems]
    if all(asking):
        return items
    of_row = np.repeat(asking, [len(problem.rows) for problem in launch.problems])
    chosen: np.ndarray = items[of_row[items[:, 0]]]
    return chosen


def _launches(
    problems: Sequence[Problem], extras: Iterable[dict[str, Tensor]], tiles: Config | None, every: bool
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
        yield Launch(route, members, tables, every)


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
