"""Where a sequence is cut: every pair that is seen is in one piece, which says so in the service's own options."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flashpoint._shards.cut import UNBOUNDED, Band, Piece

LENGTH = st.integers(0, 12)
SIDE = st.one_of(st.just(UNBOUNDED), st.integers(0, 14))


@st.composite
def bands(draw):
    q_len, kv_len = draw(LENGTH), draw(LENGTH)
    return Band(q_len, kv_len, draw(st.sampled_from((0, kv_len - q_len))), draw(SIDE), draw(SIDE))


def seen(q_len, kv_len, offset, left, right):
    """The pairs of a sequence, as the contract says it."""
    i, j = np.arange(q_len)[:, None], np.arange(kv_len)
    return (j >= i + offset - left) & (j <= i + offset + right)


def seen_by_the_service(q_len, kv_len, causal, causal_alignment, window):
    left, right = (UNBOUNDED if side < 0 else side for side in window)
    offset = {"top_left": 0, "bottom_right": kv_len - q_len}[causal_alignment]
    return seen(q_len, kv_len, offset, left, min(right, 0) if causal else right)


@settings(max_examples=80)
@given(bands(), st.integers(1, 4), st.integers(1, 4), st.booleans())
@example(Band(0, 5, 5, UNBOUNDED, 0), 2, 2, True)
@example(Band(5, 0, -5, UNBOUNDED, 0), 2, 2, True)
def test_every_pair_that_is_seen_is_in_one_piece(band, query_parts, key_parts, straight):
    found = np.zeros((band.q_len, band.kv_len), int)
    for piece in band.pieces(query_parts, key_parts, straight=straight):
        options = band.options(piece)
        assert min(options["window"]) >= -1
        own = seen_by_the_service(*piece.shape, **options)
        assert band.pairs(piece) == own.sum()
        found[slice(*piece.queries), slice(*piece.keys)] += own
        if straight:
            assert piece.aligned or piece.below or piece.above
    np.testing.assert_array_equal(found, seen(*band))


@settings(max_examples=40)
@given(LENGTH, LENGTH, st.booleans(), st.integers(1, 4), st.integers(1, 4))
def test_causal_pieces_need_no_window(q_len, kv_len, top_left, query_parts, key_parts):
    """So that a backend that knows causality alone computes them."""
    band = Band(q_len, kv_len, 0 if top_left else kv_len - q_len, UNBOUNDED, 0)
    for piece in band.pieces(query_parts, key_parts, straight=True):
        assert band.options(piece)["window"] == (-1, -1)


BANDS = [Band(999, 999, 0, UNBOUNDED, 0), Band(300, 2000, 1700, 64, 0), Band(7, 5000, 0, 9999, 9999)]


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("parts", [(1, 3), (3, 1), (2, 2), (1, 7)])
def test_the_work_is_shared_equally(band, parts):
    """To a row and a column, which are what a cut can be moved by."""
    work = [band.pairs(piece) for piece in band.pieces(*parts, straight=False)]
    share = sum(work) / (parts[0] * parts[1])
    step = max(band.pairs(Piece((i, i + 1), (0, band.kv_len), band.offset + i)) for i in range(band.q_len))
    assert max(work) <= share + step + band.q_len
