"""torch's own fused operators, for CUDA devices that Triton does not serve: the options in SUPPORT of this package.

FlashAttention-2 computes 16-bit dtypes without a mask, and the memory-efficient kernel all other problems. Each has its
own backward from the saved `o` and `logsumexp`. Each sequence has a call of its own, so its bits do not depend on other
sequences. The operators' causal mask is only for sq = sk without an offset; other diagonals are passed as masks (sq,
sk). A sink is merged into the answer as a key with value 0.

The operators are private to torch: a test checks their signatures.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashpoint_contract.spec import Row
from flashpoint_kernels.problems.masks import added
from flashpoint_kernels.problems.problem import Problem
from flashpoint_kernels.problems.reproducible import aligned
from flashpoint_kernels.quantization import scaled

INF = float("inf")
_aten = torch.ops.aten
_memory: Any = torch.utils.deterministic  # Any, because mypy does not know the module's property


def forward(problems: Sequence[Problem]) -> None:
    for problem in problems:
        problem.clear_outputs()
        for rows, x in _with_work(problem):
            Prepared.of(problem, rows, x).answer()
        if problem.spec.has("sinks"):
            _only_sinks(problem)


def backward(problems: Sequence[Problem]) -> None:
    """Compute gradients from the forward's `o` and `lse`."""
    for problem in problems:
        problem.clear_outputs()
        wanted_dsinks = problem.outputs.get("dsinks")
        dsinks = None if wanted_dsinks is None else torch.zeros_like(wanted_dsinks, dtype=torch.float32)
        for rows, x in _with_work(problem):
            with _deterministic(problem.spec.options.deterministic):
                Prepared.of(problem, rows, x).differentiate(dsinks)
        if wanted_dsinks is not None and dsinks is not None:
            wanted_dsinks.copy_(dsinks)


