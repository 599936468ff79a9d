"""The implementations of attention that can be timed, as differentiable functions of q, k and v.

Each implementation has a version, and names its algorithms of both directions (`case.ALGORITHMS`). It raises
`CannotRunError`, with the reason, for a case that it is known not to support. For other cases that it cannot run, the
reason is the error of its first call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flashpoint_contract.options import Options
from flashpoint_kernels import attention
from flashpoint_kernels.problems.problem import DTYPES
from flashpoint_kernels.timing.case import OWN, TIMED, Case
from flashpoint_kernels.timing.own_kernel import Kernel, NotTakenError, keywords

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class CannotRunError(RuntimeError):
    """The reason why an implementation cannot run a case here."""


@dataclass(frozen=True)
class Implementation:
    """One implementation of attention. `make(case, device)` returns a function that computes o of q, k and v.

    `make` and `version` raise CannotRunError if the implementation cannot run here.
    """

    make: Callable[[Case, str], Attend]
    version: Callable[[], str | None]
    forward: str  # `forward` and `backward` are names in `case.ALGORITHMS`
    backward: str
    layout: str = "bhsd"  # "bhsd" or "bshd": the layout of its tensors


def algorithms(case: Case) -> tuple[str, ...]:
    """Return the names in `ALGORITHMS` of the algorithms that one call of `case` runs."""
    forward, backward = ("flash_forward", "fused_backward")
    if case.backend != OWN:
        forward, backward = IMPLEMENTATIONS[case.backend].forward, IMPLEMENTATIONS[case.backend].backward
    return {"forward": (forward,), "backward": (backward,), "both": (forward, backward)}[case.direction]


def implementation_of(case: Case, kernel: Kernel | None) -> Implementation:
    """Return the implementation that `case` names: one of `IMPLEMENTATIONS`, or `kernel`, the caller's own function."""
    if case.backend != OWN:
        return IMPLEMENTATIONS[case.backend]
    if kernel is None:
        raise CannotRunError("is a function of the caller's own, and there is none")
    return Implementation(partial(_own, kernel), lambda: None, "flash_forward", "fused_backward")


def _own(kernel: Kernel, case: Case, device: str) -> Attend:
    """Return a function that calls `kernel` by the rules of `own_kernel`, and checks its result.

    Raises CannotRunError if `kernel` does not take the options of `case`.
    """
    try:
        given = keywords(kernel, {}, Options(causal=case.causal))
    except NotTakenError as error:
        raise CannotRunError(str(error)) from error
    if "is_causal" in given and case.q_len != case.kv_len:
        raise CannotRunError("its causal mask is aligned top left, and the lengths differ")
    shape = (case.batch, case.q_heads, case.q_len, case.value_dim)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = kernel(q, k, v, **given)
        o = result[0] if isinstance(result, (tuple, list)) and result else result
        if not isinstance(o, Tensor):
            raise CannotRunError(f"returned {type(result).__name__}, not a tensor or a tuple that begins with one")
        if o.shape != shape:
            raise CannotRunError(f"returned o of {list(o.shape)}, not {list(shape)}")
        if q.requires_grad and not o.requires_grad:
            raise CannotRunError("has no gradient: autograd finds none on its o")
        return o

    return attend


def _ours(case: Case, device: str) -> Attend:
    if case.backend == "triton" and not device.startswith("cuda"):
        raise CannotRunError("needs a CUDA device: Triton's interpreter is no measure of it")
    return cast(Attend, partial(attention, causal=case.causal, backend=case.backend))


def _explicit(case: Case, device: str) -> Attend:
    if case.direction == "forward":
        raise CannotRunError("its forward is that of naive")
    return NaiveExplicit(case, device)


def _sdpa(backend: SDPBackend, case: Case, device: str) -> Attend:
    if case.causal and case.q_len != case.kv_len:
        raise CannotRunError("its causal mask is aligned top left, but the lengths differ")
    grouped = case.q_heads != case.kv_heads

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=grouped)

    return attend


