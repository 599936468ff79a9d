"""Find tile bounds: the keys that a block of queries may see, and the queries that may see a block of keys.

Key j is visible to query i iff  i + offset − left <= j <= i + offset + right  (and j < kv_len). The same functions run
in Python (work lists, and the `cpu` and `tiled` backends, which do not import Triton) and, compiled, in the kernels
(triton_backend/kernels/bounds.py).

All functions take the first and last index of the block (inclusive) and return a half-open range [lo, hi), which is
empty if lo >= hi.
"""


def key_range(i_first: int, i_last: int, offset: int, left: int, right: int, kv_len: int) -> tuple[int, int]:
    """Return the range of keys that any query of the block may see."""
    lo = min(max(i_first + offset - left, 0), kv_len)
    hi = max(min(i_last + offset + right + 1, kv_len), 0)
    return lo, hi


def full_key_range(i_first: int, i_last: int, offset: int, left: int, right: int, kv_len: int) -> tuple[int, int]:
    """Return the range of keys that every query of the block may see: tiles of keys inside it need no mask."""
    lo = min(max(i_last + offset - left, 0), kv_len)
    hi = max(min(i_first + offset + right + 1, kv_len), 0)
    return lo, hi


def query_range(j_first: int, j_last: int, offset: int, left: int, right: int, q_len: int) -> tuple[int, int]:
    """Return the range of queries that may see any key of the block."""
    lo = min(max(j_first - offset - right, 0), q_len)
    hi = max(min(j_last - offset + left + 1, q_len), 0)
    return lo, hi


def full_query_range(j_first: int, j_last: int, offset: int, left: int, right: int, q_len: int) -> tuple[int, int]:
    """Return the range of queries that may see every key of the block."""
    lo = min(max(j_last - offset - right, 0), q_len)
    hi = max(min(j_first - offset + left + 1, q_len), 0)
    return lo, hi
