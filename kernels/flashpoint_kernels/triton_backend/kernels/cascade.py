"""Read keys that several sequences share once for all of them (cascade attention: Ye et al. 2025, FlashInfer, §3.1.2).

Sequences that begin with the same prompt may have block tables with the same pages. If the forward splits their keys at
the same positions, one program computes a part of the keys for several of these sequences, as many as fit into a packed
block. It stores the partial o and lse of each sequence in the scratch slot that the sequence's separate program would
use. So the parts, their order and the shape of each product are the same as without sharing, and every row of the
answer has the same bits.

host/sharing.py chooses the parts.
"""

import triton
import triton.language as tl

from flashpoint_kernels.triton_backend.kernels import columns as col
from flashpoint_kernels.triton_backend.kernels.forward import attend_keys, begun, normalised
from flashpoint_kernels.triton_backend.kernels.groups import KeysAndValues, Queries, Rows
from flashpoint_kernels.triton_backend.kernels.tiles import columns_from, keys_of, load, load_sequence, locate, pages_of

# Columns of a work item: its first member, its number of members, and its keys [lo, hi).
ITEM = tl.constexpr(4)
# Columns of a member (one sequence of a work item): its table row, and the scratch slot of its partial o and lse.
MEMBER = tl.constexpr(2)


@triton.jit(do_not_specialize=["heads", "head_dim", "value_dim"])
def attention_cascade(
    table, floats, items, members, part_o, part_lse, heads, head_dim, value_dim, C: tl.constexpr
):  # fmt: skip
    """Store the partial o and lse of one key/value head for each of several sequences, over keys that they share.

    Grid: work items × `heads`, the largest number of key/value heads of the launch. The arguments are those of
    `attention_forward`; members (n, MEMBER) int32 lists the sequences. All members of an item have equal numbers of
    rows, at most BLOCK_M together, and their blocks begin at row 0.
    """
    item = items + (tl.program_id(0) // heads) * ITEM
    kv_head = tl.program_id(0) % heads
    p_members = members + tl.load(item).to(tl.int64) * MEMBER
    first = tl.load(p_members).to(tl.int64)
    t = table + first * col.WIDTH
    group = tl.load(t + col.GROUP).to(tl.int32)
    if kv_head * group >= tl.load(t + col.HEADS):
        return
    part_lo, part_hi = tl.load(item + 2), tl.load(item + 3)
    within = tl.arange(0, C.BLOCK_M)
    member_rows = tl.load(t + col.Q_ROWS).to(tl.int32) * group
    exists = within // member_rows < tl.load(item + 1)
    p_member = p_members + tl.where(exists, within // member_rows, 0) * MEMBER
    t_rows = table + tl.load(p_member).to(tl.int64) * col.WIDTH  # (M,): the table row of each row's sequence
    slot = tl.load(p_member + 1).to(tl.int64)
    o_r = within % member_rows  # the row's index in its sequence's block
    o_m, o_h = o_r // group, kv_head * group + o_r % group

    base, head_stride, stride = locate(t_rows, col.Q, C.DTYPE, C)
    q_len = tl.where(exists, tl.load(t_rows + col.Q_LEN), 0)
    q_rows = Rows(
        base=(base + o_h * head_stride)[:, None], head_stride=0, stride=stride[:, None], length=q_len[:, None],
        dim=head_dim,
    )  # fmt: skip
    b_q = load(q_rows, o_m, C.BLOCK_D, False, C.EVEN)  # (M, D)
    b_rest = 0
    if C.BLOCK_REST:
        b_rest = load(columns_from(q_rows, C.BLOCK_D), o_m, C.BLOCK_REST, False, C.EVEN)
    seq = load_sequence(t, floats + first * col.SCALARS, kv_head)
    keys = keys_of(t, col.K, col.K_PAGE, col.K_SCALE, kv_head, seq.band.kv_len, head_dim, C)
    values = keys_of(t, col.V, col.V_PAGE, col.V_SCALE, kv_head, seq.band.kv_len, value_dim, C)
    softmax = begun(t_rows, o_h, exists & (part_lo == 0), C)
    queries = Queries(queries=o_m, q=b_q, rest=b_rest)
    tiles = KeysAndValues(k=keys, v=values, pages=pages_of(t, C), listed=0)
    softmax = attend_keys(softmax, queries, tiles, seq, part_lo, part_hi, True, C)
    o, lse = normalised(softmax)
    o_d = tl.arange(0, C.BLOCK_DV)
    place = (slot * heads + kv_head) * C.BLOCK_M + o_r
    tl.store(part_lse + place, lse, mask=exists)
    tl.store(part_o + place[:, None] * C.BLOCK_DV + o_d[None, :], o, mask=exists[:, None])
