"""`attention`, differentiable, and `attention_backward`: the library's two calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashpoint_kernels.dispatch import available_backends, run
from flashpoint_kernels.problem import Problem
from flashpoint_kernels.spec import Direction, Options, ProblemError
from flashpoint_kernels.support import choose_backend

_DIFFERENTIABLE = ("q", "k", "v", "attn_mask", "sinks")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    q_lengths: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    layout: str = "bhsd",
    causal: bool = False,
    causal_alignment: str = "bottom_right",
    window: Sequence[int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    precision: str = "ieee",
    return_lse: bool = False,
    deterministic: bool = True,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, softmax(scale·q·kᵀ)·v, without the Sq × Sk matrix in memory (FlashAttention-2, Dao 2023).

    B batch, Sq and Sk query and key lengths, Hq query heads, Hk key/value heads (Hq a multiple of Hk), D and Dv the
    head dimensions of q, k and of v, at most 256 each (any on `reference`).

    Args:
        q: (B, Hq, Sq, D) in layout `bhsd`, (B, Sq, Hq, D) in `bshd`, (Tq, Hq, D) in `thd`; (S, D) and (B, S, D) are one
            head. float16, bfloat16, float32; float64 on `reference`.
        k, v: likewise with Hk heads and Sk rows, of D and Dv; q's dtype.
        attn_mask: bool (true = attend) or float (added to the scaled scores), broadcastable to (B, Hq, Sq, Sk).
        alibi_slopes: (Hq,) or (B, Hq); adds −slope·|i + offset − j| to the scores. Not differentiable.
        sinks: (Hq,); one more logit a head in the softmax's denominator, with no value.
        q_lengths, kv_lengths: (B,) int32 or int64, valid rows of padded sequences; rows beyond are never read, and
            come back 0 (`lse` −∞).
        cu_seqlens_q, cu_seqlens_k: (n+1,) int32 or int64, where each sequence of layout `thd` starts and ends.
        layout: `bhsd`, `bshd` or `thd`.
        causal: query i sees key j only if j <= i + offset.
        causal_alignment: `bottom_right`: offset = Sk − Sq; `top_left`: offset = 0. Each sequence's own lengths count.
        window: [left, right] keys visible on either side of the diagonal j = i + offset; −1 = no bound.
        scale: multiplies q·k; None = 1/sqrt(D).
        softcap: s = softcap·tanh(s/softcap) before mask and bias; 0 = off.
        dropout_p, dropout_seed: Philox dropout of the probabilities, 0 <= p < 1; the mask is a function of the seed
            alone, whatever the backend. With no seed one is drawn from torch's generator.
        precision: float32 matrix products, `ieee` or `tf32`.
        return_lse: also return the natural log of the softmax's denominator.
        deterministic: gradients bitwise equal from run to run.
        backend: `auto`, or one of `triton`, `torch`, `tiled`, `reference`, which is then never substituted.

    Returns:
        o in q's dtype, layout and rank, with Dv columns; with `return_lse` (o, lse), lse float32 of (B, Hq, Sq),
        (Hq, Tq) in `thd`, (B, S) and (S,) for 3-D and 2-D q. A query that may see no key has o = 0 and lse = −∞ (with a
        sink, the sink), and zero gradients.

        Differentiable once in q, k, v, a float attn_mask and sinks, through o and lse.

    Raises:
        ProblemError: a ValueError whose `errors` name each field that is wrong or that the backend cannot do.
    """
    tensors = {
        "q": q, "k": k, "v": v, "attn_mask": attn_mask, "alibi_slopes": alibi_slopes, "sinks": sinks,
        "q_lengths": q_lengths, "kv_lengths": kv_lengths, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
    }  # fmt: skip
    options = Options(
        layout=layout, causal=causal, causal_alignment=causal_alignment, window=window,  # type: ignore[arg-type]
        scale=scale, softcap=softcap, dropout_p=dropout_p, dropout_seed=dropout_seed, precision=precision,
        return_lse=return_lse, deterministic=deterministic, backend=backend,
    )  # fmt: skip
    given = {name: t for name, t in tensors.items() if t is not None}
    if torch.is_grad_enabled():
        if "alibi_slopes" in given and given["alibi_slopes"].requires_grad:
            raise ProblemError([("alibi_slopes", "has no gradient: pass slopes that do not require one")])
        if any(given[name].requires_grad for name in _DIFFERENTIABLE if name in given):
            o, lse = _Attention.apply(options, tuple(given), *given.values())  # type: ignore[no-untyped-call]
            return (o, lse) if return_lse else o
    problem = _solve(given, options, "forward")
    return (problem.outputs["o"], problem.outputs["lse"]) if return_lse else problem.outputs["o"]


