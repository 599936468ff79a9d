"""Heads whose dS is stored are divided into chunks that fit the workspace; the path depends on a sequence alone."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st

from flashpoint_kernels.problems.workspace import ITEM, MOST, ds_elements
from flashpoint_kernels.triton_backend.host.config import tiles
from flashpoint_kernels.triton_backend.host.configurations import HOPPER, STORED
from flashpoint_kernels.triton_backend.host.stored import Chunk, Pieces, is_stored
from flashpoint_kernels.triton_backend.host.table import SHAPE
from flashpoint_kernels.triton_backend.kernels import columns as col

HEAD = 16  # elements between heads, in all tensors of these tests
sequences = st.lists(
    st.tuples(st.integers(0, 600), st.integers(0, 600), st.integers(1, 4), st.integers(1, 3), st.booleans()), max_size=6
)


def table(of: list[tuple[int, int, int, int, bool]]) -> np.ndarray:
    """Return a table of sequences: queries, keys, key heads, query heads for each, and whether dk is requested."""
    ints = np.zeros((len(of), col.WIDTH.value), np.int64)
    for row, (q_len, kv_len, kv_heads, group, dk) in zip(ints, of, strict=True):
        row[col.Q_LEN.value : col.KV_ROWS.value + 1] = q_len, q_len, kv_len, kv_len
        row[[col.HEADS.value, col.GROUP.value]] = kv_heads * group, group
        for column in (col.Q, col.K, col.V, col.DO, col.DQ, *([col.DK] if dk else []), col.STATS):
            row[column.value : column.value + 2] = 1 << 20, HEAD
    return ints


@given(of=sequences, most=st.sampled_from([1, 1 << 17, 1 << 18, 1 << 20, 1 << 30]), data=st.data())
def test_every_key_head_is_in_one_chunk_and_no_chunk_exceeds_the_workspace(
    of: list[tuple[int, int, int, int, bool]], most: int, data: st.DataObject
) -> None:
    ints = table(of)
    stored = np.array([data.draw(st.booleans()) for _ in of], bool)
    pieces = Pieces(ints, stored, most, torch.device("cpu"))
    added = pieces.table(ints)
    assert list(pieces.of_table[: len(ints)]) == list(range(len(ints)))
    assert len(pieces.of_table) == len(ints) + len(added)
    found: list[tuple[int, int]] = []  # sequence and key head
    memory = pieces.workspace.data_ptr(), pieces.workspace.data_ptr() + pieces.workspace.nbytes
    for chunk in pieces.chunks:
        spans, heads = [], 0
        for at, row in zip(chunk.rows, chunk.of, strict=True):
            assert stored[row]
            piece, whole = added[at - len(ints)], ints[row]
            group = whole[col.GROUP.value]
            kv_heads = piece[col.HEADS.value] // group
            first = (piece[col.K.value] - whole[col.K.value]) // (2 * HEAD)
            for column, size, skipped in (
                (col.Q, 2, first * group), (col.DO, 2, first * group), (col.DQ, 2, first * group), (col.V, 2, first),
                (col.DK, 2, first if whole[col.DK.value] else 0), (col.DV, 2, 0), (col.STATS, 4, first * group),
            ):  # fmt: skip
                assert piece[column.value] - whole[column.value] == size * HEAD * skipped
            assert kv_heads <= chunk.kv_heads
            assert piece[col.HEADS.value] <= chunk.heads
            found += [(row, first + n) for n in range(kv_heads)]
            of_head = ds_elements(whole[col.Q_LEN.value], whole[col.KV_LEN.value])
            assert piece[col.DS.value + 1] == of_head
            assert piece[col.DS.value + 2] * 4 == ds_elements(256, whole[col.KV_LEN.value])
            spans.append((piece[col.DS.value], piece[col.DS.value] + ITEM * of_head * piece[col.HEADS.value]))
            heads += kv_heads
        assert len(set(chunk.of)) == len(chunk.of)
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
        assert all(memory[0] <= a <= b <= memory[1] for a, b in spans)
        assert heads == 1 or spans[-1][1] - spans[0][0] <= most
    expected = [(row, n) for row in np.flatnonzero(stored) for n in range(of[row][2])]
    assert sorted(found) == expected


def test_work_items_of_a_chunk_keep_their_order() -> None:
    items = np.array([[2, 0], [0, 128], [2, 128], [1, 0]], np.int32)
    chunk = Chunk(np.array([7, 8]), np.array([0, 2]), 1, 1)
    assert chunk.items(items).tolist() == [[8, 0], [7, 128], [8, 128]]
    assert items[0, 0] == 2, "the lists are cached"
    assert chunk.items(items[:0]).tolist() == []


@pytest.mark.parametrize(
    ("q_len", "kv_len", "group", "expected"),
    [
        (32768, 32768, 1, True),  # 2 GiB
        (32769, 32768, 1, False),
        (16384, 16384, 4, True),
        (16384, 16384, 5, False),
        (64, 4096, 1, False),  # packed blocks
        (65, 0, 1, True),
    ],
)
def test_the_size_of_one_key_head_decides(q_len: int, kv_len: int, group: int, expected: bool) -> None:
    config = tiles(90, "bfloat16", 128, 128, 0, hopper=True)
    shapes = table([(q_len, kv_len, 1, group, True), (q_len, kv_len, 8, group, False)])[:, SHAPE]
    assert is_stored(shapes, config).tolist() == [expected, expected]


def test_tiles_fit_the_stored_layout() -> None:
    """Blocks of queries divide the 256 to which memory is rounded, and rows of statistics cover whole stored tiles."""
    for dim, of in HOPPER.items():
        config = tiles(90, "float16", dim, dim, 0, hopper=True)
        assert 256 % of["backward_q_stored"].block_m == 0
        assert config.delta.block_m % 64 == 0
        assert {of[name].block_n for name in of if name.endswith(("_storing", "_stored"))} == {128}
        assert {of[name].block_m for name in of if name.endswith("_storing")} <= {32, 64}
    assert MOST == 2 << 30


def test_general_tiles_fit_the_stored_layout() -> None:
    """Blocks divide the 256 queries and 128 keys to which memory is rounded, and statistics cover whole blocks."""
    for arch, by_dim in STORED.items():
        for dim in by_dim:
            config = tiles(arch, "float16", dim, dim, 0)
            assert config.storable
            for tile in (config.backward_kv_storing, config.backward_q_stored):
                assert (256 % tile.block_m, 128 % tile.block_n) == (0, 0)
            assert config.delta.block_m % config.backward_kv_storing.block_m == 0


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        ((80, "bfloat16", 128, 128, 0), True),
        ((80, "bfloat16", 24, 40, 0), True),  # padded to 64
        ((80, "bfloat16", 32, 16, 0), False),
        ((89, "float16", 64, 64, 0), False),
        ((89, "float16", 64, 65, 0), False),
        ((89, "float16", 64, 129, 0), True),
        ((86, "bfloat16", 128, 128, 0), False),
        ((86, "bfloat16", 64, 64, 0), True),
        ((86, "bfloat16", 136, 128, 0), True),
        ((120, "float32", 128, 128, 0), False),
        ((100, "bfloat16", 128, 128, 1), False),
        ((86, "bfloat16", 257, 64, 0), False),
    ],
)
def test_ds_is_stored_where_it_saves_time(problem: tuple[int, str, int, int, int], expected: bool) -> None:
    assert tiles(*problem).storable == expected
    assert not tiles(*problem, blocks=True).storable


def test_without_fences_no_product_reads_an_asynchronous_copy_of_ds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tiles(90, "float16", 128, 128, 0).backward_q_stored.num_stages == 3
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    config = tiles(90, "float16", 128, 128, 0)
    assert (config.backward_kv_storing.num_stages, config.backward_q_stored.num_stages) == (1, 1)
