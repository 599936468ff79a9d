"""The forward over keys that a caller keeps in memory, such as the chunks of KV caches: in place, on several cores.

The kernels in C read all spans in place, also of 8-bit keys. Many queries are cut into tiles, and each tile reads the
keys again. The bits are those of the same keys in one tensor.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flashpoint_contract.spec import Row, Spec
from flashpoint_kernels.cpu_backend.forward import readable
from flashpoint_kernels.native.forward import Forward, Part, Queries
from flashpoint_kernels.native.rows import Spans
from flashpoint_kernels.problems.cost import NOMINAL, row_seconds
from flashpoint_kernels.problems.problem import Problem
from flashpoint_kernels.problems.reproducible import PART_SECONDS

__all__ = ["CallOverSpans", "KeysInPlace", "Part", "Queries", "Spans", "parts_of", "queries_of", "shares", "spans_of"]

# Bytes of keys and values in one part. A smaller part has too much overhead; a larger one occupies a core for too long.
LEAST_BYTES, MOST_BYTES = 1 << 21, 1 << 26

_SHARED = frozenset({  # the tensors and options of calls that are computed together
    "q", "k", "v", "sinks", "q_lengths", "kv_lengths", "cu_seqlens_q", "cu_seqlens_k",
    "layout", "causal", "causal_alignment", "window", "block_size", "scale", "softcap", "dropout_seed", "precision",
    "return_lse", "grads", "deterministic", "backend",
})  # fmt: skip


class KeysInPlace(NamedTuple):
    """Keys and values k (Hk,n,D) and v (Hk,n,Dv) with adjacent rows; 8-bit ones have scales (Hk,n) in float32."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


def spans_of(pieces: Iterable[KeysInPlace], tokens: int, dtype: torch.dtype, dim: int, value_dim: int) -> Spans:
    """Return where the keys of one sequence are: `pieces` in order, with memory for `tokens` keys each.

    The last piece may have less memory. The caller keeps all pieces in their places as long as it uses the spans.
    """
    numbers = array("q")
    for k, v, k_scale, v_scale in pieces:
        numbers.extend((k.data_ptr(), v.data_ptr(), k.stride(0) * k.itemsize, v.stride(0) * v.itemsize))
        if k_scale is None or v_scale is None:
            numbers.extend((0, 0, 0, 0))
        else:
            numbers.extend((k_scale.data_ptr(), v_scale.data_ptr(), 4 * k_scale.stride(0), 4 * v_scale.stride(0)))
    return Spans(numbers, tokens, dtype, dim * dtype.itemsize, value_dim * dtype.itemsize)


class CallOverSpans(NamedTuple):
    """A call. Its `rows` have each sequence's number of keys and offset, and `spans` its keys, of one dtype and size.

    `first` has for each sequence the position of the first key in its spans: earlier ones are gone. No query sees a key
    before the position in `start`. `seed` is that of dropout.
    """

    queries: Queries
    rows: list[Row]
    spans: list[Spans]
    first: list[int]
    start: list[int]
    seed: int | None


def queries_of(problem: Problem) -> Queries:
    """Return the queries of a forward without k and v. They stay valid for other values if `forward.repeats`."""
    return Queries(problem.spec, readable(problem), problem.first_head)


def shares(spec: Spec) -> bool:
    """Return whether several calls that this backend supports may be computed together, to read common keys once.

    This requires that the call has no mask, ALiBi slopes or dropout.
    """
    return spec.given <= _SHARED


def parts_of(calls: Sequence[CallOverSpans], cores: int) -> list[Part]:
    """Cut calls into parts of about equal work, between tiles of queries and between key/value heads.

    There are `cores` parts: fewer if they would be small (LEAST_BYTES), more if they would be large (MOST_BYTES) or
    take long (PART_SECONDS). The number of parts does not change the bits of the answer. Several calls must have equal
    sizes, scale and softcap, and `shares` must be true for each.
    """
    forward, seconds = _forward(calls[0]), 0.0
    for call in calls[1:]:
        forward.join(_forward(call))
    spec = calls[0].queries.spec
    if len(forward.rows) > 1 and shares(spec):
        forward.share_prefixes(cores)
    units, total = forward.units, forward.nbytes
    if spec.q_len > 1 or spec.q_heads > spec.kv_heads:  # otherwise reading keys takes most of the time
        seconds = sum(row_seconds(spec, NOMINAL["cpu"], row) for call in calls for row in call.rows if row.q_len)
    wanted = max(min(cores, total // LEAST_BYTES), total // MOST_BYTES, int(seconds / PART_SECONDS))
    return forward.parts(min(wanted, units)) if min(wanted, units) > 1 else [Part(forward, 0, units)]


def _forward(call: CallOverSpans) -> Forward:
    forward = Forward(call.queries, call.spans, call.seed)
    for row, spans, first, start in zip(call.rows, call.spans, call.first, call.start, strict=True):
        if row.q_len:
            forward.add(row, spans, first=first, start=start)
    return forward
