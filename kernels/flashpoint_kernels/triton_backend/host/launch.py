"""Launch any mix of problems with the same launch key, grouped into one launch per kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashpoint_kernels.problems import workspace
from flashpoint_kernels.problems.problem import Problem, with_forwards
from flashpoint_kernels.triton_backend.host import lists
from flashpoint_kernels.triton_backend.host.calls import Call, Code, run_calls, start_compiling
from flashpoint_kernels.triton_backend.host.config import (
    carries_float32,
    exact,
    parts_of,
    stores,
    two_sets,
)
from flashpoint_kernels.triton_backend.host.configurations import Config, Tile
from flashpoint_kernels.triton_backend.host.grouped import Launch, launches
from flashpoint_kernels.triton_backend.host.route import (
    FORWARD,
    OF_HOPPER,
    TYPES,
    VALUES,
    Route,
)
from flashpoint_kernels.triton_backend.host.schedule import (
    ForwardList,
    Gradients,
    forward_lists,
    gradient_lists,
    mask_parts,
    stored_lists,
)
from flashpoint_kernels.triton_backend.host.sharing import Cascade, shared_parts
from flashpoint_kernels.triton_backend.host.stored import Pieces, StoredWork, is_stored
from flashpoint_kernels.triton_backend.kernels.backward import (
    attention_backward_kv,
    attention_backward_q,
    attention_delta,
)
from flashpoint_kernels.triton_backend.kernels.backward_inputs import attention_backward_mask, attention_backward_sinks
from flashpoint_kernels.triton_backend.kernels.cascade import ITEM, MEMBER, attention_cascade
from flashpoint_kernels.triton_backend.kernels.forward import attention_forward, merge_parts
from flashpoint_kernels.triton_backend.kernels.stored import attention_backward_q_stored

# Maximum programs of a launch. A program has its TMA descriptors at 512 bytes times its number; Triton before 3.9
# computes this offset in int32.
PROGRAMS_OF_HOPPER = 2**31 // 512


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
    return all(call.compiled for call in _union(problems))


def compile_ahead(problems: Sequence[Problem]) -> Future[None]:
    """Compile in a thread what `run(problems, "triton")` needs; when it is done, `compiled(problems)` is true.

    Nothing is launched, and no output is written. The future raises Triton's errors. Triton's disk cache
    (TRITON_CACHE_DIR) is shared: kernels that another process has compiled are loaded from it.
    """
    return start_compiling(lambda: _union(problems))


def _union(problems: Sequence[Problem]) -> Iterator[Call]:
    """Yield a call of each kernel that problems with this launch key may need, to compile it: the work is made up."""
    if problems[0].spec.direction == "forward":
        yield from _union_of_forward(problems)
        return
    forwards, whole = with_forwards(problems)
    yield from _union_of_forward(forwards)
    for launch in launches(whole, map(scratch_of, whole), None):
        queries = dict.fromkeys((0, *launch.config.packed_rows), _one(2))
        chunks = [StoredWork(_one(2), _one(2), _one(2), 1, 1)] if _stores(launch.route) else []
        yield from _backward(launch, Gradients(_one(2), _one(2), queries), chunks, _one(2))


def _union_of_forward(problems: Sequence[Problem]) -> Iterator[Call]:
    for launch in launches(problems, [{} for _ in problems], None):
        for rows in (0, *launch.config.packed_rows):
            work = ForwardList(rows, _one(5), _one(4), 1)
            shared = Cascade(work.items, _one(ITEM.value), _one(MEMBER.value))
            yield from _forward(launch, work, shared if _may_share(launch.route, rows) else None)


def _one(columns: int) -> np.ndarray:
    """Return a work list with one item."""
    return np.zeros((1, columns), np.int32)


def forward_calls(problems: Sequence[Problem], tiles: Config | None = None) -> Iterator[Call]:
    """Yield the calls of `forward`, in order. benchmarks/gpu.py passes `tiles` that are not in the device's table."""
    for launch in launches(problems, [{} for _ in problems], tiles):
        for work in forward_lists(launch.shapes, launch.config):
            yield from _forward(launch, work, _shared(launch, work))


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


