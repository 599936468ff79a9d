"""The fast path for plain calls: only q, k and v, on the CPU, answered by one call of our kernels in C, or of torch's
fused operator.

For short sequences, the operator takes a few microseconds; a problem, its views and torch's dispatcher take several
times as long. So everything that follows from shapes, dtypes and options is computed once and cached (`Route`). A call
then consists of the operator and a check of its answer. Answers, bits and gradients are equal to those of the general
path (ops.py), which handles all other calls: tensors that torch traces, maps or counts, and calls for which `_route`
returns None.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashpoint_contract.options import Options, ProblemError
from flashpoint_contract.spec import Row, Spec, plan
from flashpoint_contract.tensors import TensorInfo
from flashpoint_kernels import native, ops
from flashpoint_kernels.dispatch import available_backends
from flashpoint_kernels.problem import DTYPE_NAMES, Problem
from flashpoint_kernels.reproducible import (
    aligned,
    aligned_heads,
    exactly,
    has_native_forward,
    in_blocks,
    in_one_part,
    sharing,
    thread_count,
    with_all_threads,
)
from flashpoint_kernels.support import choose_backend, unsupported
from flashpoint_kernels.torch_backend.backward import gradients
from flashpoint_kernels.torch_backend.call import Call
from flashpoint_kernels.torch_backend.forward import attend_dense

_CPU = torch.device("cpu")
_ORDINARY = (Tensor, torch.nn.Parameter)  # not subclasses, which may redefine operations
_dispatch_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack


class Route(NamedTuple):
    """How to compute a plain call with given shapes, dtypes and options."""

    options: Options
    turned: bool  # layout bshd: heads and rows are transposed
    causal: bool  # the operator's own causal mask, aligned top left
    scale: float
    native: tuple[Spec, Row] | None  # the forward is of the kernels in C
    threads: int  # of the forward; 0: all of torch's threads
    differentiates: bool  # the gradient is also one call of the operator, on one thread, or of these kernels
    native_gradient: Spec | None  # the gradient is of these kernels

    def call(self, q: Tensor, k: Tensor, v: Tensor) -> Call:
        if self.turned:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        kind = torch.float32
        return Call(
            aligned_heads(q, kind), aligned_heads(k, kind), aligned_heads(v, kind), None, self.causal, self.scale
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return o in the caller's layout and dtype, and lse (B,Hq,Sq)."""
        if self.native is not None:
            return self._native(*self.native, q, k, v)
        with exactly(self.threads):
            o, lse = self.call(q, k, v).forward()
        return self._given(o, q.dtype).contiguous(), lse

    def backward(self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> list[Tensor]:
        """Return dq, dk and dv, in the layout of q, k and v."""
        if self.turned:
            do, o = do.transpose(1, 2), o.transpose(1, 2)
        if self.native_gradient is not None:
            return self._native_gradient(self.native_gradient, do, q, k, v, o, lse)
        kind = torch.float32
        lse = aligned(lse, kind)
        lse = lse.masked_fill(lse == float("-inf"), float("inf"))  # see `Call.backward`
        with exactly(1):
            grads = self.call(q, k, v).backward(aligned_heads(do, kind), aligned_heads(o, kind), lse)
        return [self._given(grad, q.dtype) for grad in grads]

    def _native(self, spec: Spec, row: Row, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        o = q.new_empty(*q.shape[:3], v.shape[3])
        lse = torch.empty(spec.lse_shape)
        q, k, v, answer = (t.transpose(1, 2) for t in (q, k, v, o)) if self.turned else (q, k, v, o)
        attend_dense(spec, row, q, k, v, answer, lse, self.threads or torch.get_num_threads())
        return o, lse

    def _native_gradient(
        self, spec: Spec, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor
    ) -> list[Tensor]:
        """Return dq, dk and dv of canonical do and o, in the layout of q, k and v."""
        given = {"q": q, "k": k, "v": v}
        found = {f"d{name}": torch.empty(t.shape, dtype=t.dtype) for name, t in given.items()}
        views = {name: t.transpose(1, 2) if self.turned else t for name, t in (given | found).items()}
        gradients(spec, spec.rows({}), views | {"do": do, "o": o, "lse": lse}, torch.get_num_threads())
        return list(found.values())

    def _given(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        t = t if t.dtype == dtype else t.to(dtype)
        return t.transpose(1, 2) if self.turned else t


def attention(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor] | None:
    """Return o and lse, or None if the call needs the general path."""
    if (
        torch.compiler.is_compiling()
        or _dispatch_modes()
        or _transforms() is not None
        or forward_ad._current_level >= 0
    ):
        return None
    if not (type(q) in _ORDINARY and type(k) in _ORDINARY and type(v) in _ORDINARY):
        return None
    if not (q.is_cpu and k.is_cpu and v.is_cpu) or torch.is_autocast_enabled("cpu"):
        return None
    route = _route(options, q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype)
    if route is None:
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        o, lse = _Plain.apply(q, k, v, route)  # type: ignore[no-untyped-call]
        return o, lse
    return route.forward(q, k, v)


@lru_cache(1024)  # a model repeats a few problems
def _route(options: Options, *found: Any) -> Route | None:
    """Return the route for these shapes and dtypes of q, k and v; None without one, or if there is an error."""
    shapes, dtypes = found[:3], found[3:]
    if len(shapes[0]) != 4 or options.dropout_p or any(dtype not in DTYPE_NAMES for dtype in dtypes):
        return None
    infos = {n: TensorInfo(DTYPE_NAMES[t], tuple(s)) for n, s, t in zip("qkv", shapes, dtypes, strict=True)}
    try:
        spec = plan(infos, options, "forward")
        backend = choose_backend(spec, available_backends("cpu"))
    except ProblemError:
        return None
    if backend != "torch" or spec.ragged or min(spec.batch, spec.q_len, spec.kv_len) < 1 or spec.scale <= 0:
        return None
    problem = _alone(spec)
    row = problem.rows[0]
    threads = 1
    if (whole := with_all_threads(problem)).threads:
        threads = 0
    elif not in_one_part(problem, backend) or thread_count(problem, row) > 1:
        return None
    in_c = (spec, row) if has_native_forward(spec, row) else None
    if in_c is None and (in_blocks(spec, row) or sharing(whole, row, "torch") < spec.batch):
        return None
    causal = spec.window[1] < row.kv_len - 1 - spec.offset(row.q_len, row.kv_len)
    gradient = _gradient(spec)
    own = gradient if native.supports(gradient) else None
    differentiates = own is not None or (not in_blocks(spec, row) and _differentiates(gradient))
    return Route(options, options.layout == "bshd", causal, spec.scale, in_c, threads, differentiates, own)


def _gradient(spec: Spec) -> Spec:
    """Return the gradient problem of a plain forward."""
    o, lse = TensorInfo(spec.dtype, spec.shape_of("o")), TensorInfo("float32", spec.lse_shape)
    infos = {"q": spec.tensors["q"], "k": spec.tensors["k"], "v": spec.tensors["v"], "do": o, "o": o, "lse": lse}
    return plan(infos, spec.options, "backward")


def _differentiates(spec: Spec) -> bool:
    """Return whether a gradient is one call of torch's operator."""
    problem = _alone(spec)
    if unsupported("torch", spec):
        return False
    row = problem.rows[0]
    few = thread_count(problem, row) == 1 and sharing(problem, row, "torch") >= spec.batch
    return few and in_one_part(problem, "torch")


def _alone(spec: Spec) -> Problem:
    """Return a problem without tensors."""
    return Problem(spec, spec.rows({}), None, _CPU, {})


class _Plain(torch.autograd.Function):
    """The autograd function of a plain call.

    The backward is one call if the route allows it, else the operator of ops.py.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, route: Route) -> tuple[Tensor, Tensor]:
        o, lse = route.forward(q, k, v)
        ctx.set_materialize_grads(False)
        ctx.route = route
        ctx.save_for_backward(q, k, v, o, lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        route: Route = ctx.route
        needed = [name for name, yes in zip("qkv", ctx.needs_input_grad, strict=False) if yes]
        if do is not None and dlse is None and route.differentiates and not torch.is_grad_enabled():
            found = dict(zip("qkv", route.backward(do, q, k, v, o, lse), strict=True))
        else:
            inputs = ops.plain_inputs(q, k, v)
            found = ops.gradients(inputs, do, o, lse, dlse, ops.literal(route.options), needed)
        return *(found[name] if name in needed else None for name in "qkv"), None
