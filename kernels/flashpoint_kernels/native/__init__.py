"""CPU kernels in C: the forward (forward.c, called by forward.py) and the gradient (backward.c, backward.py).

The forward reads keys in place, whatever their layout: contiguous, in pages, or in chunks; 8-bit keys, too. The bits of
a row depend on the row, its keys and the options alone: not on other rows, on the place of the keys, or on the number
of threads. Nor do the bits of a gradient depend on other sequences or on the number of threads.

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

VECTOR = 16  # rows of o in the states of chunks are filled up to a multiple of it
DTYPES = ("float32", "float16", "bfloat16", "int8", "float8_e4m3fn", "bool")  # enum type of vectors.h
# Features that torch's own operators do not have. On the CPU `torch` has them, by these kernels.
FEATURES = frozenset({"softcap", "value_dim", "wide_head_dim", "dropout", "dlse", "dattn_mask"})


class Library(NamedTuple):
    """The functions of one instruction set."""

    level: str
    forward: Any
    merge: Any
    backward: Any


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
        functions = (getattr(loaded, f"flashpoint_{call}_{name}") for call in Library._fields[1:])
        return Library(name, *functions)
    except AttributeError:
        return None


def supports(spec: Spec) -> bool:
    """Return whether the kernels are there and can compute the problem on the CPU."""
    if spec.has("block_mask") or spec.dtype not in DTYPES or spec.tensors["k"].dtype not in DTYPES:
        return False
    return library() is not None
