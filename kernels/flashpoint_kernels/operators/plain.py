"""The fast path for plain calls: only q, k and v, on the CPU, answered by one call of the kernels in C.

For short sequences, the creation of a `Problem` and torch's dispatcher take several times as long as the kernel. So
everything that follows from shapes, dtypes and options is computed once and cached (`Route`). Results and gradients
have the same bits as on the general path (ops.py), which handles all other calls: those under torch.compile, a
transform such as vmap or a dispatch mode, and those for which `_route` returns None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashpoint_contract.options import Options, ProblemError
from flashpoint_contract.spec import Row, Spec, plan
from flashpoint_contract.tensors import TensorInfo
from flashpoint_kernels import native
from flashpoint_kernels.cpu_backend.backward import differentiate_dense
from flashpoint_kernels.cpu_backend.forward import attend_dense
from flashpoint_kernels.cpu_backend.ranges import is_tiny
from flashpoint_kernels.dispatching.dispatch import backend_for
from flashpoint_kernels.native.calls import Replay
from flashpoint_kernels.operators import derivatives
from flashpoint_kernels.problems.memory import SUSPECT, extent, in_memory
from flashpoint_kernels.problems.problem import DTYPE_NAMES
from flashpoint_kernels.problems.strides import empty_like, laid_like

_ORDINARY = (Tensor, torch.nn.Parameter)  # subclasses are excluded, because they may redefine operations
_dispatch_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
_tracing = torch._C._is_tracing  # torch.jit.trace: sizes are then tensors, and the trace must record the operator


_CONTIGUOUS = torch.contiguous_format
_INPUTS = ("q", "k", "v", "do", "o", "lse")  # of the gradient; the first three are those of the forward
_REPLAYS = 16  # maximum number of cached `Replay`s of a route, for different strides and numbers of threads


@dataclass(eq=False, slots=True)
class Route:
    """How to compute a plain call with given shapes, dtypes and options."""

    options: Options
    turned: bool  # layout bshd: the axes of rows and heads are swapped before the kernel runs
    forward_spec: Spec
    backward_spec: Spec
    row: Row
    # Key: (number of threads, whether lse is wanted, strides of each input). Value: (library, `Replay` that calls this
    # library, `extent` of each input).
    _replays: dict[tuple[object, ...], tuple[native.Library, Replay, list[int]]] = field(default_factory=dict)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, with_lse: bool) -> tuple[Tensor, Tensor | None]:
        """Return o in the caller's layout and dtype, and lse (B,Hq,Sq), or None in its place."""
        alike = q.is_contiguous() and self.forward_spec.value_dim == self.forward_spec.head_dim
        o = torch.empty_like(q, memory_format=_CONTIGUOUS) if alike else empty_like(q, (*q.shape[:3], v.shape[3]))
        lse = torch.empty(self.forward_spec.lse_shape, dtype=torch.float32, device=q.device) if with_lse else None
        key = torch.get_num_threads(), with_lse, q.stride(), k.stride(), v.stride()
        if (replay := self._repeated(key, (q, k, v))) is not None:
            given = q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr()
            replay(*given) if lse is None else replay(*given, lse.data_ptr())
        else:
            self._compute(key, self._forward, (q, k, v), (o, lse))
        return o if alike else laid_like(o, q), lse

    def backward(self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> list[Tensor]:
        """Return dq, dk and dv, in the layout of q, k and v."""
        gradients = [
            torch.empty_like(t, memory_format=_CONTIGUOUS) if t.is_contiguous() else empty_like(t, t.shape)
            for t in (q, k, v)
        ]
        inputs = q, k, v, do.resolve_neg(), o, lse
        key = torch.get_num_threads(), *[t.stride() for t in inputs]
        if (replay := self._repeated(key, inputs)) is not None:
            replay(*[t.data_ptr() for t in (*inputs, *gradients)])
        else:
            self._compute(key, self._backward, inputs, gradients)
        return [laid_like(gradient, t) for gradient, t in zip(gradients, (q, k, v), strict=True)]

    def _repeated(self, key: tuple[object, ...], inputs: tuple[Tensor, ...]) -> Replay | None:
        """Return the `Replay` that is cached for the key; None without one, or if `_compute` must check an input."""
        kept = self._replays.get(key)
        if kept is None or kept[0] is not native.library():
            return None
        for t, needed in zip(inputs, kept[2], strict=True):
            if t.data_ptr() < SUSPECT or t.untyped_storage().nbytes() < t.storage_offset() * t.itemsize + needed:
                return None
        return kept[1]

    def _compute(
        self, key: tuple[object, ...], compute: Callable[..., Replay | None], inputs: Sequence[Tensor],
        outputs: Sequence[Tensor | None],
    ) -> None:  # fmt: skip
        """Check the inputs, compute the outputs, and cache the `Replay` of this computation for the key."""
        checked = [in_memory(name, t) for name, t in zip(_INPUTS, inputs, strict=False)]
        library, tensors = native.library(), (*checked, *outputs)
        if self.turned:
            tensors = tuple(t.transpose(1, 2) if t is not None and t.ndim == 4 else t for t in tensors)
        replay = compute(key[0], *tensors)
        if replay is None or library is None or any(t is not given for t, given in zip(checked, inputs, strict=True)):
            return
        if key in self._replays or len(self._replays) < _REPLAYS:
            self._replays[key] = library, replay, [extent(t) for t in inputs]

    def _forward(self, threads: int, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor | None) -> Replay | None:
        return attend_dense(self.forward_spec, self.row, q, k, v, o, lse, threads)

    def _backward(self, threads: int, *tensors: Tensor) -> Replay | None:
        names = (*_INPUTS, "dq", "dk", "dv")
        return differentiate_dense(self.backward_spec, dict(zip(names, tensors, strict=True)), threads)


def attention(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor | tuple[Tensor, Tensor] | None:
    """Return o, or o and lse with `return_lse`; or None if the call needs the general path."""
    if (
        torch.compiler.is_compiling()
        or _dispatch_modes()
        or _transforms() is not None
        or forward_ad._current_level >= 0
        or _tracing()
    ):
        return None
    if not (type(q) in _ORDINARY and type(k) in _ORDINARY and type(v) in _ORDINARY):
        return None
    if not (q.is_cpu and k.is_cpu and v.is_cpu) or torch.is_autocast_enabled("cpu"):
        return None
    if q.is_nested or k.is_nested or v.is_nested or q.is_neg() or k.is_neg() or v.is_neg():
        return None
    route = _route(options, q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype)
    if route is None:
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        o, lse = _Plain.apply(q, k, v, route)  # type: ignore[no-untyped-call]
    else:
        o, lse = route.forward(q, k, v, options.return_lse)
    return (o, lse) if options.return_lse else o


@lru_cache(1024)  # a model repeats a few problems
def _route(options: Options, *found: Any) -> Route | None:
    """Return the route for these shapes and dtypes of q, k and v; None if the fast path does not support them."""
    shapes, dtypes = found[:3], found[3:]
    if len(shapes[0]) != 4 or options.dropout_p or any(dtype not in DTYPE_NAMES for dtype in dtypes):
        return None
    infos = {n: TensorInfo(DTYPE_NAMES[t], tuple(s)) for n, s, t in zip("qkv", shapes, dtypes, strict=True)}
    try:
        spec = plan(infos, options, "forward")
        backend = backend_for(spec, "cpu")
    except ProblemError:
        return None
    shortest = min(spec.batch, spec.q_len, spec.kv_len)
    if backend != "cpu" or spec.ragged or not spec.has_columns or shortest < 1 or is_tiny(spec.scale):
        return None
    return Route(options, options.layout == "bshd", spec, _gradient(spec), spec.rows({})[0])


def _gradient(spec: Spec) -> Spec:
    """Return the `Spec` of the gradient of a plain forward pass."""
    o, lse = TensorInfo(spec.dtype, spec.shape_of("o")), TensorInfo("float32", spec.lse_shape)
    infos = {"q": spec.tensors["q"], "k": spec.tensors["k"], "v": spec.tensors["v"], "do": o, "o": o, "lse": lse}
    return plan(infos, spec.options, "backward")


class _Plain(torch.autograd.Function):
    """The autograd function of a plain call.

    Its backward pass uses ops.py if o has no gradient or lse has one, under forward-mode AD, and with `create_graph`.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, route: Route) -> tuple[Tensor, Tensor | None]:
        o, lse = route.forward(q, k, v, with_lse=True)
        ctx.set_materialize_grads(False)
        ctx.route = route
        ctx.save_for_backward(q, k, v, o, lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        route: Route = ctx.route
        needed = [name for name, yes in zip("qkv", ctx.needs_input_grad, strict=False) if yes]
        simple = dlse is None and not (
            torch.is_grad_enabled() or derivatives.transformed() or derivatives.is_batched(do)
        )
        if do is not None and simple:
            grads = dict(zip("qkv", route.backward(do, q, k, v, o, lse), strict=True))
        else:
            inputs = derivatives.plain_inputs(q, k, v)
            grads = derivatives.gradients(inputs, do, o, lse, dlse, route.options, needed)
        return *(grads[name] if name in needed else None for name in "qkv"), None
