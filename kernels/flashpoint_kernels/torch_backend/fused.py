"""torch's own fused attention as a backend, where it covers the options (`support.SUPPORT["torch"]`).

On the CPU `_scaled_dot_product_flash_attention_for_cpu`, on CUDA torch's FlashAttention-2 for half dtypes with no mask
and its memory-efficient kernel for the rest; each with its own backward from the saved `o` and `lse`. These operators
are private to torch: a test guards their signatures, and the gpu tests prove the CUDA half of this file on a device.

Sequences share a call where its bits do not change with the batch (`reproducible.sharing`), else each is a batch of
one. What the operators leave out is put right here: they know the diagonal from the top left alone, have no answer (or
crash) without keys, and give `lse` 0 for a masked row.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashpoint_contract.spec import Row
from flashpoint_kernels.problem import Problem, consecutive, narrowed
from flashpoint_kernels.quantization import scaled
from flashpoint_kernels.reproducible import aligned, aligned_heads, exactly, sharing, threads

INF = float("inf")
_LOOKED_AT = 1 << 20  # scores at a time
_aten = torch.ops.aten
_forward_cpu = _aten._scaled_dot_product_flash_attention_for_cpu.default  # the packet, not its one overload, takes 7 µs
_memory: Any = torch.utils.deterministic  # whose property mypy does not see


def forward(problems: Sequence[Problem]) -> None:
    for problem in problems:
        problem.clear_outputs()
        if problem.calls:
            for x, call, count in problem.calls:
                with exactly(count):
                    call.answer(x)
            continue
        calls, in_place = [], not problem.spec.paged
        for rows, x in _with_work(problem):
            with threads(problem, rows[0]) as count:
                call = Call.of(problem, rows, x)
                call.answer(x)
            in_place = in_place and consecutive(rows) and call.reads(x)
            calls.append((x, call, count))
        if in_place:
            problem.calls = calls


def backward(problems: Sequence[Problem]) -> None:
    """Runs the forward itself where `o` and `lse` are not given."""
    for problem in problems:
        problem.clear_outputs()
        for rows, x in _with_work(problem):
            with threads(problem, rows[0]):
                call = Call.of(problem, rows, x)
                o, lse = (x["o"], x["lse"]) if "lse" in x else call.forward()
                # As the forward's answer is rounded, so that a caller who brings it gets the same bits.
                o = aligned_heads(o.to(x["q"].dtype), call.q.dtype)
                # +∞ in place of the −∞ of a masked row makes its probabilities exp(s − lse) = 0.
                lse = aligned(lse, torch.float32)
                lse = lse.masked_fill(lse == -INF, INF)
                do = aligned_heads(x["do"], call.q.dtype)
                if problem.device.type == "cuda":
                    with _deterministic(problem.spec.options.deterministic):
                        dq, dk, dv = call.backward_cuda(do, o, lse)
                else:
                    dq, dk, dv = call.backward_cpu(do, o, lse)
                if call.turned != 1.0:
                    dq = dq * call.turned
                for name, grad in (("dq", dq), ("dk", dk), ("dv", dv)):
                    if name in x:
                        x[name].copy_(grad)


def _with_work(problem: Problem) -> Iterator[tuple[tuple[Row, ...], dict[str, Tensor]]]:
    """The sequences with a query and a key: the operators divide by zero without, and the answer is written already."""
    on_cpu = problem.device.type == "cpu"

    def most(row: Row) -> int:
        return (sharing(problem, row) if on_cpu else 1) if row.q_len and row.kv_len else 0

    return problem.batches(most)


_asking = threading.Lock()


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


@dataclass(eq=False, slots=True)
class Call:
    """Sequences of equal lengths as the operators take them: q (n,Hq,sq,D), k and v (n,Hk,sk,D), a mask to add or none.

    `causal` is the operators' own, from the top left; `dead` marks the queries that may see no key.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None  # (n|1, Hq|1, sq|1, sk|1) float32
    dead: Tensor | None  # (n|1, Hq|1, sq|1) bool
    causal: bool
    scale: float
    turned: float  # what q was multiplied by, so that `scale` is above 0, which the operators take for granted

    @classmethod
    def of(cls, problem: Problem, rows: Sequence[Row], x: dict[str, Tensor]) -> Call:
        spec, row = problem.spec, rows[0]
        # The CPU operators' half arithmetic was seen to miss the test rule (float16 dv at 512 × 512): float32 keeps it.
        # CUDA's take a mask in q's dtype alone, where another's numbers would be rounded, and −1e6 be −∞ in float16.
        mask = problem.tensors.get("attn_mask")
        held = (mask is None or mask.dtype in (torch.bool, x["q"].dtype)) and not spec.quantized
        dtype = x["q"].dtype if problem.device.type == "cuda" and held else torch.float32
        if spec.quantized:  # in float32, which rounds no product of a number and its scale to a half type
            x = x | {name: scaled(x[name], x[f"{name}_scale"]) for name in ("k", "v")}
        q, k, v = (aligned_heads(x[name], dtype) for name in "qkv")
        turned, scale = (1.0, spec.scale) if spec.scale > 0 else (-1.0, -spec.scale) if spec.scale else (0.0, 1.0)
        if turned != 1.0:
            q = q * turned
        offset = spec.offset(row.q_len, row.kv_len)
        causal = spec.options.causal and offset < row.kv_len - 1  # else the first query sees every key already
        bias = None
        if mask is not None:
            bias = problem.mask_part(mask, rows)
            if bias.dtype == torch.bool:
                bias = torch.zeros(bias.shape, device=bias.device).masked_fill_(~bias, -INF)
            bias = narrowed(bias) if bias.dtype == torch.float64 else bias.float()
        if causal and (bias is not None or offset != 0):
            i = torch.arange(row.q_len, device=q.device)[:, None]
            hidden = torch.arange(row.kv_len, device=q.device) > i + offset
            bias = (q.new_zeros((), dtype=torch.float32) if bias is None else bias).masked_fill(hidden, -INF)
            bias = bias.view((1,) * (4 - bias.ndim) + tuple(bias.shape))
            causal = False
        dead = None if bias is None else bias.amax(-1) == -INF
        return cls(q, k, v, bias, dead, causal, scale, turned)

    def reads(self, x: Mapping[str, Tensor]) -> bool:
        """Return whether the operators read the tensors `x` themselves, not copies, and no mask."""
        given = ((self.q, x["q"]), (self.k, x["k"]), (self.v, x["v"]))
        return self.bias is None and all(t.data_ptr() == own.data_ptr() for t, own in given)

    def answer(self, x: Mapping[str, Tensor]) -> None:
        """Write o, and lse where it is asked, of a forward."""
        o, lse = self.forward()
        x["o"].copy_(o)
        if "lse" in x:
            x["lse"].copy_(lse)

    def forward(self) -> tuple[Tensor, Tensor]:
        """o (n,Hq,sq,D) and lse (n,Hq,sq)."""
        o, lse = self.forward_cuda() if self.q.is_cuda else self.forward_cpu()
        if self.dead is not None:
            o, lse = o.masked_fill(self.dead[..., None], 0.0), lse.masked_fill(self.dead, -INF)
        return o, lse

    def forward_cpu(self) -> tuple[Tensor, Tensor]:
        o, lse = self.unchecked_cpu()
        if not lse.all():  # one operation, which takes NaN for true
            self.put_right(o, lse)
        return o, lse

    def unchecked_cpu(self) -> tuple[Tensor, Tensor]:
        """As `forward_cpu`, with rows whose lse is 0 that `put_right` has to look at."""
        found: tuple[Tensor, Tensor] = _forward_cpu(
            self.q, self.k, self.v, 0.0, self.causal, attn_mask=self.bias, scale=self.scale
        )
        return found

    def put_right(self, o: Tensor, lse: Tensor) -> None:
        """Put right the rows whose largest score is NaN or −∞: the operator says o = 0 and lse = 0.

        It drops a NaN where the keys are fewer than a vector of floats has. All rows of a head are looked at together,
        and several heads, because one key of score 0 makes lse = 0 in every row.
        """
        rows = lse == 0
        (n, heads, sq, _), sk = self.q.shape, self.k.shape[2]
        group = heads // self.k.shape[1]
        bias = None if self.bias is None else self.bias.expand(n, heads, sq, sk)
        keys, height = torch.arange(sk), max(1, _LOOKED_AT // sk)
        for some in torch.split(rows.any(-1).nonzero(), max(1, _LOOKED_AT // (sq * sk))):
            batch, head = some.unbind(1)
            k = self.k[batch, head // group].mT.float()
            for start in range(0, sq, height):
                queries = slice(start, min(start + height, sq))
                s = self.scale * (self.q[batch, head, queries].float() @ k)
                if bias is not None:
                    s += bias[batch, head, queries]
                if self.causal:
                    s.masked_fill_(keys > torch.arange(queries.start, queries.stop)[:, None], -INF)
                most, asked = s.amax(-1), rows[batch, head, queries]
                for found, answer, sum_of_exp in ((most.isnan(), torch.nan, torch.nan), (most == -INF, 0.0, -INF)):
                    which, row = (found & asked).nonzero().unbind(1)
                    o[batch[which], head[which], row + start] = answer
                    lse[batch[which], head[which], row + start] = sum_of_exp

    def backward_cpu(self, do: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            do, self.q, self.k, self.v, o, lse, 0.0, self.causal, attn_mask=self.bias, scale=self.scale
        )
        return dq, dk, dv

    @property
    def _flash(self) -> bool:
        """Whether torch's FlashAttention-2 covers the call: its diagonal is the bottom right one, so only squares."""
        square = self.q.shape[2] == self.k.shape[2]
        return self.q.dtype != torch.float32 and self.bias is None and (not self.causal or square)

    def _cuda_inputs(self) -> tuple[list[Tensor], Tensor | None]:
        """q, k, v with one key/value head a query head and D padded to what the kernels take; the mask likewise."""
        heads, sk = self.q.shape[1], self.k.shape[2]
        qkv = [_pad8(t) for t in (self.q, _repeat(self.k, heads), _repeat(self.v, heads))]
        if self.bias is None:
            return qkv, None
        # Rows of the mask must lie together, 16 bytes apart; the columns added are cut off again, their memory stays.
        full = _pad8(self.bias.to(self.q.dtype).expand(1, heads, self.q.shape[2], sk))
        return qkv, aligned(full, full.dtype)[..., :sk]

    def forward_cuda(self) -> tuple[Tensor, Tensor]:
        (q, k, v), bias = self._cuda_inputs()
        if self._flash:
            o, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, self.causal, False, scale=self.scale)
        else:
            o, lse, *_ = _aten._scaled_dot_product_efficient_attention(
                q, k, v, bias, True, 0.0, self.causal, scale=self.scale
            )
        return o[..., : self.v.shape[-1]], lse[..., : q.shape[2]]

    def backward_cuda(self, do: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (q, k, v), bias = self._cuda_inputs()
        do, o = _pad8(do), _pad8(o)
        unused = torch.empty(0, dtype=torch.int64, device=q.device)  # the state of dropout, which is off
        if self._flash:
            dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
                do, q, k, v, o, lse, None, None, q.shape[2], k.shape[2], 0.0, self.causal, unused, unused,
                scale=self.scale,
            )  # fmt: skip
        else:
            # Its own lse is padded to 32 queries; the padding is never read back.
            lse = pad(lse, (0, -lse.shape[-1] % 32), value=INF)
            dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
                do, q, k, v, bias, o, lse, unused, unused, 0.0, [True, True, True, False], self.causal,
                scale=self.scale,
            )  # fmt: skip
        dim, heads = self.q.shape[-1], self.k.shape[1]
        return dq[..., :dim], _sum_group(dk, heads)[..., :dim], _sum_group(dv, heads)[..., :dim]


def _pad8(t: Tensor) -> Tensor:
    """The last dimension padded with zeros to a multiple of 8, which keeps every row 16 bytes aligned."""
    missing = -t.shape[-1] % 8
    return pad(t, (0, missing)) if missing else t


def _repeat(t: Tensor, heads: int) -> Tensor:
    """One key/value head for each of `heads` query heads."""
    return t if t.shape[1] == heads else t.repeat_interleave(heads // t.shape[1], 1)


def _sum_group(grad: Tensor, heads: int) -> Tensor:
    """The gradient (1, Hq, sk, D) of repeated heads as that of the `heads` they repeat, summed in float32."""
    return grad.view(1, heads, -1, *grad.shape[2:]).sum(2, dtype=torch.float32)
