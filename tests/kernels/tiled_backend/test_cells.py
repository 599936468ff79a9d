"""Cells (cells.py) are the parts of a score matrix that are computed with a block mask.

The flags of a cell agree with the masks of its scores, and each visible cell is computed once.
"""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpoint_contract.options import Options
from flashpoint_kernels import Problem
from flashpoint_kernels.tiled_backend.cells import Cells, groups


@given(
    block=st.sampled_from([(16, 16), (64, 128), (144, 272), (256, 48)]), q_len=st.integers(1, 400),
    kv_len=st.integers(1, 500), heads=st.sampled_from([1, 3]), seed=st.integers(0, 99),
    window=st.sampled_from([(-1, -1), (60, 5), (300, 0), (-1, 0), (0, 0)]),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_a_cell_is_seen_cut_or_at_an_edge_by_its_scores(
    block: tuple[int, int], q_len: int, kv_len: int, heads: int, seed: int, window: tuple[int, int]
) -> None:
    rng = np.random.default_rng(seed)
    mask = rng.random((heads, -(-q_len // block[0]), -(-kv_len // block[1]))) < 0.5
    q, k = torch.empty(1, 3, q_len, 8), torch.empty(1, 3, kv_len, 8)
    problem = Problem.create({"q": q, "k": k, "v": k}, Options(window=window))
    spec = Problem.create(
        {"q": q, "k": k, "v": k, "block_mask": torch.from_numpy(mask)[None].expand(1, heads, -1, -1)},
        Options(window=window, block_size=block),
    ).spec
    cells = Cells.of(mask, spec, problem.rows[0])
    for n, size in zip(cells.size, block, strict=True):
        assert 128 <= n < 256
        assert n % size == 0 or size % n == 0 or n == 128
    i, j = np.arange(q_len)[:, None], np.arange(kv_len)
    ahead = j - i - (kv_len - q_len)
    left, right = (10**6 if n < 0 else n for n in window)
    band = (ahead >= -left) & (ahead <= right)
    blocks = mask[:, np.arange(q_len) // block[0]][:, :, np.arange(kv_len) // block[1]]
    for a, i0 in enumerate(range(0, q_len, cells.size[0])):
        for b, j0 in enumerate(range(0, kv_len, cells.size[1])):
            part = np.s_[i0 : i0 + cells.size[0], j0 : j0 + cells.size[1]]
            for h in range(heads):
                scores = blocks[h][part]
                assert cells.cut[h, a, b] == (not scores.all())
                assert cells.some[h, a, b] or not (scores & band[part]).any()
                assert not cells.some[h, a, b] or scores.any()
            assert cells.edge[a, b] or (band[part].all() and j0 + cells.size[1] <= kv_len)


@given(
    heads=st.integers(1, 4), strips=st.integers(1, 6), columns=st.integers(1, 6), each=st.integers(1, 4),
    together=st.integers(1, 4), seed=st.integers(0, 99),
)  # fmt: skip
def test_each_cell_is_in_one_wave_in_the_order_of_its_strip(
    heads: int, strips: int, columns: int, each: int, together: int, seed: int
) -> None:
    seen = np.random.default_rng(seed).random((heads, strips, columns)) < 0.4
    found: dict[int, list[int]] = {}
    for group in groups(seen, each, together):
        assert len(group.strips) <= each * together
        for wave in group.waves:
            assert len(wave)
            for strip, column in zip(group.strips, wave, strict=False):
                found.setdefault(int(strip), []).append(int(column))
    expected = {
        head * strips + strip: [head * columns + int(column) for column in np.flatnonzero(seen[head, strip])]
        for head in range(heads)
        for strip in range(strips)
        if seen[head, strip].any()
    }
    assert found == expected
