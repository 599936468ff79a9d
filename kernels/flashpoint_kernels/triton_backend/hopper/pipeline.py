"""Functions that the kernels for Hopper share: layouts, descriptors, barriers, and loads by the copy engine (TMA).

The notation is that of ../kernels/forward.py. A tensor's tiles use the stages of its Pipe in turn: tile n is in stage n
mod STAGES. A barrier's phase alternates between 0 and 1 at each use of its stage.
"""

from typing import Any, NamedTuple

import triton.language as tl

from flashpoint_kernels.triton_backend.hopper.gluon import constexpr_function, gl, jit, mbarrier, tma, tma_load
from flashpoint_kernels.triton_backend.kernels import columns as col
from flashpoint_kernels.triton_backend.kernels.interpret import cast
from flashpoint_kernels.triton_backend.kernels.tiles import key_stretches, load_sequence


class Pipe(NamedTuple):
    """Stages of shared memory for tiles of one tensor.

    `full` and `empty` have a barrier for each stage. A phase of `full` ends when a tile has arrived. A phase of `empty`
    ends when both consumers have finished with a tile; `empty` is None if the tile stays for the whole block.
    """

    tiles: Any
    full: Any
    empty: Any


class Launched(NamedTuple):
    """The arguments of a launch, as `attention_forward` describes them."""

    table: Any
    floats: Any
    items: Any
    heads: Any
    head_dim: Any
    value_dim: Any


class QueryWork(NamedTuple):
    """A block of queries, and the tiles of keys that it uses, from the last to the first.

    `i0` is the first query, `lo` the first key. The tiles are numbered in their pipes from `first` up to `end`; those
    below `cut` need a visibility test.
    """

    i0: Any
    lo: Any
    first: Any
    cut: Any
    end: Any


@constexpr_function
def product_layout(columns):
    """Return the layout of a group's product: each of the four warps has 16 of 64 rows, and all columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@constexpr_function
def stored_layout(columns):
    """Return the layout of a group's tile of dSᵀ, (64, columns), as it is stored: 16 bytes of a row a thread.

    It is `product_layout` with the columns in the order of `stored_order`: each thread keeps its numbers.
    """
    reg_bases = [[0, 1], [0, 2], [0, 4], [8, 0]] + [[0, at] for at in (32, 64) if at < columns]
    return gl.DistributedLinearLayout(
        reg_bases, [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, columns]
    )


@constexpr_function
def operand_layout(columns):
    """Return the layout of a product's first operand in registers; the product has `columns` columns."""
    return gl.DotOperandLayout(0, product_layout(columns), 2)


@jit
def find_queries(launched, nth, first, ITEM: tl.constexpr, C: tl.constexpr):
    """Return (Sequence, QueryWork) of the nth block of queries of a launch, whose first tile has the number `first`.

    If the sequence has fewer heads than the launch, and not this one, return a block beyond the last query, which sees
    no key and stores nothing.
    """
    item = launched.items + (nth // launched.heads) * ITEM
    head = nth % launched.heads
    row = gl.load(item).to(gl.int64)
    t = launched.table + row * col.WIDTH
    seq = load_sequence(t, launched.floats + row * col.SCALARS, head)
    i0 = gl.where(head < gl.load(t + col.HEADS), gl.load(item + 1), gl.load(t + col.Q_ROWS).to(gl.int32))
    lo, _full_lo, full_hi, hi = key_stretches(i0, i0 + C.BLOCK_M - 1, seq.band, 0, seq.band.kv_len, C)
    count = (hi - lo + C.BLOCK_N - 1) // C.BLOCK_N
    end = first + count
    return seq, QueryWork(i0=i0, lo=lo, first=first, cut=end - (full_hi - lo) // C.BLOCK_N, end=end)


@jit
def first_key(n, work, C: tl.constexpr):
    """Return the first key of tile n of a block."""
    return work.lo + (work.end - 1 - n) * C.BLOCK_N


@jit
def descriptor(rows, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, C: tl.constexpr):
    """Return a descriptor of the Rows of a head, for tiles of (ROWS, BLOCK_D); loads beyond the Rows give 0.

    The copy engine reads through it, so loads need no registers and no address computation. Some tensors cannot be
    described: see `Table.describable`.
    """
    LAYOUT: tl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], C.DTYPE)
    shape = [gl.maximum(rows.length, 1), rows.dim]
    return tma.make_tensor_descriptor(rows.base, shape, [rows.stride, 1], [ROWS, BLOCK_D], LAYOUT)


@jit
def group_descriptor(rows, heads, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, C: tl.constexpr):
    """Return a descriptor of the Rows of `heads` heads from this one on, for tiles of (1, ROWS, BLOCK_D)."""
    LAYOUT: tl.constexpr = gl.NVMMASharedLayout.get_default_for([1, ROWS, BLOCK_D], C.DTYPE)
    shape = [heads, gl.maximum(rows.length, 1), rows.dim]
    return tma.make_tensor_descriptor(
        rows.base, shape, [rows.head_stride, rows.stride, 1], [1, ROWS, BLOCK_D], LAYOUT
    )  # fmt: skip


