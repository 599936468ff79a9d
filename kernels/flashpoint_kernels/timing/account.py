"""What an algorithm does: its floating-point operations and the bytes it must move, counted from the shapes alone.

P is the number of (query, key) pairs over all batch entries and query heads. A matrix product over them is 2·P·D or
2·P·Dv operations; products are all that is counted, as in every paper (softmax, masks and scaling are left out).

Each tensor that an algorithm names is read or written once, besides its passes over the Sq × Sk matrix: the least there
is, so that bytes per second are a lower bound of what the memory really did, and the arithmetic intensity an upper one.

The standard count, by which papers compare, is one for all: 4·B·Hq·Sq·Sk·D forward, half of it when causal, 2.5 times
that backward, whatever was recomputed (with D ≠ Dv, 2·(D + Dv) in place of 4·D).
"""

from __future__ import annotations

from dataclasses import dataclass

from flashpoint_contract.tensors import ITEMSIZE
from flashpoint_kernels.timing.case import Case

_LSE_BYTES = 4  # float32, whatever the inputs


@dataclass(frozen=True)
class Algorithm:
    """One row of the table; `does` says it in words."""

    does: str
    d_products: int
    dv_products: int
    skips_hidden: bool  # does it leave out the pairs that a causal mask hides
    tensors: tuple[str, ...]  # read or written once each; a name may come twice
    matrix_passes: int = 0  # times that the Sq × Sk matrix is read or written, in the inputs' dtype
    causal_passes: int = 0  # how many more a causal mask costs


_GRADIENT = ("q", "k", "v", "do", "dq", "dk", "dv")
ALGORITHMS = {
    "flash_forward": Algorithm(
        "S = QKᵀ, O = PV, a tile at a time (FlashAttention-2, Dao 2023, Algorithm 1)",
        1, 1, True, ("q", "k", "v", "o", "lse"),
    ),
    "naive_forward": Algorithm(
        "write S, scale it, softmax, read P for O; a mask over S when causal",
        1, 1, False, ("q", "k", "v", "o"), 6, 2,
    ),
    "naive_backward": Algorithm(
        "autograd's, from P: dV = PᵀdO, dP = dOVᵀ, back through softmax, mask and scale, dQ = dSK, dK = dSᵀQ",
        2, 2, False, _GRADIENT, 9, 2,
    ),
    "explicit_backward": Algorithm(
        "written out, from P: dV, dP, dS = P∘(dP − delta), dQ, dK",
        2, 2, False, (*_GRADIENT, "o"), 9,
    ),
    "fused_backward": Algorithm(
        "S again, dV, dP, dQ, dK in one walk (FlashAttention-2, Algorithm 2), dQ added up over tiles of keys",
        3, 2, True, (*_GRADIENT, "o", "lse"),
    ),
    "two_pass_backward": Algorithm(
        "a walk for dK and dV and one for dQ: S and dP once more, and nothing added up in memory",
        4, 3, True, (*_GRADIENT, "o", "lse", "q", "k", "v", "do", "lse"),
    ),
}  # fmt: skip


def pairs(case: Case, *, seen: bool = False) -> int:
    """P: (query, key) pairs of a case over batch and query heads; of a causal one, with `seen`, those not hidden."""
    rows, keys = case.q_len, case.kv_len
    count = rows * keys
    if seen and case.causal:
        # Row i sees keys 0 … i + offset, aligned bottom right: the last min(rows, keys) rows see 1 more each.
        seeing = min(rows, keys)
        count = seeing * (2 * keys - seeing + 1) // 2
    return case.batch * case.q_heads * count


def flops(algorithm: str, case: Case) -> int:
    """Operations of one run of `algorithm`, a name in `ALGORITHMS`."""
    a = ALGORITHMS[algorithm]
    per_pair = 2 * (a.d_products * case.head_dim + a.dv_products * case.value_dim)
    return per_pair * pairs(case, seen=a.skips_hidden)


def moved_bytes(algorithm: str, case: Case) -> int:
    """Bytes that one run of `algorithm` reads and writes at least."""
    a = ALGORITHMS[algorithm]
    passes = a.matrix_passes + (a.causal_passes if case.causal else 0)
    return passes * pairs(case) * ITEMSIZE[case.dtype] + sum(_nbytes(name, case) for name in a.tensors)


def standard_flops(case: Case) -> int:
    """The count by which papers compare; a causal square is half, and so is any other causal case."""
    forward = 2 * pairs(case) * (case.head_dim + case.value_dim) // (2 if case.causal else 1)
    return {"forward": 2 * forward, "backward": 5 * forward, "both": 7 * forward}[case.direction] // 2


def _nbytes(name: str, case: Case) -> int:
    if name == "lse":
        return case.batch * case.q_heads * case.q_len * _LSE_BYTES
    of_keys = name in ("k", "v", "dk", "dv")
    rows = case.kv_heads * case.kv_len if of_keys else case.q_heads * case.q_len
    dim = case.value_dim if name in ("v", "dv", "o", "do") else case.head_dim
    return case.batch * rows * dim * ITEMSIZE[case.dtype]
