"""The columns of the table of sequences that a launch reads: one row for each sequence.

A tensor takes three columns: the address of (row 0, head 0), then the strides of a head and of a row, in elements. The
last dimension has stride 1.
"""

import triton.language as tl

# int64 columns
Q, K, V, O, LSE = (tl.constexpr(3 * n) for n in range(5))  # noqa: E741
DO, DQ, DK, DV, DLSE, STATS = (tl.constexpr(3 * n) for n in range(5, 11))
MASK, DMASK = tl.constexpr(33), tl.constexpr(37)  # address; strides of a head, a row, a column
ALIBI, SINKS, DSINKS = tl.constexpr(41), tl.constexpr(42), tl.constexpr(43)  # address of head 0, stride 1; 0: none
Q_LEN, Q_ROWS, KV_LEN, KV_ROWS = (tl.constexpr(n) for n in range(44, 48))  # _LEN: valid rows; _ROWS: with padding
# query i sees key j iff -LEFT <= j - i - OFFSET <= RIGHT
OFFSET, LEFT, RIGHT = (tl.constexpr(n) for n in range(48, 51))
HEADS, GROUP = tl.constexpr(51), tl.constexpr(52)  # query heads, and how many of them share a key/value head
# dropout: the sequence's index in its request and the seed, for Philox; a random word below DROP_BELOW drops the weight
INDEX, SEED, DROP_BELOW = (tl.constexpr(n) for n in range(53, 56))
# address of the sequence's page numbers (int32), keys of a page, pages of the pool
PAGES, PAGE_SIZE, POOL = (tl.constexpr(n) for n in range(56, 59))
K_PAGE, V_PAGE = tl.constexpr(59), tl.constexpr(60)  # strides of a page
K_SCALE, V_SCALE = tl.constexpr(61), tl.constexpr(65)  # address of float32 scales; strides of a head, a row, a page
BLOCKS = tl.constexpr(69)  # address of the block mask; strides of a head, a row, a column
BLOCK_SIZE = tl.constexpr(73)  # two columns: queries and keys of a block of the block mask
# address of the stored dS of head 0; its strides, in elements, of a head and of 64 queries (stored.py); 0: none
DS = tl.constexpr(75)
WIDTH = tl.constexpr(78)

# float32 columns
SCALE, SOFTCAP, KEEP_SCALE = (tl.constexpr(n) for n in range(3))
SCALARS = tl.constexpr(4)
