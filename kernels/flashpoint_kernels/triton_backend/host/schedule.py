"""Work lists: the programs of a launch, heaviest first.

A sequence's shape alone decides how it is cut into tiles and whether its keys are split over programs. Other sequences
of the launch change a program's place in the list, never the program.

Shapes are arrays, (sequences, fields of `Shape`) int64, and all sequences are cut at once. Lists are cached by the
bytes of their inputs: do not write to them. The forward of few queries depends on its lengths only in steps of
`Config.least_keys` keys, so a loop that adds a key in each call makes new lists only once in `least_keys` calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from types import FunctionType
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from flashpoint_kernels.problems import bounds
from flashpoint_kernels.triton_backend.host.configurations import Config, Tile

# Convert the functions of bounds.py to functions of arrays.
_ARRAYS = {"min": np.minimum, "max": np.maximum}
_key_range = FunctionType(bounds.key_range.__code__, _ARRAYS)
_query_range = FunctionType(bounds.query_range.__code__, _ARRAYS)

_KEPT = 256  # number of launches whose work lists are cached
_FEW = 64  # the work lists of launches with more sequences are not cached


T = TypeVar("T")


class Shape(NamedTuple):
    """The values that decide how a sequence is cut: valid and padded lengths, the visible band (bounds.py), and heads.

    The fields are numbers, or arrays with one number for each sequence.
    """

    q_len: Any
    q_rows: Any
    kv_len: Any
    kv_rows: Any
    offset: Any
    left: Any
    right: Any
    heads: Any  # query heads
    group: Any  # query heads that share a key/value head


class Cut(NamedTuple):
    """How the forward cuts a sequence.

    The fields are arrays, like those of `Shape`. Each block of queries has `parts` programs: the first has the keys
    before `first`, each other one has the next `size` keys, and the last has all remaining keys.
    """

    rows: Any  # rows of a packed block; 0 means blocks of one head
    blocks: Any
    parts: Any
    first: Any
    size: Any


class Band(NamedTuple):
    """The keys [lo, hi) that a sequence's queries see, and `end`, its number of keys, in whole steps of `least_keys`.

    `lo` is rounded down, `hi` and `end` are rounded up.
    """

    lo: Any
    hi: Any
    end: Any


class ForwardList(NamedTuple):
    """The forward's programs with blocks of one kind.

    `rows` is the number of rows of packed blocks, 0 for blocks of one head. `items` (n, 5) int32: table row, first row
    of the block, first key of the part and end of its keys, and the part's scratch slot (-1: the block has one part).
    `merges` (m, 4) int32: table row, first row of the block, first slot, number of parts; the slots of a block are
    consecutive. `slots` is the total number of slots.
    """

    rows: int
    items: np.ndarray
    merges: np.ndarray
    slots: int


class Gradients(NamedTuple):
    """The backward's programs. Each array is (n, 2) int32: table row, and first row of the block.

    `delta` has blocks of queries of one head, `keys` has blocks of keys of one key/value head. `queries` has the blocks
    of dQ for each number of rows of packed blocks, and under 0 the blocks of one head.
    """

    delta: np.ndarray
    keys: np.ndarray
    queries: dict[int, np.ndarray]


class StoredGradients(NamedTuple):
    """The programs of gradients whose dS is stored: blocks of keys, and blocks of queries of one head.

    The arrays are like those of `Gradients`. Sequences with packed blocks of queries have none.
    """

    keys: np.ndarray
    queries: np.ndarray


def forward_lists(shapes: np.ndarray, config: Config) -> tuple[ForwardList, ...]:
    """Return the forward's programs: a list for each number of rows of packed blocks, and one for blocks of one head.

    Empty lists are omitted.
    """
    return _forward_lists(shapes, config) if len(shapes) <= _FEW else _made_lists(_in_steps(shapes, config), config)


def gradient_lists(shapes: np.ndarray, config: Config) -> Gradients:
    """Return the backward's programs."""
    return _gradient_lists(shapes, config) if len(shapes) <= _FEW else _made_gradients(shapes, config)


def stored_lists(shapes: np.ndarray, config: Config) -> StoredGradients:
    """Return the programs of gradients whose dS is stored, as if that of every sequence was."""
    return _stored_lists(shapes, config) if len(shapes) <= _FEW else _made_stored(shapes, config)


def block_rows(shape: Shape, config: Config) -> np.ndarray:
    """Return the rows of each sequence's packed blocks, 0 for blocks of one head. Only the sequence's shape decides."""
    sizes = np.array(config.packed_rows)
    smallest = np.minimum(np.searchsorted(sizes, shape.q_rows * shape.group), len(sizes) - 1)
    return np.where((shape.q_rows > 0) & (shape.q_rows <= config.few_queries), sizes[smallest], 0)


