"""For a block mask, lists name the tiles that the mask and the band leave visible, first those needing no mask test."""

from typing import Any

import pytest
import torch

from flashpoint_kernels import Options, Problem
from flashpoint_kernels.problems.problem import with_forwards
from flashpoint_kernels.triton_backend.host import launch
from flashpoint_kernels.triton_backend.kernels.blocks import HEADER, UNIT
from tests.support.kernels.serving import drawn_blocks
from tests.support.kernels.solving import qkv

SIZE = (16, 48)


def lists_of(calls: Any, kernel: str) -> tuple[Any, list[list[int]], list[int], int]:
    """Run the call of `kernel`, which writes lists; return its tile, items, lists and number of lists per item."""
    (call,) = [call for call in calls if call.kernel.__name__ == kernel]
    call.run()
    _, items, memory, most = call.args()
    return call.tile, items.view(-1, 5).tolist(), memory.tolist(), most


def read(memory: list[int], place: int, tiles: int, nth: int) -> tuple[int, list[tuple[int, int]]]:
    """Return how many tiles of a list need no mask test, and (tile, 1 if the mask hides a part of it) for all tiles."""
    start = (place + nth * -(-(tiles + HEADER.value) // UNIT.value)) * UNIT.value
    untested, count = memory[start : start + 2]
    words = memory[start + HEADER.value : start + HEADER.value + count]
    return untested, [(word // 2, word % 2) for word in words]


def seen_by(blocks: torch.Tensor, q_len: int, kv_len: int, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which scores the mask leaves visible (H, Sq, Sk), and which the band leaves visible (Sq, Sk)."""
    of_mask = blocks.repeat_interleave(SIZE[0], -2).repeat_interleave(SIZE[1], -1)[:, :q_len, :kv_len]
    band = torch.ones(q_len, kv_len, dtype=torch.bool)
    return of_mask, band.tril(kv_len - q_len) if causal else band


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_a_block_of_queries_lists_its_tiles_of_keys(causal: bool, shared: bool) -> None:
    q_len, kv_len, heads = 70, 150, 2
    t = {n: x.cpu() for n, x in qkv(1, heads, q_len, kv_len, 16).items() if n != "do"}
    blocks = drawn_blocks(1 if shared else heads, -(-q_len // SIZE[0]), -(-kv_len // SIZE[1]), share=0.5).cpu()
    problem = Problem.create(t | {"block_mask": blocks[None]}, Options(causal=causal, block_size=SIZE))
    tile, items, memory, most = lists_of(launch.forward_calls([problem]), "list_key_tiles")
    assert most == (1 if shared else heads)
    mask, band = seen_by(blocks, q_len, kv_len, causal)
    for _, i0, first, last, place in items:
        rows = slice(i0, min(i0 + tile.block_m, q_len))
        end = int(band[rows].any(0).nonzero().max()) + 1  # the end of the keys that a query of the block sees
        for nth in range(most):
            untested, listed = read(memory, place, -(-(last - first) // tile.block_n), nth)
            expected = {}
            for j0 in range(first, min(last, end), tile.block_n):
                columns = slice(j0, min(j0 + tile.block_n, end))
                if mask[nth, rows, columns].any():
                    expected[j0 // tile.block_n] = int(not mask[nth, rows, columns].all())
            assert dict(listed) == expected
            for n, cut in listed[:untested]:
                columns = slice(n * tile.block_n, (n + 1) * tile.block_n)
                assert not cut
                assert columns.stop <= kv_len
                assert band[rows, columns].all(), "a tile without a test sees every score"
            for n, cut in listed[untested:]:
                columns = slice(n * tile.block_n, (n + 1) * tile.block_n)
                assert cut or columns.stop > kv_len or i0 + tile.block_m > q_len or not band[rows, columns].all()


@pytest.mark.parametrize("shared", [False, True])
def test_a_block_of_keys_lists_the_tiles_of_queries_of_its_group(shared: bool) -> None:
    q_len, kv_len, heads, group = 70, 90, 4, 2
    t = {n: x.cpu() for n, x in qkv(1, heads, q_len, kv_len, 16, kv_heads=heads // group).items()}
    blocks = drawn_blocks(1 if shared else heads, -(-q_len // SIZE[0]), -(-kv_len // SIZE[1]), share=0.4).cpu()
    problem = Problem.create(t | {"block_mask": blocks[None]}, Options(block_size=SIZE), "backward")
    (whole,) = with_forwards([problem])[1]
    tile, items, memory, most = lists_of(launch.backward_calls([whole], [{}]), "list_query_tiles")
    assert most == (1 if shared else heads // group)
    together = 1 if shared else group
    mask, _ = seen_by(blocks, q_len, kv_len, False)
    for _, j0, _, last, place in items:
        assert last == q_len
        columns = slice(j0, min(j0 + tile.block_n, kv_len))
        tiles = -(-q_len // tile.block_m)
        for nth in range(most):
            _, listed = read(memory, place, tiles * together, nth)
            expected = {}
            for h in range(together):
                for n in range(tiles):
                    part = mask[nth * together + h, n * tile.block_m : (n + 1) * tile.block_m, columns]
                    if part.any():
                        expected[n * together + h] = int(not part.all())
            assert dict(listed) == expected
