"""The forward on the CPU by the kernels in C (flashpoint_kernels.native): all options.

Queries are cut into tiles. The query heads that share a key/value head are rows of one tile, so it reads each key once.
Keys are read in place: contiguous, strided, or in pages of any size. 8-bit keys are read as they are. The bits of a row
do not depend on the place of its keys, on other rows, or on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashpoint_contract.spec import Row, Spec
from flashpoint_contract.tensors import SCALES
from flashpoint_kernels.cpu_backend.ranges import is_tiny
from flashpoint_kernels.native.calls import Replay
from flashpoint_kernels.native.forward import Forward, Queries
from flashpoint_kernels.native.rows import Place, Spans, numbers_of
from flashpoint_kernels.problems.problem import Problem, narrowed


def attend_dense(
    spec: Spec, row: Row, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor | None, threads: int
) -> Replay | None:
    """Write o and, unless it is None, lse (B,Hq,Sq) of q, k and v (B,H,S,D); all sequences have the lengths of `row`.

    Return a call that does this for other tensors with the same strides. Return None if tensors were copied,
    if several threads share a head, or if there are too many sequences.
    """
    given = {"q": q, "k": k, "v": v, "o": o} | ({} if lse is None else {"lse": lse})
    t = {name: in_rows(x) if name in "qkv" else x for name, x in given.items()}
    each = np.arange(len(q))
    spans = _in_rows_of(t["k"], t["v"], each, 0, row.kv_len)
    forward = Forward(Queries(spec, t), [spans])
    shares: Sequence[Sequence[int]]
    merged: list[tuple[list[int], Tensor]] = []
    if forward.takes_together(len(q), row.q_len):
        shares = forward.shares_together(row._replace(index=each, batch=each), threads)  # type: ignore[arg-type]
    else:
        for n in range(len(q)):
            forward.add(row._replace(index=n, batch=n), spans, n)
        shares, merged = forward.shares(forward.workers(threads))
    forward.call(shares, merged)()
    if merged or any(t[name] is not x for name, x in given.items()):
        return None
    return forward.replay(shares, {name: x.data_ptr() for name, x in given.items()})


def prepared(problem: Problem, rows: Sequence[Row], threads: int) -> Callable[[], object]:
    """Return the call that computes `rows` of a forward on at most `threads` threads, in place.

    It may be called again while the tensors stay at their addresses: see `repeats`.
    """
    spec, t = problem.spec, readable(problem)
    scales = [_scale(problem, name) for name in SCALES] if spec.quantized else []
    spans = (_of_pages if spec.paged else _of_sequences)(problem, rows, t["k"], t["v"], scales)
    forward = Forward(Queries(spec, t, problem.first_head), [spans], problem.seed, memory=[scales])
    if forward.takes_together(len(rows), max([row.q_len for row in rows])):
        return forward.call(forward.shares_together(Row(*numbers_of(rows)), threads))
    for number, row in enumerate(rows):
        forward.add(row, spans, number)
    workers = forward.workers(threads)
    if len(rows) > 1:
        forward.share_prefixes(workers)
        workers = forward.workers(threads)
    return forward.call(*forward.shares(workers))


IN_ROWS = ("q", "k", "v", "o", "do", "block_mask")  # the tensors whose rows must have adjacent elements

# The tensors and options of calls that are repeated: no call copies them, or uses their values from an earlier one.
_REPEATED = frozenset({
    "q", "k", "v", "q_lengths", "kv_lengths", "offset", "cu_seqlens_q", "cu_seqlens_k", "do", "dlse", "o", "lse",
    "layout", "causal", "causal_alignment", "window", "block_size", "scale", "softcap", "dropout_seed", "precision",
    "return_lse", "grads", "deterministic", "backend",
})  # fmt: skip


def repeats(problem: Problem) -> bool:
    """Return whether a problem's `prepared` stays valid when tensors get other values: it copies and moves nothing."""
    given, spec = problem.tensors, problem.spec
    if not spec.given <= _REPEATED or is_tiny(spec.scale):
        return False
    return all(given[n].stride(-1) == 1 for n in IN_ROWS if n in given)


def readable(problem: Problem) -> dict[str, Tensor]:
    """Return canonical views of a problem's tensors and outputs as the kernels take them: in place, or copies."""
    t = {name: problem.view(name) for name in problem.outputs}
    for name in problem.tensors:
        if name in IN_ROWS:
            t[name] = in_rows(problem.view(name))
        elif name in ("lse", "dlse"):
            t[name] = problem.view(name).float()
        elif name in ("alibi_slopes", "sinks"):
            t[name] = problem.view(name).contiguous()
    if (mask := mask_of(problem)) is not None:
        t["attn_mask"] = mask
    return t


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


def _scale(problem: Problem, name: str) -> Tensor:
    """Return the scales `name` in float32, with one number per key.

    The shape is (N, Hk, Sk), or with pages (pool, Hk, page_size). If all keys of a head share a scale, the first
    dimension is 1 or B instead.
    """
    spec, scale = problem.spec, problem.view(name).float()
    if not spec.per_row(name):
        scale = scale.expand(-1, -1, spec.page_size if spec.paged else spec.kv_len)
    return scale.contiguous()


def _in_rows_of(k: Tensor, v: Tensor, batch: Any, start: Any, tokens: int) -> Spans:
    """Return the addresses of keys in k and v: a span of at most `tokens` keys for each of `batch`, from `start` on."""
    numbers = np.zeros((len(batch), 8), np.int64)
    steps = []
    for column, place in enumerate((Place.of(k), Place.of(v))):
        numbers[:, column] = place.at(batch, start)
        numbers[:, 2 + column] = place.steps.head
        steps.append(place.steps.row)
    return Spans(numbers, tokens, k.dtype, *steps)


def _of_sequences(problem: Problem, rows: Sequence[Row], k: Tensor, v: Tensor, scales: Sequence[Tensor]) -> Spans:
    """Return the addresses of keys that are not in pages: a span for each sequence."""
    index, batch, *_, start, lengths, _, _ = numbers_of(rows)
    spans = _in_rows_of(k, v, batch, start, max(1, int(lengths.max())))
    for place, (name, t) in enumerate(zip(SCALES, scales, strict=False)):
        places = batch if problem.spec.per_row(name) else index if len(t) > 1 else 0 * index
        spans.numbers[:, 4 + place] = t.data_ptr() + (places * t.stride(0) + start) * 4
        spans.numbers[:, 6 + place] = t.stride(1) * 4
    return spans


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
    k_step, v_step = (t.stride(2) * t.itemsize for t in (k, v))
    return Spans(numbers.numpy(), spec.page_size, k.dtype, k_step, v_step, pages)
