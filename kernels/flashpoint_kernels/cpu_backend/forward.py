"""The forward on the CPU by the kernels in C (flashpoint_kernels.native): all options.

Queries are cut into tiles. The query heads that share a key/value head are rows of one tile, so it reads each key once.
Keys are read in place: contiguous, strided, or in pages of any size. 8-bit keys are read as they are. The bits of a row
do not depend on the place of its keys, on other rows, or on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashpoint_contract.spec import Row, Spec
from flashpoint_contract.tensors import SCALES
from flashpoint_kernels.native.calls import Replay
from flashpoint_kernels.native.forward import Dropped, Forward
from flashpoint_kernels.native.rows import NOWHERE, ByteSteps, QuerySteps, Rows, Spans
from flashpoint_kernels.problems.problem import Problem, narrowed


def attend_dense(
    spec: Spec, row: Row, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor | None, threads: int
) -> Replay | None:
    """Write o and, unless it is None, lse (B,Hq,Sq) of q, k and v (B,H,S,D); all sequences have the lengths of `row`.

    Return a call that does this for other tensors with the same strides. Return None if tensors were copied,
    if several threads share a head, or if there are too many sequences.
    """
    given = (q, k, v)
    q, k, v = map(in_rows, given)
    size, (k_step, v_step) = k.itemsize, (t.stride(0) * t.itemsize for t in (k, v))
    k_address, v_address, k_head, v_head = k.data_ptr(), v.data_ptr(), k.stride(1) * size, v.stride(1) * size
    each = np.arange(len(q))
    numbers = np.zeros((len(q), 8), np.int64)
    numbers[:, 0], numbers[:, 1] = k_address + k_step * each, v_address + v_step * each
    numbers[:, 2:4] = k_head, v_head
    spans = Spans(numbers, row.kv_len)
    outputs = {"o": o} if lse is None else {"o": o, "lse": lse}
    at = QuerySteps(steps(q, 1), steps(o, 1), NOWHERE if lse is None else steps(lse, 1))
    lse_address, lse_step = (0, 0) if lse is None else (lse.data_ptr(), lse.stride(0) * lse.itemsize)
    one = rows_of(spec, row, q.data_ptr(), o.data_ptr(), lse_address, at, spans.of_sequence(0), row.kv_len)
    q_step, o_step = (t.stride(0) * t.itemsize for t in (q, o))
    forward = Forward(
        q.dtype, k.dtype, spec.head_dim, spec.value_dim, spec.kv_heads, spec.q_heads // spec.kv_heads, spec.scale,
        spec.options.softcap, k.stride(2) * size, v.stride(2) * size, held=[q, k, v, o, lse, spans],
    )  # fmt: skip

    def moved(n: Any) -> Rows:
        return one._replace(
            q=one.q + n * q_step, o=one.o + n * o_step, lse=one.lse + n * lse_step, spans=spans.of_sequence(n)
        )

    shares: Sequence[Sequence[int]]
    merged: list[tuple[list[int], Tensor]] = []
    if forward.takes_together(len(q), row.q_len):
        shares = forward.shares_together(moved(each), threads)
    else:
        for n in range(len(q)):
            forward.add(moved(n))
        shares, merged = forward.shares(forward.workers(threads))
    forward.call(shares, merged)()
    if merged or any(used is not t for used, t in zip((q, k, v), given, strict=True)):
        return None
    addresses = {name: t.data_ptr() for name, t in {"q": q, "k": k, "v": v, **outputs}.items()}
    return forward.replay(shares, spans, addresses)


def prepared(problem: Problem, rows: Sequence[Row], threads: int) -> Callable[[], object]:
    """Return the call that computes `rows` of a forward on at most `threads` threads, in place.

    It may be called again while the tensors stay at their addresses: see `repeats`.
    """
    spec = problem.spec
    q, o = in_rows(problem.view("q")), problem.view("o")
    lse = problem.view("lse") if "lse" in problem.outputs else None
    k, v = in_rows(problem.view("k")), in_rows(problem.view("v"))
    scales = [_scale(problem, name) for name in SCALES] if spec.quantized else []
    spans = _of_pages(problem, rows, k, v, scales) if spec.paged else _of_sequences(problem, rows, k, v, scales)
    slopes = problem.view("alibi_slopes").contiguous() if spec.has("alibi_slopes") else None
    sinks = problem.view("sinks").contiguous() if spec.has("sinks") else None
    mask, p = mask_of(problem), spec.options.dropout_p
    blocks = in_rows(problem.view("block_mask")) if spec.has("block_mask") else None
    forward = Forward(
        q.dtype, k.dtype, spec.head_dim, spec.value_dim, spec.kv_heads, spec.q_heads // spec.kv_heads, spec.scale,
        spec.options.softcap, k.stride(2) * k.itemsize, v.stride(2) * v.itemsize,
        NOWHERE if mask is None else steps(mask, 1), torch.bool if mask is None else mask.dtype,
        0 if mask is None else mask.stride(3) * mask.itemsize, 1.0 - p, Dropped.of(problem.seed, p),
        problem.first_head, (q, o, lse, k, v, scales, spans, slopes, sinks, mask, blocks),
        NOWHERE if blocks is None else steps(blocks, 1), spec.options.block_size,
    )  # fmt: skip

    at = QuerySteps(steps(q, 1), steps(o, 1), NOWHERE if lse is None else steps(lse, 1))

    def place(row: Row, span: int) -> Rows:
        return rows_of(
            spec,
            row,
            address(q, row.batch, row.q_start),
            address(o, row.batch, row.q_start),
            0 if lse is None else address(lse, row.batch, row.q_start),
            at,
            span,
            spans.tokens,
            slopes=0 if slopes is None else slopes.data_ptr() + 4 * spec.q_heads * row.index * (slopes.ndim == 2),
            sinks=0 if sinks is None else sinks.data_ptr(),
            mask=0 if mask is None else address(mask, row.batch, 0),
            blocks=0 if blocks is None else address(blocks, row.batch, 0),
        )

    if forward.takes_together(len(rows), max(row.q_len for row in rows)):
        together = Row(*numbers_of(rows))
        every = place(together, spans.of_sequence(np.arange(len(rows))))
        return forward.call(forward.shares_together(every, threads))
    for number, row in enumerate(rows):
        forward.add(place(row, spans.of_sequence(number)))
    forward.share_prefixes(forward.workers(threads))
    return forward.call(*forward.shares(forward.workers(threads)))


# The tensors and options of calls that are repeated: no call copies them, or uses their values from an earlier one.
_REPEATED = frozenset({
    "q", "k", "v", "q_lengths", "kv_lengths", "offset", "cu_seqlens_q", "cu_seqlens_k", "do", "dlse", "o", "lse",
    "layout", "causal", "causal_alignment", "window", "block_size", "scale", "softcap", "dropout_seed", "precision",
    "return_lse", "grads", "deterministic", "backend",
})  # fmt: skip


def repeats(problem: Problem) -> bool:
    """Return whether a problem's `prepared` copies nothing, so that it stays valid when tensors get other values."""
    return problem.spec.given <= _REPEATED and all(problem.view(name).stride(-1) == 1 for name in "qkv")


