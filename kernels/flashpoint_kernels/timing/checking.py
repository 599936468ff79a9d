"""Give each timed call inputs that no call has had, and compare the answers of some timed calls with float64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashpoint_contract.options import Options
from flashpoint_kernels.judging.exact import bounds, places
from flashpoint_kernels.problems.problem import DTYPES, Problem
from flashpoint_kernels.timing.case import Case

OURS = ("triton", "cpu", "torch", "tiled")  # our backends: one answer of each case is compared
_KEPT = 2  # number of timed calls whose answers are compared, of those with odd numbers and of those with even ones
_SPARE = 1 << 16  # further numbers of each pool, from which the inputs of a call are a window
_ROWS = 1 << 20  # scores of the queries that are compared of a forward, and at most of a whole head for dk and dv
_HEAD = 1 << 24
_BEYOND = 1.25  # a rate above the measured peak times this is impossible: the measured peak may be disturbed
_clone = torch._C.TensorBase.clone  # a function cannot replace it


class WrongAnswerError(RuntimeError):
    """A timed call answered wrongly, incompletely, or faster than the device can compute."""


class Turns:
    """The inputs of timed calls, and answers that are kept.

    `leaves` (q, k, v) and `do` are the inputs of the next call: `fresh` changes them by turns between two sets of
    tensors, and writes numbers into them that follow from no seed.
    """

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.random = case, random.SystemRandom()
        generator = torch.Generator(device).manual_seed(self.random.getrandbits(48))
        shapes = [
            (case.batch, heads, rows, dim)
            for heads, rows, dim in (
                (case.q_heads, case.q_len, case.head_dim), (case.kv_heads, case.kv_len, case.head_dim),
                (case.kv_heads, case.kv_len, case.value_dim), (case.q_heads, case.q_len, case.value_dim),
            )
        ]  # fmt: skip
        dtype, grads = DTYPES[case.dtype], case.direction != "forward"
        self.pools, self.sets = [], [list[Tensor](), list[Tensor]()]
        for n, (batch, heads, rows, dim) in enumerate(shapes):
            size = batch * heads * rows * dim
            pool = torch.randn(size + _SPARE, generator=generator, dtype=torch.float32, device=device)
            self.pools.append(pool.to(dtype))
            for each in self.sets:
                t = torch.empty((batch, heads, rows, dim), dtype=dtype, device=device)
                each.append(t.requires_grad_(grads and n < 3))
        self.leaves, self.do = self.sets[0][:3], self.sets[0][3]
        self.calls, self.counts = 0, [0, 0]
        self.kept: dict[tuple[int, int], tuple[list[Tensor], Any]] = {}
        self.fresh()

    def fresh(self) -> None:
        """Draw the inputs of the next call."""
        self.calls += 1
        inputs = self.sets[self.calls % 2]
        with torch.no_grad():
            for t, pool in zip(inputs, self.pools, strict=True):
                at = self.random.randrange(_SPARE)
                t.copy_(pool[at : at + t.numel()].view(t.shape))
        self.leaves[:], self.do = inputs[:3], inputs[3]

    def keep(self, answer: Any) -> None:
        """Keep the answer of the call that has just been timed, if it is one of those that are drawn."""
        side = self.calls % 2
        self.counts[side] += 1
        place = self.counts[side] - 1
        if place >= _KEPT:
            place = self.random.randrange(self.counts[side])
        if place >= _KEPT:
            return
        answers = answer if isinstance(answer, (tuple, list)) else [answer]
        if any(type(t) is not Tensor or t._backward_hooks for t in answers[:3]):
            kind = next(type(t).__name__ for t in answers[:3] if type(t) is not Tensor or t._backward_hooks)
            raise WrongAnswerError(f"it answers with a {kind} that is no plain torch.Tensor")
        copies = [_clone(t.detach()) for t in (answers[:1] if self.case.direction == "forward" else answers[:3])]
        self.kept[side, place] = [_clone(t.detach()) for t in (*self.leaves, self.do)], copies

    def check(self) -> None:
        """Compare the answers that were kept. Raises WrongAnswerError."""
        for inputs, answers in self.kept.values():
            compare(self.case, inputs, answers, self.random)


def compare(case: Case, inputs: Sequence[Tensor], answers: Sequence[Tensor], draw: random.Random) -> None:
    """Compare some queries of one key head with float64, or all of its queries for dk and dv.

    `answers` are o, or dq, dk and dv; a head of more than `_HEAD` scores is compared without dk and dv. Raises
    WrongAnswerError.
    """
    names = ("o",) if case.direction == "forward" else ("dq", "dk", "dv")
    shapes: dict[str, tuple[int, ...]] = {"o": (case.batch, case.q_heads, case.q_len, case.value_dim)}
    shapes |= {f"d{n}": tuple(t.shape) for n, t in zip("qkv", inputs, strict=False)}
    for name, t in zip(names, answers, strict=True):
        if tuple(t.shape) != shapes[name] or t.dtype != inputs[0].dtype:
            raise WrongAnswerError(
                f"{name} is {str(t.dtype)[6:]} {list(t.shape)}, not {case.dtype} {list(shapes[name])}"
            )
    group = case.q_heads // case.kv_heads
    batch, head = draw.randrange(case.batch), draw.randrange(case.kv_heads)
    whole = case.direction != "forward" and group * case.q_len * case.kv_len <= _HEAD
    rows = range(case.q_len)
    if not whole:
        names = names[:1]
        count = min(case.q_len, max(16, _ROWS // (group * case.kv_len)))
        rows = rows[(start := draw.randint(0, case.q_len - count)) : start + count]

    def part(t: Tensor, *, of_keys: bool) -> Tensor:
        return t[batch : batch + 1, head : head + 1] if of_keys else t[batch : batch + 1, head * group :][:, :group]

    q, k, v, do = (part(t, of_keys=n in (1, 2)).contiguous() for n, t in enumerate(inputs))
    problem = Problem.create({"q": q, "k": k, "v": v, "do": do}, Options(causal=case.causal), "backward")
    with torch.no_grad():
        found, ill = bounds.limits(problem, names, queries=rows)
        for name, t in zip(names, answers, strict=False):
            answer, limits = part(t, of_keys=name in ("dk", "dv")), found[name]
            ratio = limits.excess(answer, case.dtype)[1]
            if name in ("o", "dq"):
                ratio = ratio.masked_fill(ill[..., None], 0.0)[:, :, rows.start : rows.stop]
            if bool((ratio > 1).any()):
                at = [int(n) for n in torch.unravel_index(ratio.argmax(), ratio.shape)]
                inside = (0, at[1], at[2] + (rows.start if name in ("o", "dq") else 0), at[3])
                shift = (batch, head * (group if name in ("o", "dq") else 1), 0, 0)
                place = places.index([a + b for a, b in zip(inside, shift, strict=True)], name)
                raise WrongAnswerError(
                    f"{name} of a timed call is {float(answer[inside]):.6g} at {place}: float64 has "
                    f"{float(limits.value[inside]):.6g}, allowed is {float(limits.allowed[inside]):.1e}"
                )


def possible(tflops: float, peak: float, sheet: float | None) -> None:
    """Raise WrongAnswerError for a rate that the device cannot compute at."""
    most = sheet if sheet is not None else peak * _BEYOND
    if tflops > most:
        raise WrongAnswerError(
            f"it took the time of {tflops:.3g} TFLOP/s, but the device's peak is {sheet or peak:.3g}: it cannot have "
            "computed the answer in this time"
        )
