"""torch's own fused attention as a backend, for the options that it supports (`support.SUPPORT["torch"]`).

On the CPU it uses `_scaled_dot_product_flash_attention_for_cpu`; for most forwards without a mask, our own kernels in C
(forward.py), which are faster. On CUDA it uses torch's FlashAttention-2 for 16-bit
dtypes without a mask, and the memory-efficient kernel for the rest. Each has its own backward from the saved `o` and
`lse`. call.py makes one call of them; blocks.py adds the windows, ALiBi and diagonals that they do not have. A sink is
merged into the answer as a key with value 0.

Sequences share a call if this does not change their bits (`reproducible.sharing`); otherwise each has its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashpoint_contract.spec import Row
from flashpoint_kernels import native
from flashpoint_kernels.masks import added
from flashpoint_kernels.problem import Problem, consecutive
from flashpoint_kernels.quantization import scaled
from flashpoint_kernels.reproducible import (
    aligned,
    aligned_heads,
    exactly,
    flushing,
    has_native_forward,
    in_blocks,
    sharing,
    threads,
)
from flashpoint_kernels.torch_backend.backward import differentiate
from flashpoint_kernels.torch_backend.blocks import Blocks, merge
from flashpoint_kernels.torch_backend.call import Call
from flashpoint_kernels.torch_backend.forward import compute, forward_of, repeats

INF = float("inf")
_memory: Any = torch.utils.deterministic  # mypy does not know its property


def forward(problems: Sequence[Problem]) -> None:
    for problem in problems:
        problem.clear_outputs()
        if problem.calls:
            for call in problem.calls:
                call()
            continue
        calls: list[Callable[[], None]] = []
        in_place = not problem.spec.paged
        if own := _native(problem):
            calls.append(partial(compute, forward_of(problem, own), problem.threads or 1))
            calls[0]()
            in_place = in_place and repeats(problem)
        for rows, x in _with_work(problem, own):
            with threads(problem, rows[0]) as count, flushing(problem, count):
                prepared = Prepared.of(problem, rows, x)
                prepared.answer()
            in_place = in_place and consecutive(rows) and prepared.in_place
            calls.append(partial(prepared.answer_on, count))
        if in_place:
            problem.calls = calls
        if problem.spec.has("sinks"):
            _only_sinks(problem)


def backward(problems: Sequence[Problem]) -> None:
    """Compute gradients from the forward's `o` and `lse`."""
    for problem in problems:
        problem.clear_outputs()
        if problem.device.type == "cpu" and native.supports(problem.spec):
            differentiate(problem, problem.threads or 1)
            continue
        asked = problem.outputs.get("dsinks")
        dsinks = None if asked is None else torch.zeros_like(asked, dtype=torch.float32)
        for rows, x in _with_work(problem):
            with threads(problem, rows[0]) as count, flushing(problem, count), _deterministic_on_cuda(problem):
                Prepared.of(problem, rows, x).differentiate(dsinks)
        if asked is not None and dsinks is not None:
            asked.copy_(dsinks)


