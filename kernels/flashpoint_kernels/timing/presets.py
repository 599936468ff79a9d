"""Grids to time: any product of shapes and the rest, and the two that the literature and this project's seeds print."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import product

from flashpoint_contract.options import ProblemError
from flashpoint_kernels.timing.case import Case, CaseDirection

# What is worth a row on each kind of device; elsewhere all but a few would say why they cannot run.
_BACKENDS = {
    "cpu": ("naive", "naive_explicit", "tiled", "torch", "sdpa_flash"),
    "cuda": (
        "naive",
        "naive_explicit",
        "triton",
        "torch",
        "tiled",
        "sdpa_flash",
        "sdpa_cudnn",
        "sdpa_efficient",
        "flex",
    ),
}
_PASSES: tuple[CaseDirection, ...] = ("forward", "backward")


def grid(
    shapes: Iterable[Mapping[str, int]],
    *,
    backends: Iterable[str],
    dtypes: Iterable[str] = ("bfloat16",),
    causal: Iterable[bool] = (False,),
    directions: Iterable[CaseDirection] = ("forward",),
) -> list[Case]:
    """Every combination, backends varying fastest. A shape has `Case`'s names. Raises ProblemError."""
    return [
        Case(**shape, dtype=dtype, causal=masked, direction=direction, backend=backend)
        for shape, dtype, masked, direction, backend in product(
            list(shapes), list(dtypes), list(causal), list(directions), list(backends)
        )
    ]


def _seeds(kind: str) -> list[Case]:
    """The tables that the seeds of this project print.

    N 512, D 32 in float32 with one head; B 1, H 8, N 2048, D 64 half and causal, for its memory; B 4, H 8, D 64 in
    bfloat16 from T 128 to 4096, forward and backward. On the CPU all in float32: where it has no half arithmetic
    torch's half products run at a twentieth of that, and naive attention is slow for a reason that is not its own.
    """
    float16, bfloat16 = ("float32", "float32") if kind == "cpu" else ("float16", "bfloat16")
    small = {"batch": 1, "q_heads": 1, "q_len": 512, "head_dim": 32}
    memory = {"batch": 1, "q_heads": 8, "q_len": 2048, "head_dim": 64}
    lengths = [{"batch": 4, "q_heads": 8, "q_len": 128 << n, "head_dim": 64} for n in range(6)]
    backends = _BACKENDS[kind]
    return [
        *grid([small], dtypes=["float32"], directions=_PASSES, backends=backends),
        *grid([memory], dtypes=[float16], causal=[True], directions=_PASSES, backends=backends),
        *grid(lengths, dtypes=[bfloat16], directions=_PASSES, backends=backends),
    ]


def _h100(kind: str) -> list[Case]:
    """The grid that FlashAttention 2 and 3 publish: batch·seq 16k, heads·D 2048, seq 512 to 16k, causal and not."""
    tokens, width = 16384, 2048
    shapes = [
        {"batch": tokens // seq, "q_heads": width // dim, "q_len": seq, "head_dim": dim}
        for dim, seq in product((64, 128, 256), (512 << n for n in range(6)))
    ]
    return grid(shapes, causal=[False, True], directions=_PASSES, backends=_BACKENDS[kind])


PRESETS: dict[str, Callable[[str], list[Case]]] = {"seeds": _seeds, "h100": _h100}


def preset(name: str, device: str = "cpu") -> list[Case]:
    """The cases of a preset, with the implementations worth timing on `device` ("cpu", "cuda", "cuda:1").

    Raises ProblemError naming `preset`.
    """
    if name not in PRESETS:
        raise ProblemError([("preset", f"{name!r} is none of {', '.join(PRESETS)}")])
    return PRESETS[name]("cpu" if device.startswith("cpu") else "cuda")
