"""torch's own fused attention as a backend, where it covers the options (`support.SUPPORT["torch"]`).

On the CPU `_scaled_dot_product_flash_attention_for_cpu`, on CUDA torch's FlashAttention-2 for half dtypes with no mask
and its memory-efficient kernel for the rest; each with its own backward from the saved `o` and `lse`. call.py is a call
of them; blocks.py has the windows, ALiBi and diagonals that they lack. A sink is merged into the answer: it is a key
whose value is 0.

Sequences share a call where its bits do not change with the batch (`reproducible.sharing`), else each has its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashpoint_contract.options import Direction
from flashpoint_contract.spec import Row
from flashpoint_kernels.masks import added
from flashpoint_kernels.problem import Problem, consecutive
from flashpoint_kernels.quantization import scaled
from flashpoint_kernels.reproducible import (
    aligned,
    aligned_heads,
    exactly,
    few_queries,
    flushing,
    in_blocks,
    sharing,
    threads,
)
from flashpoint_kernels.torch_backend.blocks import Blocks, merge
from flashpoint_kernels.torch_backend.call import Call
from flashpoint_kernels.torch_backend.few import FewQueries, Lying, Paged

INF = float("inf")
_TOGETHER = 64  # sequences of few queries, of equal lengths, whose keys are read where they lie
_memory: Any = torch.utils.deterministic  # whose property mypy does not see


def forward(problems: Sequence[Problem]) -> None:
    for problem in problems:
        problem.clear_outputs()
        if problem.calls:
            for call, count in problem.calls:
                with exactly(count):
                    call.answer()
            continue
        calls, in_place = [], not problem.spec.paged
        for rows, x in _with_work(problem):
            with threads(problem, rows[0]) as count, flushing(problem, count):
                call = Prepared.of(problem, rows, x)
                call.answer()
            in_place = in_place and consecutive(rows) and call.in_place
            calls.append((call, count))
        if in_place:
            problem.calls = calls
        if problem.spec.has("sinks"):
            _only_sinks(problem)


def backward(problems: Sequence[Problem]) -> None:
    """Runs the forward itself where `o` and `lse` are not given."""
    for problem in problems:
        problem.clear_outputs()
        asked = problem.outputs.get("dsinks")
        dsinks = None if asked is None else torch.zeros_like(asked, dtype=torch.float32)
        for rows, x in _with_work(problem):
            with threads(problem, rows[0]) as count, flushing(problem, count), _deterministic_on_cuda(problem):
                own = Prepared.of(problem, rows, x)
                if "lse" not in x:
                    x["o"], x["lse"] = Prepared.of(problem, rows, x, "forward").solve()
                own.differentiate(dsinks)
        if asked is not None and dsinks is not None:
            asked.copy_(dsinks)


@dataclass(eq=False, slots=True)
class Prepared:
    """Sequences of equal lengths, ready for the operators. `x` are their tensors, `Problem.batches` says how."""

    x: dict[str, Tensor]
    own: Call | Blocks | FewQueries
    turned: float  # what q was multiplied by, so that the scale is above 0

    @classmethod
    def of(
        cls, problem: Problem, rows: Sequence[Row], x: dict[str, Tensor], direction: Direction | None = None
    ) -> Prepared:
        """`direction` is the problem's own, or that of a gradient's forward."""
        spec, row = problem.spec, rows[0]
        forward = (direction or spec.direction) == "forward"
        # The CPU operators' half arithmetic was seen to miss the test rule (float16 dv at 512 × 512): float32 keeps it.
        # CUDA's take a mask in q's dtype alone, where another's numbers would be rounded, and −1e6 be −∞ in float16.
        mask = problem.tensors.get("attn_mask")
        exact = (mask is None or mask.dtype in (torch.bool, x["q"].dtype)) and "alibi_slopes" not in x
        half = problem.device.type == "cuda" and exact and not spec.quantized
        dtype = x["q"].dtype if half else torch.float32
        turned, scale = (1.0, spec.scale) if spec.scale > 0 else (-1.0, -spec.scale) if spec.scale else (0.0, 1.0)
        if few := forward and problem.device.type == "cpu" and few_queries(spec, row):
            dtype = torch.float32 if spec.quantized else x["q"].dtype
        if few and "k" not in x:
            keys = Paged.of(problem.view("k"), problem.view("v"), problem.tensors["block_table"], rows)
            return cls(x, FewQueries(x["q"] * turned, keys, scale), turned)
        if spec.quantized:  # in float32, which rounds no product of a number and its scale to a half type
            k, v = (scaled(x[name], x[f"{name}_scale"]) for name in ("k", "v"))
        else:
            k, v = x["k"], x["v"]
        if few:
            own = FewQueries(x["q"].to(dtype) * turned, Lying(k, v), scale)
            return cls(x, own, turned)
        q, k, v = (aligned_heads(t, dtype) for t in (x["q"], k, v))
        if turned != 1.0:
            q = q * turned
        bias = None if mask is None else added(problem.mask_part(mask, rows))
        offset = spec.offset(row.q_len, row.kv_len)
        diagonal = spec.window[1] < row.kv_len - 1 - offset  # else the first query sees every key already
        if not (in_blocks(spec, row) or (diagonal and bias is not None)):
            return cls(x, Call(q, k, v, bias, diagonal, scale), turned)
        slopes = x["alibi_slopes"].reshape(-1, spec.q_heads, 1, 1) if "alibi_slopes" in x else None
        return cls(x, Blocks(q, k, v, bias, slopes, spec.window, offset, scale), turned)

    @property
    def in_place(self) -> bool:
        """Whether the operators read the tensors themselves, no copies of them, and nothing that is made of others."""
        own, x = self.own, self.x
        if not isinstance(own, Call) or own.bias is not None or "sinks" in x:
            return False
        return all(t.data_ptr() == x[name].data_ptr() for name, t in (("q", own.q), ("k", own.k), ("v", own.v)))

    def answer(self) -> None:
        """Write o, and lse where it is asked, of a forward."""
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
        """Write dq, dk and dv where they are asked, and add to `dsinks` (Hq,). `x` has the forward's answers."""
        x, own = self.x, self.own
        assert not isinstance(own, FewQueries)
        o, lse = x["o"], x["lse"]
        # As the forward's answer is rounded, so that a caller who brings it gets the same bits.
        o = aligned_heads(o.to(x["q"].dtype), own.q.dtype)
        # +∞ in place of the −∞ of a masked row makes its probabilities exp(s − lse) = 0.
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


