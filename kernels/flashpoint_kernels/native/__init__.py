"""CPU kernels in C for the forward without masks and dropout: forward.c, and forward.py, which calls it.

They read keys in place, whatever their layout: contiguous, in pages, or in chunks; 8-bit keys, too. The bits of a row
depend on the row, its keys and the options alone: not on other rows, on the place of the keys, or on the number of
threads.

The library is compiled when the package is installed (build.py). Without it `library` returns None. Does not import
torch.
"""

from __future__ import annotations

import ctypes
import warnings
from functools import cache
from typing import Any, NamedTuple

from flashpoint_contract.spec import Spec
from flashpoint_kernels.native.build import HERE, LIBRARY, checksum

VECTOR = 16  # head dimensions are multiples of it
DTYPES = ("float32", "float16", "bfloat16", "int8", "float8_e4m3fn")  # enum type of forward.c
# Features that torch's own operators do not have. With them, `torch` computes forwards on the CPU.
FEATURES = frozenset({"softcap", "value_dim", "wide_head_dim"})


class Library(NamedTuple):
    """The functions of one instruction set."""

    level: str
    forward: Any
    merge: Any


@cache
def library() -> Library | None:
    """Return the library for this processor; None if it was not compiled, or not for this processor."""
    if not (HERE / LIBRARY).exists():
        return None
    loaded = ctypes.CDLL(str(HERE / LIBRARY))
    if ctypes.c_uint32(loaded.flashpoint_sources()).value != checksum():
        warnings.warn(
            f"{LIBRARY} was compiled from other sources and is not used; run python {HERE / 'build.py'}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return level(f"v{loaded.flashpoint_isa()}")


def level(name: str) -> Library | None:
    """Return the functions for one instruction set, such as `v3` (AVX2); None if the library does not have it."""
    loaded = ctypes.CDLL(str(HERE / LIBRARY))
    try:
        functions = (getattr(loaded, f"flashpoint_{call}_{name}") for call in ("forward", "merge"))
        return Library(name, *functions)
    except AttributeError:
        return None


def supports(spec: Spec) -> bool:
    """Return whether the kernels are there and can compute the problem's forward on the CPU."""
    if spec.head_dim % VECTOR or spec.value_dim % VECTOR or spec.has("attn_mask") or spec.has("block_mask"):
        return False
    if spec.options.dropout_p or spec.dtype not in DTYPES or spec.tensors["k"].dtype not in DTYPES:
        return False
    return library() is not None