def _forward(launch: Launch, work: ForwardList, shared: Cascade | None) -> Iterator[Call]:
    """Yield the forward's calls for one kind of blocks: make lists of tiles, compute the blocks, merge their parts.

    `shared` has the programs that read keys for several sequences.
    """
    rows, items, route = work.rows, work.items, launch.route
    if route.hopper and not rows:
        yield _forward_hopper(launch, items)
        return
    heads = launch.kv_heads if rows else launch.heads
    code, listed = _forward_code(route, rows), None
    if route.blocks:
        listed = lists.of_queries(launch, items, code.tile, rows > 0, items[:, 2:4])
        yield listed.call
    parts = _Parts(launch, work.slots * heads, code.tile.block_m)
    if shared is not None:
        items = shared.alone
        members = launch.upload.add(shared.members)
        yield launch.call(
            _forward_code(route, rows, attention_cascade), shared.items, heads,
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
    if work.slots:
        yield launch.call(
            _merge_code(route, rows), work.merges, heads,
            lambda merges: (launch.table, merges, *parts.memory, heads, launch.dims[1]),
        )  # fmt: skip


def _shared(launch: Launch, work: ForwardList) -> Cascade | None:
    """Return the programs that read keys for several sequences; None without any.

    They read parts of split sequences, in pages with known numbers.
    """
    several = work.slots > 0 and len(launch.ints) > 1 and any(problem.pages is not None for problem in launch.problems)
    if not several or not _may_share(launch.route, work.rows):
        return None
    shared = shared_parts(launch.problems, launch.ints, launch.scalars, work)
    return shared if len(shared.items) else None


def _may_share(route: Route, rows: int) -> bool:
    """Return whether one program may read keys for several sequences: in packed blocks, without masks or dropout."""
    shared = route.shared("PAGED", "LEVEL")
    return rows > 0 and shared["PAGED"] and shared["LEVEL"] <= 1 and not route.blocks


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
        _code_of_hopper(launch.route, attention_forward_hopper, "forward", two_sets()), items, launch.heads,
        lambda items: (launch.table, launch.floats, items, launch.heads, *launch.dims, blocks),
        launch.route.multiprocessors,
    )  # fmt: skip


def _code_of_hopper(route: Route, kernel: Any, name: str, two: bool | None = None) -> Code:
    """Return the code of a kernel for Hopper; `name` is the name of its tile in `Config`, `two` is TWO_SETS."""

    def make() -> tuple[Tile, dict[str, Any]]:
        tile: Tile = getattr(route.config, name)
        of_kernel = {"BLOCK_N": tile.block_n, "STAGES": tile.num_stages, "TWO_SETS": two}
        of_kernel |= stores(name, *route.block_dims)
        return tile, route.shared(*OF_HOPPER) | of_kernel | {"CARRY_FLOAT32": carries_float32(name, *route.block_dims)}

    return route.code(kernel, (name, two), make)


def _gradient_hopper(launch: Launch, name: str, items: np.ndarray, heads: int) -> Iterator[Call]:
    """Yield the calls for Hopper of a gradient's kernel, with at most PROGRAMS_OF_HOPPER programs each.

    `name` is the name of its tile in `Config`.
    """
    from flashpoint_kernels.triton_backend.hopper import backward, stored, wide

    kernels = {
        "backward_kv": backward.attention_backward_kv_hopper,
        "backward_q": backward.attention_backward_q_hopper,
        "backward_kv_storing": backward.attention_backward_kv_hopper,
        "backward_v_storing": wide.attention_backward_v_hopper,
        "backward_k_stored": wide.attention_backward_k_stored_hopper,
        "backward_q_stored": stored.attention_backward_q_stored_hopper,
    }
    if not len(items):
        return
    code = _code_of_hopper(launch.route, kernels[name], name)
    items_of_launch = max(PROGRAMS_OF_HOPPER // heads, 1)
    for first in range(0, len(items), items_of_launch):
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
    problems: Sequence[Problem], scratch: Iterable[dict[str, Tensor]], tiles: Config | None = None
) -> Iterator[Call]:
    """Yield the calls of `backward`, in order; `scratch` has the result of `scratch_of` for each problem."""
    for launch in launches(problems, scratch, tiles):
        work, stored = gradient_lists(launch.shapes, launch.config), _stored(launch)
        keys = _asked(launch, work.keys[~stored[work.keys[:, 0]]], "dk", "dv")
        queries = {
            rows: _asked(launch, items[~stored[items[:, 0]]], "dq") for rows, items in work.queries.items()
        }  # fmt: skip
        first_and_count = [
            (first, len(problem.rows))
            for problem, first in zip(launch.problems, launch.first_row, strict=False)
            if "dsinks" in problem.outputs
        ]
        sinks = np.array(first_and_count, np.int32).reshape(-1, 2)
        yield from _backward(launch, Gradients(work.delta, keys, queries), _chunks(launch), sinks)


