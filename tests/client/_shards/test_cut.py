"""A sequence is cut into pieces: each visible pair (query, key) is in one piece, whose `offset` fits its diagonal."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flashpoint._shards.cut import UNBOUNDED, Band, Piece

LENGTH = st.integers(0, 12)
SIDE = st.one_of(st.just(UNBOUNDED), st.integers(0, 14))


OFFSET = st.integers(-20, 20)


def seen(q_len, kv_len, offset, left, right):
    """Return the visible pairs of a sequence as a boolean matrix (q_len, kv_len), by the definition of the window."""
    i, j = np.arange(q_len)[:, None], np.arange(kv_len)
    return (j >= i + offset - left) & (j <= i + offset + right)


@settings(max_examples=120)
@given(st.builds(Band, LENGTH, LENGTH, OFFSET, SIDE, SIDE), st.integers(1, 4), st.integers(1, 4))
@example(Band(0, 5, 5, UNBOUNDED, 0), 2, 2)
@example(Band(5, 0, -5, UNBOUNDED, 0), 2, 2)
def test_every_pair_that_is_seen_is_in_one_piece(band, query_parts, key_parts):
    actual = np.zeros((band.q_len, band.kv_len), int)
    for piece in band.pieces(query_parts, key_parts):
        pairs = seen(*piece.shape, piece.offset, band.left, band.right)
        assert band.pairs(piece) == pairs.sum()
        assert pairs[[0, -1]].any(1).all()
        assert pairs[:, [0, -1]].any(0).all()
        actual[slice(*piece.queries), slice(*piece.keys)] += pairs
    np.testing.assert_array_equal(actual, seen(*band))


BANDS = [Band(999, 999, 0, UNBOUNDED, 0), Band(300, 2000, 1700, 64, 0), Band(7, 5000, 0, 9999, 9999)]


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("parts", [(1, 3), (3, 1), (2, 2), (1, 7)])
def test_the_work_is_shared_equally(band, parts):
    """No piece has more pairs than an equal share plus a row and a column, because cuts lie between rows or columns."""
    work = [band.pairs(piece) for piece in band.pieces(*parts)]
    share = sum(work) / (parts[0] * parts[1])
    step = max(band.pairs(Piece((i, i + 1), (0, band.kv_len), band.offset + i)) for i in range(band.q_len))
    assert max(work) <= share + step + band.q_len
