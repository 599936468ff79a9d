"""Attention exactly as its formula says, materialised: the reference for all other backends.

The function `attend` is plain torch; torch's autograd computes its gradients. In float64 it is the reference; in the
inputs' dtype it gives the error of torch's own arithmetic, from which tests derive bounds. It shares no code with
`tiled`, and supports every option, any head dimension and float64. Rows of the softmax are independent, so a long
sequence is computed in blocks of queries: `CHUNK` scores are in memory, not Sq·Sk for every head.

Gradients are computed from q, k and v only: `o` and `lse` from the caller are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from flashpoint_contract.spec import Row
from flashpoint_kernels.problems.dropout import kept_bits
from flashpoint_kernels.problems.modes import flushing
from flashpoint_kernels.problems.problem import Problem
from flashpoint_kernels.quantization import scaled

# Maximum scores in memory, over all heads: 32 MiB in float64; a gradient needs seven such tensors (215 MiB, measured).
CHUNK = 1 << 22

_LEAVES = {"dq": "q", "dk": "k", "dv": "v", "dattn_mask": "attn_mask", "dsinks": "sinks"}


def forward(problems: Sequence[Problem]) -> None:
    for problem in problems:
        solve_forward(problem, torch.float64)


def backward(problems: Sequence[Problem]) -> None:
    for problem in problems:
        solve_backward(problem, torch.float64)


@flushing(False)
def solve_forward(problem: Problem, dtype: torch.dtype, block: Callable[[], None] = lambda: None) -> None:
    """Write `problem.outputs` (`o` and `lse`, if present), computed in `dtype`.

    `block` is called before each block of queries, `blocks(problem)` times. If it raises, the computation ends.
    """
    problem.clear_outputs()
    for row, x in problem.sequences():
        inputs = inputs_of(problem, row, x, dtype)
        for queries in chunks(problem, row):
            block()
            o, lse = attend(problem, row, of_queries(inputs, queries), queries)
            for name, answer in (("o", o), ("lse", lse)):
                if name in problem.outputs:
                    x[name][:, queries.start : queries.stop] = answer


@flushing(False)
def solve_backward(problem: Problem, dtype: torch.dtype, block: Callable[[], None] = lambda: None) -> None:
    """Write `problem.outputs` (any of dq, dk, dv, dattn_mask, dsinks), computed in `dtype`.

    `block`: see `solve_forward`.
    """
    problem.clear_outputs()
    # Sum gradients to which several sequences or chunks add before they are rounded to the output's dtype.
    sum_dtype = torch.promote_types(dtype, torch.float32)
    shared: dict[str, Tensor] = {
        name: torch.zeros_like(problem.own_part(name), dtype=sum_dtype)
        for name in ("dattn_mask", "dsinks")
        if name in problem.outputs
    }
    for row, x in problem.sequences():
        inputs = inputs_of(problem, row, x, dtype)
        sums: dict[str, Tensor] = {
            name: torch.zeros_like(x[name], dtype=sum_dtype) for name in ("dk", "dv") if name in problem.outputs
        }
        if "dsinks" in shared:
            sums["dsinks"] = shared["dsinks"]
        if "dattn_mask" in shared:
            sums["dattn_mask"] = problem.mask_part(shared["dattn_mask"], [row])[0]
        for queries in chunks(problem, row):
            block()
            rows = slice(queries.start, queries.stop)
            add_gradients(_gradients(problem, row, inputs, x, queries, dtype), x, sums, rows)
        for name in sums.keys() & {"dk", "dv"}:
            x[name].copy_(sums[name])
    for name, total in shared.items():
        problem.own_part(name).copy_(total)


def add_gradients(
    found: Mapping[str, Tensor], x: Mapping[str, Tensor], sums: Mapping[str, Tensor], rows: slice
) -> None:
    """Write the gradient of some query rows into x["dq"], and add the other gradients to `sums`."""
    for name, grad in found.items():
        if name == "dq":
            x["dq"][:, rows] = grad
            continue
        total = sums[name]
        if name == "dattn_mask" and total.shape[1] > 1:
            total = total[:, rows]
        total += grad


def _gradients(
    problem: Problem, row: Row, inputs: dict[str, Tensor], x: dict[str, Tensor], queries: range, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the contribution of these queries to each requested gradient, by autograd."""
    names = [_LEAVES[name] for name in problem.outputs]
    rows = slice(queries.start, queries.stop)
    with recording():
        part = {name: recordable(t) for name, t in of_queries(inputs, queries).items()}
        leaves = [part[name].detach().requires_grad_() for name in names]
        answers = attend(problem, row, part | dict(zip(names, leaves, strict=True)), queries)
        do = recordable(x["do"][:, rows].to(dtype))
        dlse = recordable(x["dlse"][:, rows].to(dtype)) if "dlse" in x else torch.zeros_like(answers[1])
        # The gradients of this loss for o and lse are do and dlse. If autograd.grad got do and dlse directly, it would
        # import sympy, which takes half a second. If only v is a leaf, lse has no gradient, because it does not depend
        # on v.
        pairs = zip(answers, (do, dlse), strict=True)
        losses = [(answer * gradient).sum() for answer, gradient in pairs if answer.requires_grad]
        grads = torch.autograd.grad(losses, leaves)
    return dict(zip(problem.outputs, grads, strict=True))


@contextmanager
def recording() -> Iterator[None]:
    """Let autograd record. Nothing is recorded of tensors of the inference mode: see `recordable`."""
    # torch's dispatcher runs an operator with autograd off (ops.py). enable_grad alone does not change that.
    recorded = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
    with torch.inference_mode(False), torch.enable_grad(), recorded:
        yield


