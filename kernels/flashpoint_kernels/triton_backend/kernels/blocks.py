"""Apply block masks: list the tiles to compute for each work item and head, and test the scores of tiles that are cut.

The mask cuts a tile if it hides some of its scores, but not all. A separate kernel makes the lists on the device,
before the kernels that read them. So the host does not wait for the mask, and the mask may change under a CUDA graph. A
list is int32: the number of tiles that need no test of any score, the number of all tiles, and one word per tile,
untested tiles first. A word is twice the tile's number, plus 1 if the mask cuts the tile. Heads that share a block mask
share the lists.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashpoint_kernels.triton_backend.kernels import columns as col
from flashpoint_kernels.triton_backend.kernels.bounds import query_range
from flashpoint_kernels.triton_backend.kernels.tiles import block_at, key_stretches, load_sequence

# Columns of a work item: table row, first row of the block, the keys [lo, hi) of its part (for a block of keys: the
# queries [0, q_len)), and the position of its lists in units of UNIT.
ITEM = tl.constexpr(5)
HEADER = tl.constexpr(2)
UNIT = tl.constexpr(16)
_CHUNK = tl.constexpr(64)  # number of tiles that one iteration examines


@triton.jit
def list_at(lists, place, count, nth, t):
    """Return the pointer to the list of head `nth` of a work item, whose lists begin at `place` (see ITEM).

    A list has at most `count` tiles. If all heads of the sequence share a block mask, there is only the list of head 0.
    """
    nth = tl.where(tl.load(t + col.BLOCKS + 1) == 0, 0, nth)
    return lists + (place + nth * tl.cdiv(count + HEADER, UNIT)).to(tl.int64) * UNIT


@triton.jit
def listed_stretches(tiles, C: tl.constexpr):
    """Return (lo, full_lo, full_hi, hi) like `tiles.key_stretches`, but as positions in the list `tiles` × BLOCK_N."""
    full_hi, hi = tl.load(tiles) * C.BLOCK_N, tl.load(tiles + 1) * C.BLOCK_N
    return 0, 0, full_hi, hi


@triton.jit
def key_tile(at, tiles, C: tl.constexpr):
    """Return (first key of a tile, 1 if the block mask cuts the tile).

    `at` is the first key itself; with a block mask it is the tile's position in the list `tiles` × BLOCK_N.
    """
    j0, cut = at, 0
    if C.BLOCKS:
        word = tl.load(tiles + HEADER + at // C.BLOCK_N)
        j0, cut = (word >> 1) * C.BLOCK_N, word & 1
    return j0, cut


@triton.jit
def query_tile(nth, at, tiles, heads, C: tl.constexpr):
    """Return (index of the query head in its group, first query, 1 if the block mask cuts it) of a tile of queries.

    Without a block mask, `nth` is the index and `at` the first query. With one, `at` is the tile's position in the list
    `tiles` × BLOCK_M. `heads` is the number of heads whose tiles are in this list: all of the group, and then `nth` is
    0; or 1 if all heads share a mask, and then `nth` is the index.
    """
    i0, cut = at, 0
    if C.BLOCKS:
        word = tl.load(tiles + HEADER + at // C.BLOCK_M)
        nth += (word >> 1) % heads
        i0, cut = (word >> 1) // heads * C.BLOCK_M, word & 1
    return nth, i0, cut


@triton.jit
def unskipped(seen, i, j, cut, seq, C: tl.constexpr):
    """Return `seen` without the scores that the block mask hides; `cut` is 0 if the mask does not cut this tile."""
    if C.BLOCKS:
        bits = tl.full(seen.shape, 1, tl.int8)
        if cut != 0:
            t, band = seq.row, seq.band
            rows = i // tl.load(t + col.BLOCK_SIZE).to(tl.int32) * tl.load(t + col.BLOCKS + 2)
            columns = j // tl.load(t + col.BLOCK_SIZE + 1).to(tl.int32) * tl.load(t + col.BLOCKS + 3)
            p = tl.load(t + col.BLOCKS).to(tl.pointer_type(tl.int8)) + (seq.head * tl.load(t + col.BLOCKS + 1) + rows)
            bits = tl.load(p + columns, mask=(i < band.q_len) & (j < band.kv_len), other=0)
        seen = seen & (bits != 0)
    return seen


class _Span(NamedTuple):
    """The rows or columns of the block mask, `first` to `last` inclusive, that one tile overlaps.

    The fields are scalars, or (_CHUNK,) for several tiles. `steps` is the largest number of rows or columns of a tile.
    """

    first: Any
    last: Any
    steps: Any


@triton.jit
def _seen_of(t, head, heads, rows, columns, wanted):
    """Return (some, every) for _CHUNK tiles, each 0 or 1: whether any, and whether all blocks of a tile are true.

    The blocks of a tile are in the spans `rows` and `columns` of the block masks of `heads` heads from `head` on.
    `wanted` is false for elements without a tile.
    """
    p = tl.load(t + col.BLOCKS).to(tl.pointer_type(tl.int8))
    stride, row, column = tl.load(t + col.BLOCKS + 1), tl.load(t + col.BLOCKS + 2), tl.load(t + col.BLOCKS + 3)
    some = tl.full([_CHUNK], 0, tl.int32)
    every = tl.full([_CHUNK], 1, tl.int32)
    for h in range(0, heads):
        for r in range(0, rows.steps):
            for c in range(0, columns.steps):
                i, j = rows.first + r, columns.first + c
                valid = wanted & (i <= rows.last) & (j <= columns.last)
                bits = tl.load(p + ((head + h) * stride + i * row + j * column), mask=valid, other=0)
                some = tl.where(bits != 0, 1, some)
                every = tl.where(valid & (bits == 0), 0, every)
    return some, every


@triton.jit
def tile_is_seen(i0, j0, seq, C: tl.constexpr):
    """Return whether any block that overlaps the tile at query i0 and key j0 is true in the block mask."""
    t, band = seq.row, seq.band
    height, width = tl.load(t + col.BLOCK_SIZE).to(tl.int32), tl.load(t + col.BLOCK_SIZE + 1).to(tl.int32)
    r0, r1 = i0 // height, (tl.minimum(i0 + C.BLOCK_M, band.q_len) - 1) // height
    c0, c1 = j0 // width, (tl.minimum(j0 + C.BLOCK_N, band.kv_len) - 1) // width
    none = tl.full([_CHUNK], 0, tl.int32)
    rows = _Span(first=r0, last=r1, steps=r1 - r0 + 1)
    columns = _Span(first=none + c0, last=c1, steps=c1 - c0 + 1)
    some, _ = _seen_of(t, seq.head, 1, rows, columns, none == 0)
    return tl.max(some, 0) != 0


@triton.jit
def list_key_tiles(table, items, lists, heads, C: tl.constexpr):
    """Write the lists of key tiles that blocks of queries compute.

    Grid: items × `heads`, the largest number of lists of an item.
    """
    item = items + (tl.program_id(0) // heads) * ITEM
    nth = tl.program_id(0) % heads
    t = table + tl.load(item).to(tl.int64) * col.WIDTH
    group = tl.load(t + col.GROUP).to(tl.int32)
    own = tl.load(t + col.BLOCKS + 1) != 0  # each head has its own block mask
    if (nth > 0) & ((own == 0) | (nth * (group if C.PACKED else 1) >= tl.load(t + col.HEADS))):
        return
    part_lo, part_hi = tl.load(item + 2), tl.load(item + 3)
    p = list_at(lists, tl.load(item + 4), tl.cdiv(part_hi - part_lo, C.BLOCK_N), nth, t)
    block = block_at(tl.load(item + 1), nth, group, C)
    band = load_sequence(t, t, 0).band
    lo, full_lo, full_hi, hi = key_stretches(block.first, block.last, band, part_lo, part_hi, C)
    height, width = tl.load(t + col.BLOCK_SIZE).to(tl.int32), tl.load(t + col.BLOCK_SIZE + 1).to(tl.int32)
    r0, r1 = block.first // height, tl.minimum(block.last, band.q_len - 1) // height
    rows = _Span(first=r0, last=r1, steps=r1 - r0 + 1)
    head, several = nth, 1
    if C.PACKED:
        head, several = nth * group, tl.where(own, group, 1)
    count = 0
    for cut_too in tl.static_range(0, 2):
        for first in range(lo // C.BLOCK_N, tl.cdiv(hi, C.BLOCK_N), _CHUNK):
            tile = first + tl.arange(0, _CHUNK)
            j0 = tile * C.BLOCK_N
            j_last = tl.minimum(j0 + C.BLOCK_N, hi) - 1
            columns = _Span(first=j0 // width, last=j_last // width, steps=tl.cdiv(C.BLOCK_N, width) + 1)
            some, every = _seen_of(t, head, several, rows, columns, j0 < hi)
            full = (every != 0) & (j0 >= full_lo) & (j0 + C.BLOCK_N <= full_hi)
            chosen = ((some != 0) & ((full == 0) if cut_too else full)).to(tl.int32)
            place = count + tl.cumsum(chosen, 0) - 1
            tl.store(p + HEADER + place, tile * 2 + (1 - every), mask=chosen != 0)
            count += tl.sum(chosen, 0)
        tl.store(p + cut_too, count)


@triton.jit
def list_query_tiles(table, items, lists, heads, C: tl.constexpr):
    """Write the lists of query tiles that blocks of keys compute.

    A list has the tiles of all query heads of a key/value head, one head after the other, or of one head if all heads
    share a block mask (`several` = 1). A tile's number is (tile of queries) × several + (index of the head in its
    group). Grid: items × `heads`, the largest number of lists of an item.
    """
    item = items + (tl.program_id(0) // heads) * ITEM
    nth = tl.program_id(0) % heads
    t = table + tl.load(item).to(tl.int64) * col.WIDTH
    group = tl.load(t + col.GROUP).to(tl.int32)
    own = tl.load(t + col.BLOCKS + 1) != 0
    if (nth > 0) & ((own == 0) | (nth * group >= tl.load(t + col.HEADS))):
        return
    several = tl.where(own, group, 1)
    j0, q_len = tl.load(item + 1), tl.load(item + 3)
    p = list_at(lists, tl.load(item + 4), tl.cdiv(q_len, C.BLOCK_M) * several, nth, t)
    band = load_sequence(t, t, 0).band
    j_last = tl.minimum(j0 + C.BLOCK_N, band.kv_len) - 1
    lo, hi = query_range(j0, j_last, band.offset, band.left, band.right, band.q_len)
    hi = tl.where(j0 < band.kv_len, hi, lo)
    height, width = tl.load(t + col.BLOCK_SIZE).to(tl.int32), tl.load(t + col.BLOCK_SIZE + 1).to(tl.int32)
    c0, c1 = j0 // width, j_last // width
    columns = _Span(first=c0, last=c1, steps=c1 - c0 + 1)
    count = 0
    for h in range(0, several):
        for first in range(lo // C.BLOCK_M, tl.cdiv(hi, C.BLOCK_M), _CHUNK):
            tile = first + tl.arange(0, _CHUNK)
            i0 = tile * C.BLOCK_M
            i_last = tl.minimum(i0 + C.BLOCK_M, hi) - 1
            rows = _Span(first=i0 // height, last=i_last // height, steps=tl.cdiv(C.BLOCK_M, height) + 1)
            some, every = _seen_of(t, nth * several + h, 1, rows, columns, i0 < hi)
            place = count + tl.cumsum(some, 0) - 1
            tl.store(p + HEADER + place, (tile * several + h) * 2 + (1 - every), mask=some != 0)
            count += tl.sum(some, 0)
    tl.store(p, count)
    tl.store(p + 1, count)