@jit
def stages(NUMBER: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, C: tl.constexpr):
    """Allocate shared memory for NUMBER tiles of a `descriptor`."""
    LAYOUT: tl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], C.DTYPE)
    return gl.allocate_shared_memory(C.DTYPE, [NUMBER, ROWS, BLOCK_D], LAYOUT)


@jit
def group_stages(NUMBER: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, C: tl.constexpr):
    """Allocate shared memory for NUMBER tiles of a `group_descriptor`."""
    LAYOUT: tl.constexpr = gl.NVMMASharedLayout.get_default_for([1, ROWS, BLOCK_D], C.DTYPE)
    return gl.allocate_shared_memory(C.DTYPE, [NUMBER, 1, ROWS, BLOCK_D], LAYOUT)


@jit
def barriers(NUMBER: tl.constexpr, ARRIVALS: tl.constexpr):
    """Allocate barriers in shared memory. A phase ends after ARRIVALS arrivals and all bytes that it expects."""
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(NUMBER):
        mbarrier.init(made.index(at), count=ARRIVALS)
    return made


@jit
def load_tile(rows, tile, at, barrier):
    """Start the load of the tile at `at` in descriptor `rows` into `tile`; `barrier` expects the tile's bytes."""
    mbarrier.expect(barrier, rows.block_type.nbytes)
    tma_load(rows, at, barrier, tile)


@jit
def wait_full(pipe, n, C: tl.constexpr, pred=True):
    """Wait until tile n has arrived."""
    mbarrier.wait(pipe.full.index(n % C.STAGES), (n // C.STAGES) & 1, pred=pred)


@jit
def wait_empty(pipe, n, C: tl.constexpr):
    """Wait until both consumers have finished with the previous tile in the stage of tile n."""
    mbarrier.wait(pipe.empty.index(n % C.STAGES), ((n // C.STAGES) & 1) ^ 1)


@jit
def release(pipe, n, C: tl.constexpr, pred=True):
    """Signal that a consumer has finished with tile n."""
    mbarrier.arrive(pipe.empty.index(n % C.STAGES), count=1, pred=pred)


@jit
def carried(x, OPERAND: tl.constexpr, C: tl.constexpr):
    """Return a product's first operand in the form in which a loop carries it to its next iteration.

    With CARRY_FLOAT32 this is x unchanged, in float32; else it is the operand, in DTYPE and in the layout OPERAND.
    """
    if not C.CARRY_FLOAT32:
        x = gl.convert_layout(cast(x, C.DTYPE), OPERAND)
    return x


@jit
def operand(x, OPERAND: tl.constexpr, C: tl.constexpr):
    """Return a product's first operand, in DTYPE and in the layout OPERAND, from the result `x` of `carried`."""
    if C.CARRY_FLOAT32:
        x = gl.convert_layout(cast(x, C.DTYPE), OPERAND)
    return x


@jit
def stored_order(x, COLUMNS: tl.constexpr):
    """Return a group's tile (64, COLUMNS) in `stored_layout`: in each 32 columns, 8k + 2c + b is at 8c + 2k + b."""
    x = x.reshape([64, COLUMNS // 32, 4, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([64, COLUMNS])
    return gl.convert_layout(x, stored_layout(COLUMNS))


@jit
def stored_column(at):
    """Return the column that `stored_order` puts at `at`."""
    return at // 32 * 32 + (at // 2 % 4) * 8 + (at // 8 % 4) * 2 + at % 2


@jit
def load_keys(first_rows, first, second_rows, second, work, C: tl.constexpr):
    """Load the tiles of two pipes alternately, starting with the last keys."""
    for n in range(work.first, work.end):
        j0 = first_key(n, work, C)
        wait_empty(first, n, C)
        load_tile(first_rows, first.tiles.index(n % C.STAGES), [j0, 0], first.full.index(n % C.STAGES))
        wait_empty(second, n, C)
        load_tile(second_rows, second.tiles.index(n % C.STAGES), [j0, 0], second.full.index(n % C.STAGES))


@jit
def store_rows(x, rows, first, valid, C: tl.constexpr, PERMUTED: tl.constexpr = False):
    """Store x to the Rows of a head from row `first` on. Rows from `valid` on are padding and become 0.

    PERMUTED: the rows of x are in the order of `stored_order`.
    """
    ROWS: tl.constexpr = x.shape[0]
    BLOCK_D: tl.constexpr = x.shape[1]
    W: tl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])  # 16 bytes a thread
    x = gl.convert_layout(cast(x, C.DTYPE), W)
    o_m = gl.arange(0, ROWS, gl.SliceLayout(1, W))
    if PERMUTED:
        o_m = stored_column(o_m)
    o_m = first + o_m
    o_d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, W))
    x = gl.where((o_m < valid)[:, None], x, 0.0)
    m_rows = (o_m < rows.length)[:, None]
    if not C.EVEN:
        m_rows = m_rows & (o_d < rows.dim)[None, :]
    gl.store(rows.base + o_m[:, None] * rows.stride + o_d[None, :], x, mask=m_rows)
