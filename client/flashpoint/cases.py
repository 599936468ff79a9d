"""An attention problem in a file, with a kernel's answers: `save_case` writes it, `flashpoint verify` judges it."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from flashpoint._calls.arrays import Array, unpack
from flashpoint._calls.service import checked, message
from flashpoint._calls.verification import CASE_TENSORS
from flashpoint.errors import all_invalid, invalid
from flashpoint_contract import wire
from flashpoint_contract.options import OPTIONS
from flashpoint_contract.schemas.options import AttentionOptions
from flashpoint_contract.tensors import REQUIRED, refusals
from flashpoint_contract.wording.hints import each_meant

# `MEANT`: the options that define the result. If a file does not contain one of them, its default applies. `_HOW`: all
# other options, which say how to compute it or which tensors to return.
_HOW = (
    "block_size", "dropout_seed", "precision", "return_lse", "return_key_weights", "grads", "deterministic", "backend",
)  # fmt: skip
MEANT = tuple(name for name in OPTIONS if name not in _HOW)


def save_case(path: str | PathLike[str], *, q: Array, k: Array, v: Array, o: Array | None = None, **more: Any) -> Path:
    """Write a problem and a kernel's answers into a safetensors file, for `flashpoint verify PATH`.

    Args:
        path: File to write. An existing file is replaced.
        q: Queries, (B, Hq, Sq, D), or as `layout` says. numpy or torch; float16, bfloat16, float32 or float64.
        k: Keys, (B, Hk, Sk, D).
        v: Values, (B, Hk, Sk, Dv).
        o: Output of the kernel, (B, Hq, Sq, Dv).
        more: Other tensors by their names (`lse`, `do`, `dq`, `dk`, `dv`, `attn_mask`, …), and options (`causal=True`,
            `scale=…`), as `Client.attention` takes them. An option that is not named has its default, and
            `flashpoint verify` says so.

    Returns:
        The path.

    Raises:
        InvalidInputError: an unknown name, a value that is not valid, or a tensor that cannot be saved.
    """
    tensors = {"q": q, "k": k, "v": v, "o": o} | {name: more.pop(name) for name in list(more) if name in CASE_TENSORS}
    given = {name: value for name, value in more.items() if value is not None}
    options = checked(AttentionOptions, given)
    parts = message(tensors, options, {name: getattr(options, name) for name in given})
    target = Path(path)
    with target.open("wb") as file:
        file.writelines(parts)
    return target


def read_case(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the numpy arrays and the options of a safetensors file. Raises InvalidInputError if it is no case."""
    buffer = np.fromfile(path, np.uint8)
    try:
        size = wire.head_size(buffer[:8].data)
        head = wire.parse_head(buffer[:size].data)
    except wire.WireError as error:
        raise invalid("file", f"{path} is no safetensors file: {error}") from None
    if len(buffer) != head.size + head.data_size:
        raise invalid("file", f"{path} has {len(buffer)} bytes where its head says {head.size + head.data_size}")
    specs = {spec.name: spec for spec in head.tensors}
    if not specs.keys() >= set(REQUIRED["forward"]):
        named = ((name, hint.removeprefix("; ")) for name, hint in each_meant(specs, REQUIRED["forward"]))
        listing = ", ".join(f"{name} ({hint})" if hint else name for name, hint in named)
        raise invalid("file", f"{path} needs tensors q, k and v. It has {listing or 'none'}")
    if refused := refusals("cli", specs):
        raise all_invalid(refused)
    return unpack(buffer[head.size :], specs, buffer), wire.decode_options(head.metadata)