def attention_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor | None = None,
    lse: Tensor | None = None,
    *,
    dlse: Tensor | None = None,
    grads: Sequence[str] = ("dq", "dk", "dv"),
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    q_lengths: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    layout: str = "bhsd",
    causal: bool = False,
    causal_alignment: str = "bottom_right",
    window: Sequence[int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    precision: str = "ieee",
    deterministic: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, ...]:
    """The gradients of `attention` for the gradient `do` of its `o` and, where given, `dlse` of its `lse`.

    Args:
        do: o's shape and dtype.
        q, k, v: as the forward took them, with the same options; `dropout_seed` is needed with dropout.
        o, lse: the forward's answers. Both or neither: without them the forward is run again.
        dlse: lse's shape, float32.
        grads: which gradients, of dq, dk, dv, dattn_mask (float mask) and dsinks.

    Returns:
        One tensor for each name in `grads`, in that order, of the shape, layout and dtype of its input.

    Raises:
        ProblemError: as `attention`.
    """
    tensors = {
        "q": q, "k": k, "v": v, "do": do, "o": o, "lse": lse, "dlse": dlse,
        "attn_mask": attn_mask, "alibi_slopes": alibi_slopes, "sinks": sinks,
        "q_lengths": q_lengths, "kv_lengths": kv_lengths, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
    }  # fmt: skip
    options = Options(
        layout=layout, causal=causal, causal_alignment=causal_alignment, window=window,  # type: ignore[arg-type]
        scale=scale, softcap=softcap, dropout_p=dropout_p, dropout_seed=dropout_seed, precision=precision,
        grads=grads, deterministic=deterministic, backend=backend,  # type: ignore[arg-type]
    )  # fmt: skip
    problem = _solve({name: t for name, t in tensors.items() if t is not None}, options, "backward")
    return tuple(problem.outputs[name] for name in options.grads)


def _solve(tensors: Mapping[str, Tensor], options: Options, direction: Direction) -> Problem:
    problem = Problem.create(tensors, options, direction)
    run([problem], choose_backend(problem.spec, available_backends(str(problem.device))))
    return problem


class _Attention(torch.autograd.Function):
    """Forward keeps the inputs, o and lse; backward recomputes the probabilities from them."""

    @staticmethod
    def forward(ctx: Any, options: Options, names: tuple[str, ...], *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        problem = _solve(dict(zip(names, inputs, strict=True)), replace(options, return_lse=True), "forward")
        o, lse = problem.outputs["o"], problem.outputs["lse"]
        ctx.save_for_backward(*inputs, o, lse)
        ctx.names = names
        ctx.options = replace(options, return_lse=False, dropout_seed=problem.seed)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, o, lse = ctx.saved_tensors
        tensors = dict(zip(ctx.names, inputs, strict=True))
        tensors |= {"o": o, "lse": lse, "do": torch.zeros_like(o) if do is None else do}
        if dlse is not None:
            tensors["dlse"] = dlse
        asked = {f"d{name}" for name, needed in zip(ctx.names, ctx.needs_input_grad[2:], strict=True) if needed}
        grads = tuple(f"d{name}" for name in _DIFFERENTIABLE if f"d{name}" in asked)
        with torch.no_grad():
            answers = _solve(tensors, replace(ctx.options, grads=grads), "backward").outputs
        if torch.is_grad_enabled():  # create_graph: the gradients depend on the inputs, and must not seem not to
            answers = {name: _FirstOrder.apply(t, *inputs) for name, t in answers.items()}  # type: ignore[no-untyped-call]
        return None, None, *(answers.get(f"d{name}") for name in ctx.names)


class _FirstOrder(torch.autograd.Function):
    """A gradient as it is, known to depend on the inputs; its own derivative is not there, and says so."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *inputs: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, ...]:
        raise RuntimeError("second-order gradients of attention are not available")