def rows_of(
    spec: Spec, row: Row, q: int, o: int, lse: int, at: QuerySteps, spans: int, tokens: int, first: int = 0,
    start: int = 0, slopes: int = 0, sinks: int = 0, mask: int = 0, blocks: int = 0,
) -> Rows:  # fmt: skip
    """Return the `Rows` of a sequence whose keys [first, row.kv_len) are in `spans`; `Rows` describes the addresses.

    The members of `row` may be arrays, with one element per sequence. Queries do not see keys before `start`.
    """
    offset, (left, right) = row.offset, spec.window
    low, high = offset - left, offset + right + 1
    minimum, maximum = (np.minimum, np.maximum) if isinstance(row.kv_len, np.ndarray) else (min, max)
    start = minimum(maximum(low, start), row.kv_len)
    stop = maximum(minimum(row.kv_len, row.q_len - 1 + high), start)
    return Rows(
        q, o, lse, at, row.q_len, start, stop, spans, tokens, first, low, high, offset, slopes, sinks, mask, blocks,
        row.index,
    )  # fmt: skip


def steps(t: Tensor, head: int) -> ByteSteps:
    """Return the strides, in bytes, of the dimension `head` and of the next dimension, that of rows."""
    return ByteSteps(t.stride(head) * t.itemsize, t.stride(head + 1) * t.itemsize)