def _with_work(problem: Problem) -> Iterator[tuple[tuple[Row, ...], dict[str, Tensor]]]:
    """The sequences with a query and a key: the operators divide by zero without, and the answer is written already."""
    on_cpu = problem.device.type == "cpu"

    def most(row: Row) -> int:
        if not (row.q_len and row.kv_len):
            return 0
        if not on_cpu:
            return 1
        return len(problem.rows) if alike and where_they_lie(row) else sharing(problem, row)

    def where_they_lie(row: Row) -> bool:
        return on_cpu and forward and not problem.spec.quantized and few_queries(problem.spec, row)

    forward = problem.spec.direction == "forward"
    alike = (
        0 < len(problem.rows) <= _TOGETHER
        and consecutive(problem.rows)
        and len({row[3:7:3] for row in problem.rows}) == 1
    )
    return problem.batches(most, where_they_lie)


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
    """torch's CUDA backwards add with atomics unless the process asks for determinism; its CPU one never does.

    One thread at a time, for what is asked holds for all of them: what is inside is enqueued, and not waited for.
    """
    with _asking, _asked(wanted):
        yield


@contextmanager
def _asked(wanted: bool) -> Iterator[None]:
    """Without the NaNs that torch would then write into all new memory: what is made here is written whole."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = _memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(wanted or before[0], warn_only=before[1] and not wanted)
    _memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        _memory.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
