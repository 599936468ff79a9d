"""The programs of a launch cover each sequence and depend on its shape alone; those with the most work come first."""

import gc
import itertools
import weakref
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpoint_kernels.triton_backend.host.config import tiles
from flashpoint_kernels.triton_backend.host.configurations import Config, Tile
from flashpoint_kernels.triton_backend.host.schedule import (
    ForwardList,
    Shape,
    block_rows,
    forward_lists,
    gradient_lists,
)

shapes = st.builds(
    lambda q_rows, kv_rows, q_cut, kv_cut, left, right, bottom, kv_heads, group: Shape(
        q_rows - min(q_cut, q_rows),
        q_rows,
        kv_rows - min(kv_cut, kv_rows),
        kv_rows,
        (kv_rows - min(kv_cut, kv_rows)) - (q_rows - min(q_cut, q_rows)) if bottom else 0,
        left,
        right,
        kv_heads * group,
        group,
    ),
    st.one_of(st.integers(0, 12), st.integers(0, 200)),
    st.integers(0, 400),
    st.integers(0, 40),
    st.integers(0, 40),
    st.sampled_from([0, 3, 50, 1 << 30]),
    st.sampled_from([0, 5, 1 << 30]),
    st.booleans(),
    st.integers(1, 3),
    st.sampled_from([1, 2, 3, 8]),
)
CONFIG = Config(  # small problems have packed blocks, blocks of one head, and keys that are split
    Tile(64, 32), Tile(32, 64), Tile(64, 32), Tile(32, 32),
    split_keys=64, few_queries=8, least_keys=32, least_programs=4,
)  # fmt: skip


def array(*rows: Shape) -> np.ndarray:
    return np.array(rows, np.int64).reshape(-1, len(Shape._fields))


def programs(lists: tuple[ForwardList, ...], at: int) -> set[tuple[int, ...]]:
    """Return the programs of sequence `at`: (rows of a block, first row, first key, end of keys, part)."""
    mine = set()
    for each in lists:
        slots = {(row, i0): first for row, i0, first, _ in each.merges.tolist()}
        for row, i0, a, b, slot in each.items.tolist():
            if row == at:
                mine.add((each.rows, i0, a, b, slot - slots[row, i0] if slot >= 0 else -1))
    return mine


def seen(shape: Shape, first: int, last: int) -> range:
    """Return the range of the keys that any query from `first` to `last` may see, by testing each pair."""
    queries = range(first, min(last + 1, shape.q_len))
    keys = [j for j in range(shape.kv_len) for i in queries if -shape.left <= j - i - shape.offset <= shape.right]
    return range(min(keys), max(keys) + 1) if keys else range(0)


def test_blocks_follow_from_the_queries_and_the_group_alone() -> None:
    """A packed block has the smallest size that holds the queries of all heads of a group, or else the largest size."""
    few = CONFIG.few_queries

    def rows(queries: int, group: int) -> int:
        shape = array(Shape(queries, queries, 9, 9, 0, 0, 0, group, group))
        return int(block_rows(Shape(*shape.T), CONFIG)[0])

    assert [rows(1, group) for group in (1, 8, 16, 17, 32, 64)] == [16, 16, 16, 32, 32, 32]
    assert [rows(few, group) for group in (1, 2, 3)] == [16, 16, 32]
    assert rows(few + 1, 1) == rows(0, 1) == 0


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(shapes, min_size=1, max_size=6))
def test_how_a_sequence_is_cut_is_a_pure_function_of_its_own_shape(rows: list[Shape]) -> None:
    """Every visible key is in exactly one program, and the programs of a row depend on its sequence's shape alone."""
    lists = forward_lists(array(*rows), CONFIG)
    assert all(len(each.items) for each in lists), "a list without programs"
    for at, shape in enumerate(rows):
        alone = forward_lists(array(shape), CONFIG)
        mine = programs(lists, at)
        assert mine == programs(alone, 0)
        assert bool(mine) == (shape.q_rows > 0)
        for kind, i0 in {program[:2] for program in mine}:
            assert kind == int(block_rows(Shape(*array(shape).T), CONFIG)[0])
            step, share = CONFIG.forward_of(kind).block_m, shape.group if kind else 1
            assert i0 % step == 0
            assert i0 < shape.q_rows * share
            spans = sorted((a, b) for *block, a, b, _ in mine if block == [kind, i0])
            assert spans[0][0] == 0
            assert all(left[1] == right[0] for left, right in itertools.pairwise(spans))
            assert spans[-1][1] >= shape.kv_len
            assert all(a % CONFIG.forward_of(kind).block_n == 0 for a, _ in spans)
            assert all(b - a <= CONFIG.split_keys for a, b in spans[1:])
            if i0 // share < shape.q_len:  # other blocks are padding, whose rows see no key
                keys = seen(shape, i0 // share, (i0 + step - 1) // share)
                assert all(a < keys.stop + CONFIG.least_keys for a, _ in spans)
    for each in lists:
        parts = [(row, first + n) for row, _, first, count in each.merges.tolist() for n in range(count)]
        assert [slot for _, slot in parts] == list(range(each.slots))
        assert {(row, slot) for row, _, _, _, slot in each.items.tolist() if slot >= 0} == set(parts)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(shapes, min_size=1, max_size=4))
