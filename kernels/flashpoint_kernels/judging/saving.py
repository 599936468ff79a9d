"""Write a failing case with its answers as safetensors, which `flashpoint verify FILE` and `POST /verify` take."""

from __future__ import annotations

import ctypes
from pathlib import Path

from flashpoint_contract import wire
from flashpoint_contract.options import OPTIONS
from flashpoint_kernels.judging.trial import OUTPUTS, Outcome
from flashpoint_kernels.problem import DTYPE_NAMES


def save(path: Path, outcome: Outcome) -> None:
    """Write the inputs, the options and the function's answers of one call, in layout bhsd (thd for packed ones)."""
    problem = outcome.call.problem
    tensors = {n: t for n, t in problem.tensors.items() if n not in ("o", "lse")}
    answers = {n: outcome.answers[n] for n in OUTPUTS if n in outcome.answers}
    if "lse" in answers:
        answers["lse"] = answers["lse"].float()
    if not any(n.startswith("d") for n in answers):
        tensors.pop("do", None)
    own = {n: t.detach().cpu().contiguous() for n, t in (tensors | answers).items()}
    names = ("layout", "causal", "causal_alignment", "window", "scale", "softcap", "precision")
    options = {n: getattr(problem.spec.options, n) for n in names}
    given = {
        n: list(v) if isinstance(v, tuple) else v
        for n, v in options.items()
        if v != OPTIONS[n].default or n == "causal"
    }
    head = wire.build_head(
        [(n, DTYPE_NAMES[t.dtype], list(t.shape)) for n, t in own.items()], wire.encode_options(given)
    )
    with path.open("wb") as file:
        file.write(head)
        for t in own.values():
            file.write(ctypes.string_at(t.data_ptr(), t.numel() * t.element_size()) if t.numel() else b"")