def _flex(case: Case, device: str) -> Attend:
    from torch.nn.attention import flex_attention as flex

    if case.direction != "forward" and device.startswith("cpu"):
        raise CannotRunError("has no backward on the CPU")
    offset = case.kv_len - case.q_len

    def seen(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i + offset >= j

    mask = None
    if case.causal:
        mask = flex.create_block_mask(seen, None, None, case.q_len, case.kv_len, device=device)
    # Compile only for this case: earlier compilations count towards a limit, beyond which torch.compile runs eagerly.
    torch.compiler.reset()
    compiled = torch.compile(flex.flex_attention, dynamic=False, fullgraph=True)
    grouped = case.q_heads != case.kv_heads
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=grouped)


def _flash_attn(module: str, case: Case, device: str) -> Attend:
    """Return FlashAttention 2 or 3 from its package. Causal masks are aligned bottom right; it supports GQA."""
    _needs_cuda(device)
    call = _imported(module).flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = call(q, k, v, causal=case.causal)
        return cast(Tensor, o[0] if isinstance(o, tuple) else o)  # some releases of 3 return (o, lse)

    return attend


def _xformers(case: Case, device: str) -> Attend:
    _needs_cuda(device)
    fmha = _imported("xformers.ops.fmha")
    bias = fmha.attn_bias.LowerTriangularFromBottomRightMask() if case.causal else None
    return lambda q, k, v: cast(Tensor, fmha.memory_efficient_attention(q, k, v, attn_bias=bias))


def _flashinfer(case: Case, device: str) -> Attend:
    """Return FlashInfer's ragged prefill, planned for the case. Causal masks are aligned bottom right; no backward."""
    if case.direction != "forward":
        raise CannotRunError("has no backward")
    _needs_cuda(device)
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)  # the size that its documentation recommends
    call = _imported("flashinfer").BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    starts = torch.arange(case.batch + 1, dtype=torch.int32, device=device)
    call.plan(
        starts * case.q_len, starts * case.kv_len, case.q_heads, case.kv_heads, case.head_dim,
        head_dim_vo=case.value_dim, causal=case.causal, q_data_type=DTYPES[case.dtype],
    )  # fmt: skip

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        packed = call.run(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))
        return cast(Tensor, packed.unflatten(0, (case.batch, case.q_len)))

    return attend


def _needs_cuda(device: str) -> None:
    if not device.startswith("cuda"):
        raise CannotRunError("needs a CUDA device")