def test_the_blocks_of_gradients_cover_each_sequence_once_heaviest_first(rows: list[Shape]) -> None:
    lists = gradient_lists(array(*rows), CONFIG)
    delta, tile = CONFIG.delta.block_m, CONFIG.backward_kv
    assert sorted(lists.delta.tolist()) == [
        [at, i0] for at, shape in enumerate(rows) for i0 in range(0, shape.q_rows, delta)
    ]
    assert sorted(lists.keys.tolist()) == [
        [at, j0] for at, shape in enumerate(rows) for j0 in range(0, shape.kv_rows, tile.block_n)
    ]
    kinds = [int(kind) for kind in block_rows(Shape(*array(*rows).T), CONFIG)]
    for kind, items in lists.queries.items():
        step = CONFIG.backward_q_of(kind).block_m
        assert sorted(items.tolist()) == [
            [at, i0]
            for at, (shape, own) in enumerate(zip(rows, kinds, strict=True))
            if own == kind
            for i0 in range(0, shape.q_rows * (shape.group if kind else 1), step)
        ]
        share = [rows[at].group if kind else 1 for at, _ in items.tolist()]
        cost = [
            len(seen(rows[at], i0 // n, (i0 + step - 1) // n))
            for (at, i0), n in zip(items.tolist(), share, strict=True)
        ]
        assert cost == sorted(cost, reverse=True)


def decode(kv_len: int, heads: int, kv_heads: int, q_len: int = 1) -> Shape:
    return Shape(q_len, q_len, kv_len, kv_len, kv_len - q_len, 1 << 30, 0, heads, heads // kv_heads)


@pytest.mark.parametrize("arch", [90, *(pytest.param(arch, marks=pytest.mark.slow) for arch in (80, 100))])
@pytest.mark.parametrize(("kv_len", "heads", "kv_heads"), [(4096, 32, 8), (4096, 64, 8), (32768, 8, 1), (4096, 32, 32)])
def test_few_sequences_of_many_keys_have_programs_for_a_whole_gpu(
    arch: int, kv_len: int, heads: int, kv_heads: int
) -> None:
    """One sequence has at least 128 programs, and in a batch of 64 each sequence has the same programs."""
    config = tiles(arch, "bfloat16", 128, 128, 0)
    (alone,) = forward_lists(array(decode(kv_len, heads, kv_heads)), config)
    assert len(alone.items) * kv_heads >= 128
    batch = forward_lists(array(*[decode(kv_len, heads, kv_heads)] * 64), config)
    assert {frozenset(programs(batch, at)) for at in range(64)} == {frozenset(programs((alone,), 0))}


def test_a_loop_whose_keys_grow_makes_new_lists_once_in_least_keys() -> None:
    config: Config = replace(CONFIG, split_keys=256, least_keys=64)
    lists = [
        forward_lists(array(decode(kv_len, 4, 2), decode(kv_len + 5, 4, 2)), config)
        for kv_len in range(1000, 1000 + 256)
    ]
    assert len(set(map(id, lists))) <= 2 * (256 // 64 + 1)


def test_lists_are_bounded() -> None:
    kept = [weakref.ref(forward_lists(array(decode(64 * kv_len, 4, 2)), CONFIG)[0].items) for kv_len in range(600)]
    gc.collect()
    assert 0 < sum(one() is not None for one in kept) <= 300
    many = array(*[decode(90, 4, 2)] * 100)
    assert forward_lists(many, CONFIG) is not forward_lists(many, CONFIG), "large launches are not kept"