def recordable(t: Tensor) -> Tensor:
    return t.clone() if t.is_inference() else t


def blocks(problem: Problem) -> int:
    """Return the number of blocks of queries in which the problem is computed."""
    return sum(1 for row in problem.rows for _ in chunks(problem, row))


def chunks(problem: Problem, row: Row) -> Iterator[range]:
    """Return ranges of a sequence's queries, each with at most CHUNK scores or with one query."""
    step = max(1, CHUNK // max(1, problem.spec.q_heads * row.kv_len))
    return (range(start, min(start + step, row.q_len)) for start in range(0, row.q_len, step))


def of_queries(inputs: dict[str, Tensor], queries: range) -> dict[str, Tensor]:
    """Return the inputs with q, and a mask that depends on the query, reduced to `queries`."""
    rows = slice(queries.start, queries.stop)
    cut = {"q": inputs["q"][:, rows]} if "q" in inputs else {}
    if "attn_mask" in inputs and inputs["attn_mask"].shape[1] > 1:
        cut["attn_mask"] = inputs["attn_mask"][:, rows]
    return inputs | cut


def inputs_of(problem: Problem, row: Row, x: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the inputs of one sequence in `dtype`; a bool mask keeps its dtype.

    q is (Hq,sq,D), k and v are (Hk,sk,D|Dv), sinks and slopes (Hq,), attn_mask (Hq|1,sq|1,sk|1).
    """
    tensors: dict[str, Tensor] = {name: x[name] for name in ("q", "k", "v") if name in x}
    # The canonical views of sinks and slopes are float32, but a float64 problem keeps the caller's float64.
    if "sinks" in x:
        tensors["sinks"] = problem.tensors["sinks"]
    if "alibi_slopes" in x:
        slopes = problem.tensors["alibi_slopes"]
        tensors["alibi_slopes"] = slopes[row.index] if slopes.ndim == 2 else slopes
    if "attn_mask" in problem.tensors:
        tensors["attn_mask"] = problem.mask_part(problem.tensors["attn_mask"], [row])[0]
    for name in ("k", "v"):
        if f"{name}_scale" in x:
            tensors[name] = scaled(x[name], x[f"{name}_scale"], dtype)
    return {name: t if t.dtype == torch.bool else t.to(dtype) for name, t in tensors.items()}


def attend(problem: Problem, row: Row, x: dict[str, Tensor], queries: range) -> tuple[Tensor, Tensor]:
    """Return o (Hq,n,Dv) and lse (Hq,n) for n queries of one sequence, in the dtype of `x`. Differentiable.

    s = scale·q·kᵀ;  s = softcap·tanh(s/softcap);  s −= slope·|i + offset − j|;  s += mask;  s = −∞ for hidden keys
    P = softmax([s, sink]) without the sink's column;  o = dropout(P)·v;  lse = log Σ exp [s, sink]
    """
    spec, options = problem.spec, problem.spec.options
    q, k, v = x["q"], x["k"], x["v"]
    group = spec.q_heads // spec.kv_heads
    s = spec.scale * (q @ k.repeat_interleave(group, 0).mT)
    if options.softcap:
        s = options.softcap * torch.tanh(s / options.softcap)
    i = torch.arange(queries.start, queries.stop, dtype=torch.int64, device=s.device)[:, None]
    j = torch.arange(row.kv_len, dtype=torch.int64, device=s.device)
    ahead = j - i - row.offset
    if "alibi_slopes" in x:
        # Always in float64: float16 cannot count beyond 2048.
        s = s - (x["alibi_slopes"].double()[:, None, None] * ahead.abs()).to(s.dtype)
    seen = torch.ones_like(s, dtype=torch.bool)
    if spec.has("block_mask"):
        rows, keys = (at // size for at, size in zip((i, j), options.block_size, strict=True))
        seen = seen & problem.block_part([row])[0][:, rows, keys]
    if "attn_mask" in x:
        if x["attn_mask"].dtype == torch.bool:
            seen = seen & x["attn_mask"]
        else:
            s = s + x["attn_mask"]
    if options.causal:
        seen = seen & (ahead <= 0)
    left, right = options.window
    if left >= 0:
        seen = seen & (ahead >= -left)
    if right >= 0:
        seen = seen & (ahead <= right)
    s = s.masked_fill(~seen, float("-inf"))
    # The sink (or −∞) is an additional column, so softmax never gets an empty row, even without any keys.
    sink = x["sinks"] if "sinks" in x else s.new_full((spec.q_heads,), float("-inf"))
    s = torch.cat([s, sink[:, None, None].expand(-1, len(queries), 1)], dim=-1)
    # A row with only −∞ would give NaN in softmax and in its gradient: compute it from zeros, and overwrite its answers
    # later.
    dead = (s == float("-inf")).all(-1, keepdim=True)
    s = s.masked_fill(dead, 0.0)
    p = torch.softmax(s, dim=-1).masked_fill(dead, 0.0)[..., :-1]
    lse = torch.logsumexp(s, dim=-1).masked_fill(dead[..., 0], float("-inf"))
    if options.dropout_p:
        assert problem.seed is not None, "a problem with dropout has a seed"
        everything = ([row.index], problem.query_heads, queries, range(row.kv_len))
        keep = kept_bits(problem.seed, options.dropout_p, *everything, s.device) != 0
        p = torch.where(keep, p / (1.0 - options.dropout_p), 0.0)
    return p @ v.repeat_interleave(group, 0), lse