def _imported(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise CannotRunError(f"cannot be imported: {error}") from error


def _versions(*packages: str) -> str:
    try:
        return ", ".join(f"{package} {version(package)}" for package in packages)
    except PackageNotFoundError as error:
        raise CannotRunError(f"{error.name} is not installed") from error


def _cudnn_version() -> str:
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None  # type: ignore[no-untyped-call]
    return f"{_versions('torch')}, cudnn {cudnn}"


def _package(make: Callable[[Case, str], Attend], package: str) -> Implementation:
    return Implementation(make, partial(_versions, package), "flash_forward", "fused_backward", "bshd")


class Naive:
    """softmax(scale·q·kᵀ)·v in plain torch operations, with the Sq × Sk matrix in memory, all in the inputs' dtype.

    It is the baseline for speed-ups. Its gradient comes from autograd.
    """

    def __init__(self, case: Case, device: str) -> None:
        self.group = case.q_heads // case.kv_heads
        self.scale = case.head_dim**-0.5
        self.hidden = None
        if case.causal:  # one mask for all calls, like in a model
            ones = torch.ones(case.q_len, case.kv_len, dtype=torch.bool, device=device)
            self.hidden = ones.triu_(case.kv_len - case.q_len + 1)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Map q (B,Hq,Sq,D), k (B,Hk,Sk,D), v (B,Hk,Sk,Dv) to o (B,Hq,Sq,Dv)."""
        return self.probabilities(q, self.expanded(k)) @ self.expanded(v)

    def expanded(self, t: Tensor) -> Tensor:
        """Return k or v with each key/value head repeated for its query heads."""
        return t if self.group == 1 else t.repeat_interleave(self.group, 1)

    def probabilities(self, q: Tensor, k: Tensor) -> Tensor:
        s = (q @ k.mT).mul_(self.scale)
        if self.hidden is not None:
            s.masked_fill_(self.hidden, float("-inf"))
        return torch.softmax(s, -1)


class NaiveExplicit(Naive):
    """Naive attention with an explicit gradient from P: dV = Pᵀ·dO, dS = P∘(dO·Vᵀ − delta), dQ = dS·K, dK = dSᵀ·Q."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor = _Explicit.apply(self, q, k, v)  # type: ignore[no-untyped-call]
        return o


class _Explicit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, naive: Naive, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = naive.probabilities(q, naive.expanded(k))
        o = p @ naive.expanded(v)
        ctx.naive = naive
        ctx.save_for_backward(q, k, v, p, o)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        q, k, v, p, o = ctx.saved_tensors
        naive: Naive = ctx.naive
        dv = p.mT @ do
        # For a row that sees no key, P is NaN, as with autograd: naive attention does not handle such rows.
        ds = (do @ naive.expanded(v).mT).sub_((o * do).sum(-1, keepdim=True)).mul_(p)
        dq = (ds @ naive.expanded(k)).mul_(naive.scale)
        dk = (ds.mT @ q).mul_(naive.scale)
        return None, dq, _summed(dk, naive.group), _summed(dv, naive.group)


def _summed(grad: Tensor, group: int) -> Tensor:
    """Return the gradient of a key/value head: the sum over the `group` query heads that share it."""
    return grad if group == 1 else grad.view(len(grad), -1, group, *grad.shape[2:]).sum(2)


_torch = partial(_versions, "torch")
_sdpa_of = {name: partial(_sdpa, getattr(SDPBackend, backend)) for name, backend in (
    ("flash", "FLASH_ATTENTION"), ("cudnn", "CUDNN_ATTENTION"), ("efficient", "EFFICIENT_ATTENTION"), ("math", "MATH"),
)}  # fmt: skip

IMPLEMENTATIONS = {
    "naive": Implementation(Naive, _torch, "naive_forward", "naive_backward"),
    "naive_explicit": Implementation(_explicit, _torch, "naive_forward", "explicit_backward"),
    "triton": Implementation(_ours, partial(_versions, "flashpoint", "triton"), "flash_forward", "two_pass_backward"),
    "cpu": Implementation(_ours, partial(_versions, "flashpoint", "torch"), "flash_forward", "fused_backward"),
    "torch": Implementation(_ours, partial(_versions, "flashpoint", "torch"), "flash_forward", "fused_backward"),
    "tiled": Implementation(_ours, partial(_versions, "flashpoint", "torch"), "flash_forward", "fused_backward"),
    "sdpa_flash": Implementation(_sdpa_of["flash"], _torch, "flash_forward", "fused_backward"),
    "sdpa_cudnn": Implementation(_sdpa_of["cudnn"], _cudnn_version, "flash_forward", "fused_backward"),
    "sdpa_efficient": Implementation(_sdpa_of["efficient"], _torch, "flash_forward", "fused_backward"),
    "sdpa_math": Implementation(_sdpa_of["math"], _torch, "naive_forward", "naive_backward"),
    # FlexAttention's backward template has separate programs for dQ and for dK and dV (torch/_inductor,
    # flex_backwards).
    "flex": Implementation(_flex, _torch, "flash_forward", "two_pass_backward"),
    "flash_attn": _package(partial(_flash_attn, "flash_attn"), "flash_attn"),
    "flash_attn_3": _package(partial(_flash_attn, "flash_attn_interface"), "flash_attn_3"),
    "flashinfer": _package(_flashinfer, "flashinfer-python"),
    "xformers": _package(_xformers, "xformers"),
}
assert tuple(IMPLEMENTATIONS) == TIMED