def _backward(launch: Launch, work: Gradients, chunks: Iterable[StoredWork], sinks: np.ndarray) -> Iterator[Call]:
    """Yield the backward's calls. `work` is without the sequences whose dS is stored, which are in `chunks`.

    `sinks` has the first row and the number of rows of problems that request dsinks.
    """
    route, config = launch.route, launch.config
    delta = route.code(attention_delta, None, lambda: (config.delta, route.shared(*VALUES)))
    yield launch.call(
        delta, work.delta, launch.heads, lambda items: (launch.table, items, launch.heads, launch.dims[1])
    )
    for each in chunks:
        yield from _through_ds(launch, each)
    if "backward_kv" in route.of_hopper:
        yield from _gradient_hopper(launch, "backward_kv", work.keys, launch.kv_heads)
    else:
        yield from _products(launch, attention_backward_kv, None, work.keys, launch.kv_heads)
    for rows, items in work.queries.items():
        heads = launch.kv_heads if rows else launch.heads
        if "backward_q" in route.of_hopper and not rows:
            yield from _gradient_hopper(launch, "backward_q", items, heads)
        else:
            yield from _products(launch, attention_backward_q, rows, items, heads)
    yield from _backward_masks(launch)
    if len(sinks):
        code = route.code(attention_backward_sinks, None, lambda: (config.backward_q, {}))
        yield launch.call(code, sinks, launch.heads, lambda items: (launch.table, items, launch.heads))


def _stores(route: Route) -> bool:
    """Return whether sequences of a route may have stored dS: FLASHPOINT_STORE_DS is set, and it has the kernels."""
    return route.config.storable and workspace.stores_ds()


def _stored(launch: Launch) -> np.ndarray:
    """Return for each row of the table whether its dS is stored, and divide the heads of these rows into chunks.

    Where dS is stored at all, only the sequence itself decides, and not which gradients are requested.
    """
    stored = np.zeros(len(launch.ints), bool)
    if _stores(launch.route):
        asking = [any(name in problem.outputs for name in ("dq", "dk", "dv")) for problem in launch.problems]
        stored = is_stored(launch.shapes, launch.config)
        stored &= np.repeat(asking, [len(problem.rows) for problem in launch.problems])
        if stored.any():
            launch.pieces = Pieces(launch.ints, stored, workspace.limit(), launch.device)
    return stored


def _chunks(launch: Launch) -> Iterator[StoredWork]:
    """Yield the work of each chunk of heads whose dS is stored."""
    if launch.pieces is None:
        return
    work = stored_lists(launch.shapes, launch.config)
    keys, queries = _asked(launch, work.keys, "dk"), _asked(launch, work.queries, "dq")
    for chunk in launch.pieces.chunks:
        items = chunk.items(work.keys), chunk.items(keys), chunk.items(queries)
        yield StoredWork(*items, chunk.heads, chunk.kv_heads)


def _through_ds(launch: Launch, work: StoredWork) -> Iterator[Call]:
    """Yield the calls that compute the gradients of a chunk, and store its dS in the workspace."""
    route = launch.route
    if not route.hopper:
        yield from _through_ds_in_general(launch, work)
        return
    for name, items, heads in (
        ("backward_kv_storing", work.storing, work.kv_heads),
        ("backward_v_storing", work.storing, work.kv_heads),
        ("backward_k_stored", work.keys, work.kv_heads),
        ("backward_q_stored", work.queries, work.heads),
    ):
        if name in route.of_hopper:
            yield from _gradient_hopper(launch, name, items, heads)


def _through_ds_in_general(launch: Launch, work: StoredWork) -> Iterator[Call]:
    """Yield the calls of `_through_ds` of the general kernels."""
    route = launch.route
    storing, stored = launch.config.backward_kv_storing, launch.config.backward_q_stored
    of_keys = route.of_gradients | {"BLOCK_N": storing.block_n, "STORE_DS": True}
    yield launch.call(
        route.code(attention_backward_kv, "storing", partial(_with, storing, of_keys)), work.storing, work.kv_heads,
        lambda items: (launch.table, launch.floats, items, None, work.kv_heads, *launch.dims),
    )  # fmt: skip
    of_queries = route.of_gradients | {"BLOCK_N": stored.block_n, "PACKED": False}
    yield launch.call(
        route.code(attention_backward_q_stored, None, partial(_with, stored, of_queries)), work.queries, work.heads,
        lambda items: (launch.table, launch.floats, items, work.heads, launch.dims[0]),
    )  # fmt: skip


def _products(launch: Launch, kernel: Any, rows: int | None, items: np.ndarray, heads: int) -> Iterator[Call]:
    """Yield the calls of a gradient's kernel.

    `rows` is for dQ: the rows of its packed blocks, 0 for blocks of one head. For dK and dV it is None.
    """
    route, config = launch.route, launch.config
    if not len(items):
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


def _asked(launch: Launch, items: np.ndarray, *names: str) -> np.ndarray:
    """Return the work items of the problems that request at least one of these gradients."""
    asking = [any(name in problem.outputs for name in names) for problem in launch.problems]
    if all(asking):
        return items
    of_row = np.repeat(asking, [len(problem.rows) for problem in launch.problems])
    chosen: np.ndarray = items[of_row[items[:, 0]]]
    return chosen