def cut(shape: Shape, band: Band, config: Config) -> Cut:
    """Return how the forward cuts each sequence.

    Keys are split if more than `split_keys` of them are visible, and queries are few (`_is_few`). Parts have
    `split_keys` keys, or half, a quarter… of that, at least `least_keys`, so that the sequence has at least
    `least_programs` programs. All parts begin at multiples of `least_keys`.
    """
    rows = block_rows(shape, config)
    blocks = _blocks(shape, rows, config.forward.block_m)
    sizes, seen = np.array(config.part_sizes), band.hi - band.lo
    programs = blocks * np.where(rows > 0, shape.heads // shape.group, shape.heads)
    enough = programs[:, None] * -(-seen[:, None] // sizes) >= config.least_programs
    enough[:, -1] = True
    size = sizes[enough.argmax(1)]
    first = (band.lo // size + 1) * size
    splits = _is_few(shape.q_rows, config) & (seen > config.split_keys)
    parts = np.where(splits, 1 + np.maximum(-(-(band.hi - first) // size), 0), 1)
    return Cut(rows, blocks, parts, first, size)


def _is_few(q_rows: Any, config: Config) -> Any:
    """Return whether the queries of a head fit in one block, or are in packed blocks: then keys may be split."""
    return q_rows <= max(config.few_queries, config.forward.block_m)


def _blocks(shape: Shape, rows: np.ndarray, block_m: int) -> np.ndarray:
    """Return the number of each sequence's blocks of queries: packed blocks of `rows` rows, or with 0, of `block_m`."""
    total = shape.q_rows * np.where(rows > 0, shape.group, 1)
    blocks: np.ndarray = -(-total // np.where(rows > 0, rows, block_m))
    return blocks


class _Kept(Generic[T]):
    """A function of an int64 array, one row per sequence, and a Config; results are cached by the array's bytes."""

    def __init__(self, make: Callable[[np.ndarray, Config], T]) -> None:
        self._of_bytes = lru_cache(_KEPT)(
            lambda numbers, count, config: make(np.frombuffer(numbers, np.int64).reshape(count, -1), config)
        )
        self.cache_info, self.cache_clear = self._of_bytes.cache_info, self._of_bytes.cache_clear

    def __call__(self, numbers: np.ndarray, config: Config) -> T:
        return self._of_bytes(numbers.tobytes(), len(numbers), config)


def _in_steps(shapes: np.ndarray, config: Config) -> np.ndarray:
    """Return the inputs of `_made_lists`: for each sequence, the fields of `Shape` and of `Band`.

    Where keys may be split, lengths and window are 0: the lists then depend only on the band, which changes in steps.
    """
    shape, unit = Shape(*shapes.T), config.least_keys
    lo, hi = _key_range(0, shape.q_len - 1, shape.offset, shape.left, shape.right, shape.kv_len)
    seen = (hi > lo) & (shape.q_len > 0)
    numbers = np.empty((len(shapes), len(Shape._fields) + len(Band._fields)), np.int64)
    numbers[:, : len(shape)] = shapes
    numbers[:, len(shape) :] = np.stack([lo // unit * seen, -(-hi // unit) * seen, -(-shape.kv_len // unit)], 1) * unit
    few = _is_few(shape.q_rows, config)
    for column in _OF_LENGTHS:
        numbers[few, column] = 0
    return numbers


_OF_LENGTHS = [Shape._fields.index(name) for name in ("q_len", "kv_len", "kv_rows", "offset", "left", "right")]


def _made_lists(numbers: np.ndarray, config: Config) -> tuple[ForwardList, ...]:
    """Return the result of `forward_lists` from the result of `_in_steps`."""
    columns = numbers.T
    shape, band = Shape(*columns[: len(Shape._fields)]), Band(*columns[len(Shape._fields) :])
    each = cut(shape, band, config)
    kinds = [rows for rows in (0, *config.packed_rows) if ((each.rows == rows) & (each.blocks > 0)).any()]
    return tuple(_forward_list(shape, band, each, rows, config) for rows in kinds)


_of_steps = _Kept(_made_lists)
_forward_lists = _Kept(lambda shapes, config: _of_steps(_in_steps(shapes, config), config))


def _forward_list(shape: Shape, band: Band, each: Cut, rows: int, config: Config) -> ForwardList:
    row, nth = _spread(np.where(each.rows == rows, each.blocks * each.parts, 0))
    shape, band, of = Shape(*_at(shape, row)), Band(*_at(band, row)), Cut(*_at(each, row))
    step = config.forward_of(rows).block_m
    block, part = np.divmod(nth, of.parts)
    start, split = block * step, of.parts > 1
    a = np.where(part > 0, of.first + (part - 1) * of.size, 0)
    b = np.where(part == of.parts - 1, band.end, of.first + part * of.size)
    lo, hi = _visible(shape, start, step, 1)
    few = _is_few(shape.q_rows, config)
    lo, hi = np.where(few, band.lo, lo), np.where(few, band.hi, hi)
    slot = np.where(split, np.cumsum(split) - 1, -1)  # programs are sorted by sequence, block and part
    first = np.flatnonzero(split & (part == 0))
    merges = np.stack([row[first], start[first], slot[first], of.parts[first]], 1)
    cost = np.maximum(np.minimum(b, hi) - np.maximum(a, lo), 0)
    return ForwardList(
        rows, _heaviest_first(cost, row, start, a, b, slot), np.ascontiguousarray(merges, np.int32), int(split.sum())
    )


def _at(columns: Sequence[np.ndarray], row: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the elements with the indices `row` of each column."""
    return (column[row] for column in columns)


def _made_gradients(shapes: np.ndarray, config: Config) -> Gradients:
    shape = Shape(*shapes.T)
    rows = block_rows(shape, config)
    kinds = {size: np.where(rows == size, _blocks(shape, rows, config.backward_q.block_m), 0)
             for size in (0, *config.packed_rows) if (rows == size).any()}  # fmt: skip
    return Gradients(
        _query_list(shape, -(-shape.q_rows // config.delta.block_m), config.delta, 0),
        _key_list(shape, config.backward_kv),
        {size: _query_list(shape, count, config.backward_q_of(size), size) for size, count in kinds.items()},
    )


_gradient_lists = _Kept(_made_gradients)


def _made_stored(shapes: np.ndarray, config: Config) -> StoredGradients:
    shape, tile = Shape(*shapes.T), config.backward_q_stored
    packed = block_rows(shape, config)
    of_one_head = shape._replace(kv_rows=np.where(packed == 0, shape.kv_rows, 0))
    return StoredGradients(
        _key_list(of_one_head, config.backward_kv_storing),
        _query_list(shape, np.where(packed == 0, _blocks(shape, packed, tile.block_m), 0), tile, 0),
    )


_stored_lists = _Kept(_made_stored)


def _query_list(shape: Shape, count: np.ndarray, tile: Tile, rows: int) -> np.ndarray:
    """Return the programs of `count` blocks of queries of each sequence.

    The blocks are packed blocks of `rows` rows, or with 0, blocks of one head.
    """
    row, nth = _spread(count)
    whole = Shape(*_at(shape, row))
    start = nth * tile.block_m
    lo, hi = _visible(whole, start, tile.block_m, whole.group if rows else 1)
    return _heaviest_first(np.maximum(hi - lo, 0), row, start)


def _key_list(shape: Shape, tile: Tile) -> np.ndarray:
    """Return the programs of all blocks of keys of each sequence."""
    row, nth = _spread(-(-shape.kv_rows // tile.block_n))
    whole = Shape(*_at(shape, row))
    start = nth * tile.block_n
    last = np.minimum(start + tile.block_n, whole.kv_len) - 1
    lo, hi = _query_range(start, last, whole.offset, whole.left, whole.right, whole.q_len)
    return _heaviest_first(np.where(start < whole.kv_len, np.maximum(hi - lo, 0), 0), row, start)


def _visible(shape: Shape, start: np.ndarray, step: int, share: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys [lo, hi) that are visible to blocks of `step` rows with first row `start`.

    `share` consecutive rows of a block are one query: 1, or in packed blocks the number of heads that share a key head.
    """
    first, last = start // share, np.minimum((start + step - 1) // share, shape.q_len - 1)
    lo, hi = _key_range(first, last, shape.offset, shape.left, shape.right, shape.kv_len)
    return np.where(first < shape.q_len, lo, 0), np.where(first < shape.q_len, hi, 0)


def _spread(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sequence of each program, and its index within the sequence; sequence i has `counts[i]` programs."""
    ends = np.cumsum(counts)
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - (ends - counts)[row]


def _heaviest_first(cost: np.ndarray, *columns: np.ndarray) -> np.ndarray:
    """Return the columns as (n, columns) int32, sorted by falling cost; ties keep their order."""
    order = np.argsort(-cost, kind="stable")
    return np.ascontiguousarray(np.stack(columns, 1)[order], np.int32)


def mask_parts(
    mask: Sequence[int], q_len: int, kv_len: int, batch: int, heads: int, tile: Tile
) -> list[tuple[int, int, int, int, int, int, int, int]]:
    """Return the programs of a mask's gradient, with the columns of MASK_ITEM.

    These are: first table row, number of rows, first head, number of heads, and the queries [m_lo, m_hi) and keys
    [n_lo, n_hi). `mask` is the shape (B, H, Sq, Sk) of the mask before broadcasting: broadcast dimensions are 1.
    """

    def spans(length: int, full: int, block: int) -> list[tuple[int, int]]:
        return [(0, full)] if length < full else [(at, min(at + block, full)) for at in range(0, full, block)]

    return [
        (b, b_end - b, h, h_end - h, m, m_end, n, n_end)
        for b, b_end in spans(mask[0], batch, 1)
        for h, h_end in spans(mask[1], heads, 1)
        for m, m_end in spans(mask[2], q_len, tile.block_m)
        for n, n_end in spans(mask[3], kv_len, tile.block_n)
    ]