@dataclass(eq=False, slots=True)
class Prepared:
    """Sequences of equal lengths, ready for the operators. `x` are their tensors from `Problem.batches`."""

    x: dict[str, Tensor]
    own: Call | Blocks
    turned: float  # the factor of q that makes the scale positive

    @classmethod
    def of(cls, problem: Problem, rows: Sequence[Row], x: dict[str, Tensor]) -> Prepared:
        spec, row = problem.spec, rows[0]
        # The CPU operators' 16-bit arithmetic missed the test rule (float16 dv at 512 × 512), float32 does not. CUDA's
        # accept a mask only in q's dtype, which would round other numbers, and make −∞ of −1e6 in float16.
        mask = problem.tensors.get("attn_mask")
        exact = (mask is None or mask.dtype in (torch.bool, x["q"].dtype)) and "alibi_slopes" not in x
        half = problem.device.type == "cuda" and exact and not spec.quantized
        dtype = x["q"].dtype if half else torch.float32
        turned, scale = (1.0, spec.scale) if spec.scale > 0 else (-1.0, -spec.scale) if spec.scale else (0.0, 1.0)
        if spec.quantized:  # in float32: products of a number and its scale must not be rounded to 16 bits
            k, v = (scaled(x[name], x[f"{name}_scale"]) for name in ("k", "v"))
        else:
            k, v = x["k"], x["v"]
        q, k, v = (aligned_heads(t, dtype) for t in (x["q"], k, v))
        if turned != 1.0:
            q = q * turned
        bias = None if mask is None else added(problem.mask_part(mask, rows))
        offset = spec.offset(row.q_len, row.kv_len)
        diagonal = spec.window[1] < row.kv_len - 1 - offset  # else the first query sees all keys
        if not (in_blocks(spec, row) or (diagonal and bias is not None)):
            return cls(x, Call(q, k, v, bias, diagonal, scale), turned)
        slopes = x["alibi_slopes"].reshape(-1, spec.q_heads, 1, 1) if "alibi_slopes" in x else None
        return cls(x, Blocks(q, k, v, bias, slopes, spec.window, offset, scale), turned)

    @property
    def in_place(self) -> bool:
        """Whether the operators read the tensors themselves, without copies and derived tensors."""
        own, x = self.own, self.x
        if not isinstance(own, Call) or own.bias is not None or "sinks" in x:
            return False
        return all(t.data_ptr() == x[name].data_ptr() for name, t in (("q", own.q), ("k", own.k), ("v", own.v)))

    def answer_on(self, threads: int) -> None:
        """Call `answer` with this number of threads."""
        with exactly(threads):
            self.answer()

    def answer(self) -> None:
        """Write o of a forward, and lse if requested."""
        o, lse = self.solve()
        self.x["o"].copy_(o)
        if "lse" in self.x:
            self.x["lse"].copy_(lse)

    def solve(self) -> tuple[Tensor, Tensor]:
        """Return o (n,Hq,sq,D) and lse (n,Hq,sq) of a forward."""
        o, lse = self.own.forward()
        if "sinks" in self.x:
            sinks = self.x["sinks"][:, None].expand(lse.shape)
            o = o.float()
            merge(o, lse, None, sinks)
        return o, lse

    def differentiate(self, dsinks: Tensor | None) -> None:
        """Write dq, dk and dv if requested, and add to `dsinks` (Hq,). `x` has the forward's answers."""
        x, own = self.x, self.own
        o, lse = x["o"], x["lse"]
        # Rounded like the forward's answer, so that callers who send it get the same bits.
        o = aligned_heads(o.to(x["q"].dtype), own.q.dtype)
        # +∞ instead of −∞ makes the probabilities exp(s − lse) of a masked row 0.
        lse = aligned(lse, torch.float32)
        lse = lse.masked_fill(lse == -INF, INF)
        do = aligned_heads(x["do"], own.q.dtype)
        if dsinks is not None:
            delta = (o.float() * do.float()).sum(-1)
            dsinks -= ((x["sinks"][:, None] - lse).exp_() * delta).sum((0, 2))
        dq, dk, dv = own.backward(do, o, lse)
        if self.turned != 1.0:
            dq = dq * self.turned
        for name, grad in (("dq", dq), ("dk", dk), ("dv", dv)):
            if name in x:
                x[name].copy_(grad)


def _only_sinks(problem: Problem) -> None:
    """Write the lse of queries without any key, which is the sink."""
    for _, x in problem.batches(lambda row: 1 if row.q_len and not row.kv_len else 0):
        if "lse" in x:
            x["lse"].copy_(x["sinks"][:, None].expand(x["lse"].shape))


def _with_work(problem: Problem, others: Sequence[Row] = ()) -> Iterator[tuple[tuple[Row, ...], dict[str, Tensor]]]:
    """Return the sequences with queries and keys, but not `others`.

    The operators divide by zero without keys, and other answers are written.
    """
    without = {row.index for row in others}

    def most(row: Row) -> int:
        if not (row.q_len and row.kv_len) or row.index in without:
            return 0
        return sharing(problem, row, "torch") if problem.device.type == "cpu" else 1

    return problem.batches(most)


def _native(problem: Problem) -> list[Row]:
    """Return the sequences of a forward that the kernels in C compute."""
    if problem.device.type != "cpu":
        return []
    return [row for row in problem.rows if has_native_forward(problem.spec, row)]


_asking = threading.Lock()


@contextmanager
def _deterministic_on_cuda(problem: Problem) -> Iterator[None]:
    if problem.device.type == "cuda":
        with _deterministic(problem.spec.options.deterministic):
            yield
    else:
        yield


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Make torch's CUDA backwards deterministic: they use atomics by default. The CPU's never do.

    The setting is global, so one thread at a time may use it. The work inside is enqueued, but not waited for.
    """
    with _asking, _asked(wanted):
        yield


@contextmanager
def _asked(wanted: bool) -> Iterator[None]:
    """Set determinism without torch's filling of new memory with NaN: everything here is written completely."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = _memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(wanted or before[0], warn_only=before[1] and not wanted)
    _memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        _memory.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