@dataclass(eq=False, slots=True)
class Call:
    """One sequence as inputs of the operators: q (1,Hq,sq,D), k and v (1,Hk,sk,D), and a mask to add, or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None  # (1, Hq|1, sq|1, sk|1) float32
    causal: bool  # whether to apply the causal mask, which requires sq = sk
    scale: float  # above 0, which the operators require

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return o (1,Hq,sq,D) and lse (1,Hq,sq); 0 and −∞ for a query that sees no key."""
        o, lse = self._run()
        if self.bias is not None:
            dead = self.bias.amax(-1) == -INF
            o, lse = o.masked_fill(dead[..., None], 0.0), lse.masked_fill(dead, -INF)
        return o, lse

    @property
    def _flash(self) -> bool:
        """Whether torch's FlashAttention-2 supports the call."""
        return self.q.dtype != torch.float32 and self.bias is None

    def _cuda_inputs(self) -> tuple[list[Tensor], Tensor | None]:
        """Return [q, k, v] and the mask for the kernels: k and v repeated for each query head, all padded."""
        heads, sk = self.q.shape[1], self.k.shape[2]
        qkv = [_pad8(t) for t in (self.q, _repeat(self.k, heads), _repeat(self.v, heads))]
        if self.bias is None:
            return qkv, None
        # The kernel needs mask rows at multiples of 16 bytes, so allocate padded rows, and cut off the added columns in
        # the view.
        full = _pad8(self.bias.to(self.q.dtype).expand(self.q.shape[0], heads, self.q.shape[2], sk))
        return qkv, aligned(full, full.dtype)[..., :sk]

    def _run(self) -> tuple[Tensor, Tensor]:
        (q, k, v), bias = self._cuda_inputs()
        if self._flash:
            o, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, self.causal, False, scale=self.scale)
        else:
            o, lse, *_ = _aten._scaled_dot_product_efficient_attention(
                q, k, v, bias, True, 0.0, self.causal, scale=self.scale
            )
        return o[..., : self.v.shape[-1]], lse[..., : q.shape[2]]

    def backward(self, do: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv. `lse` must be +∞ for a query that sees no key."""
        (q, k, v), bias = self._cuda_inputs()
        do, o = _pad8(do), _pad8(o)
        unused = torch.empty(0, dtype=torch.int64, device=q.device)  # the state of dropout, which is off
        if self._flash:
            dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
                do, q, k, v, o, lse, None, None, q.shape[2], k.shape[2], 0.0, self.causal, unused, unused,
                scale=self.scale,
            )  # fmt: skip
        else:
            # The kernel expects lse padded to a multiple of 32 queries; it never reads the padding.
            lse = pad(lse, (0, -lse.shape[-1] % 32), value=INF)
            dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
                do, q, k, v, bias, o, lse, unused, unused, 0.0, [True, True, True, False], self.causal,
                scale=self.scale,
            )  # fmt: skip
        dim, heads = self.q.shape[-1], self.k.shape[1]
        return dq[..., :dim], _sum_group(dk, heads)[..., :dim], _sum_group(dv, heads)[..., :dim]


@dataclass(eq=False, slots=True)
class Prepared:
    """A sequence that is ready for the operators. `x` has its tensors from `Problem.batches`."""

    x: dict[str, Tensor]
    call: Call
    turned: float  # factor of q, the sign of the problem's scale: 1, −1 or 0. `Call.scale` is positive

    @classmethod
    def of(cls, problem: Problem, rows: Sequence[Row], x: dict[str, Tensor]) -> Prepared:
        spec, row = problem.spec, rows[0]
        mask = problem.tensors.get("attn_mask")
        bias = None if mask is None else added(problem.mask_part(mask, rows))
        offset = row.offset
        causal = spec.window[1] < row.kv_len - 1 - offset  # if false, even the first query sees all keys
        if causal and (bias is not None or offset or row.q_len != row.kv_len):
            keys, queries = (torch.arange(n, dtype=torch.int64, device=x["q"].device) for n in (row.kv_len, row.q_len))
            ahead = (keys > queries[:, None] + offset)[None, None]
            bias = torch.zeros((), dtype=torch.float32, device=x["q"].device) if bias is None else bias
            bias, causal = bias.masked_fill(ahead, -INF), False
        # With a mask, compute in float32: the operators need a mask in q's dtype, and 16 bits would round it (in
        # float16, −1e6 becomes −∞). On an H200 (torch 2.11) their 16-bit gradients with a mask were NaN, but those in
        # float32 were right.
        dtype = x["q"].dtype if bias is None and not spec.quantized else torch.float32
        turned, scale = (1.0, spec.scale) if spec.scale > 0 else (-1.0, -spec.scale) if spec.scale else (0.0, 1.0)
        if spec.quantized:  # compute in float32: products of a value and its scale must not be rounded to 16 bits
            k, v = (scaled(x[name], x[f"{name}_scale"]) for name in ("k", "v"))
        else:
            k, v = x["k"], x["v"]
        q, k, v = (aligned(t, dtype) for t in (x["q"], k, v))
        if turned != 1.0:
            q = q * turned
        return cls(x, Call(q, k, v, bias, causal, scale), turned)

    def answer(self) -> None:
        """Write o of a forward, and lse if requested."""
        o, lse = self.solve()
        self.x["o"].copy_(o)
        if "lse" in self.x:
            self.x["lse"].copy_(lse)

    def solve(self) -> tuple[Tensor, Tensor]:
        """Return o (n,Hq,sq,D) and lse (n,Hq,sq) of a forward."""
        o, lse = self.call.forward()
        if "sinks" in self.x:
            sinks = self.x["sinks"][:, None].expand(lse.shape)
            total = torch.logaddexp(lse, sinks)
            held = torch.where(total == -INF, 0.0, (lse - total).exp())
            o, lse = o.float() * held[..., None], total
        return o, lse

    def differentiate(self, dsinks: Tensor | None) -> None:
        """Write dq, dk and dv if requested, and add to `dsinks` (Hq,). `x` must have the forward's o and lse."""
        x, call = self.x, self.call
        o, lse = x["o"], x["lse"]
        # Use o in q's dtype, as a forward returns it: then it does not matter for the bits who computed o.
        o = aligned(o.to(x["q"].dtype), call.q.dtype)
        # An lse of +∞ instead of −∞ makes the probabilities exp(s − lse) of a masked row 0.
        lse = aligned(lse, torch.float32)
        lse = lse.masked_fill(lse == -INF, INF)
        do = aligned(x["do"], call.q.dtype)
        if dsinks is not None:
            delta = (o.float() * do.float()).sum(-1)
            dsinks -= ((x["sinks"][:, None] - lse).exp_() * delta).sum((0, 2))
        dq, dk, dv = call.backward(do, o, lse)
        if self.turned != 1.0:
            dq = dq * self.turned
        for name, grad in (("dq", dq), ("dk", dk), ("dv", dv)):
            if name in x:
                x[name].copy_(grad)


def _only_sinks(problem: Problem) -> None:
    """Write lse of sequences that have queries but no keys: it is the head's sink."""
    for _, x in problem.batches(lambda row: 1 if row.q_len and not row.kv_len else 0):
        if "lse" in x:
            x["lse"].copy_(x["sinks"][:, None].expand(x["lse"].shape))


def _with_work(problem: Problem) -> Iterator[tuple[tuple[Row, ...], dict[str, Tensor]]]:
    """Return `Problem.batches` of the sequences that have queries and keys: the operators support no empty tensors."""
    return problem.batches(lambda row: 1 if row.q_len and row.kv_len else 0)


_asking = threading.Lock()


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """If `wanted`, make torch's CUDA backwards deterministic inside the context: by default they use atomics.

    The setting is global, so one thread at a time may be inside. It enqueues work on the GPU, but does not wait for it.
    """
    with _asking, _asked(wanted):
        yield


@contextmanager
def _asked(wanted: bool) -> Iterator[None]:
    """If `wanted`, turn on deterministic algorithms inside the context.

    torch then fills new memory with NaN. Turn this off, because the operators here write all of their outputs.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = _memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(wanted or before[0], warn_only=before[1] and not wanted)
    _memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        _memory.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _pad8(t: Tensor) -> Tensor:
    """Pad the last dimension with zeros to a multiple of 8, so that every row is aligned to 16 bytes."""
    missing = -t.shape[-1] % 8
    return pad(t, (0, missing)) if missing else t


def _repeat(t: Tensor, heads: int) -> Tensor:
    """Return k or v with each key/value head repeated, for `heads` query heads."""
    return t if t.shape[1] == heads else t.repeat_interleave(heads // t.shape[1], 1)


def _sum_group(grad: Tensor, heads: int) -> Tensor:
    """Return the gradient of `heads` key/value heads: sum `grad` (n, Hq, sk, D) over each group of query heads."""
    return grad.view(grad.shape[0], heads, -1, *grad.shape[2:]).sum(2, dtype=torch.float32)