def mask_of(problem: Problem) -> Tensor | None:
    """Return the caller's mask in canonical dimensions, in a form that the kernels read; None without a mask."""
    t = problem.tensors.get("attn_mask")
    return None if t is None else problem.canonical("attn_mask", readable_mask(t))


def readable_mask(t: Tensor) -> Tensor:
    """Return a mask in a dtype that the kernels support, with adjacent elements in each row: unchanged, or a copy."""
    if t.dtype == torch.float64:
        t = narrowed(t)
    return t.contiguous() if t.ndim and t.shape[-1] > 1 and t.stride(-1) != 1 else t


def in_rows(t: Tensor) -> Tensor:
    """Return the tensor with adjacent elements in each row: unchanged, or a copy."""
    return t if t.stride(-1) == 1 else t.contiguous()


def address(t: Tensor, batch: int, row: int) -> int:
    """Return the address of row `row` of head 0 in batch entry `batch` of a canonical view."""
    return t.data_ptr() + (batch * t.stride(0) + row * t.stride(2)) * t.itemsize


def numbers_of(rows: Sequence[Row]) -> np.ndarray[Any, Any]:
    """Return one int64 array (n,) for each field of `Row`, with its values in these n rows."""
    return (
        np.fromiter(chain.from_iterable(rows), np.int64, len(rows) * len(Row._fields)).reshape(len(rows), -1).T.copy()
    )


def _scale(problem: Problem, name: str) -> Tensor:
    """Return the scales `name` in float32, with one number per key.

    The shape is (N, Hk, Sk), or with pages (pool, Hk, page_size). If all keys of a head share a scale, the first
    dimension is 1 or B instead.
    """
    spec, scale = problem.spec, problem.view(name).float()
    if not spec.per_row(name):
        scale = scale.expand(-1, -1, spec.page_size if spec.paged else spec.kv_len)
    return scale.contiguous()


def _of_sequences(problem: Problem, rows: Sequence[Row], k: Tensor, v: Tensor, scales: Sequence[Tensor]) -> Spans:
    """Return the addresses of keys that are not in pages: a span for each sequence."""
    numbers = np.zeros((len(rows), 8), np.int64)
    index, batch, *_, start, _, _, _ = numbers_of(rows)
    for place, t in enumerate((k, v)):
        numbers[:, place] = t.data_ptr() + (batch * t.stride(0) + start * t.stride(2)) * t.itemsize
        numbers[:, 2 + place] = t.stride(1) * t.itemsize
    for place, (name, t) in enumerate(zip(SCALES, scales, strict=False)):
        places = batch if problem.spec.per_row(name) else index if len(t) > 1 else 0 * index
        numbers[:, 4 + place] = t.data_ptr() + (places * t.stride(0) + start) * 4
        numbers[:, 6 + place] = t.stride(1) * 4
    return Spans(numbers, max(1, max(row.kv_len for row in rows)))


def _of_pages(problem: Problem, rows: Sequence[Row], k: Tensor, v: Tensor, scales: Sequence[Tensor]) -> Spans:
    """Return the addresses of keys in pages: a span for each page."""
    spec = problem.spec
    pages = -(-max(row.kv_len for row in rows) // spec.page_size)
    index = torch.tensor([row.index for row in rows], dtype=torch.int64, device="cpu")
    table = problem.tensors["block_table"].index_select(0, index)[:, :pages].long()
    numbers = torch.zeros(len(rows), pages, 8, dtype=torch.int64, device="cpu")
    for place, t in enumerate((k, v)):
        numbers[:, :, place] = t.data_ptr() + table * (t.stride(0) * t.itemsize)
        numbers[:, :, 2 + place] = t.stride(1) * t.itemsize
    for place, (name, t) in enumerate(zip(SCALES, scales, strict=False)):
        places = table if spec.per_row(name) else (index if len(t) > 1 else 0 * index)[:, None]
        numbers[:, :, 4 + place] = t.data_ptr() + places * (t.stride(0) * 4)
        numbers[:, :, 6 + place] = t.stride(1) * 4
    return Spans(numbers.numpy(), spec.page_size, pages)
