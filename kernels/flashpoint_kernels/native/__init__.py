"""CPU kernels in C: the forward (forward.c, called by forward.py), the gradient (backward.c, backward.py) and the
tangent (tangent.c, tangent.py).

The forward reads keys, also 8-bit ones, in place, whatever their layout: contiguous, in pages, or in chunks. The bits
of a row of o depend only on the row, its keys and the options: not on other rows, on the place of the keys, or on the
number of threads. The bits of a gradient do not depend on other sequences or on the number of threads either.

The library is compiled when the package is installed (build.py). Without it `library` returns None. Does not import
torch.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

from flashpoint_contract.options import Direction
from flashpoint_kernels.native import switches
from flashpoint_kernels.native.build import HERE, LIBRARY, checksum

LEVELS = switches.LEVELS[1:]  # the instruction sets of x86-64, lowest first
FLOAT32 = "FLASHPOINT_CPU_FLOAT32"  # environment variable: multiply all types in float32
VECTOR = 16  # a row of the partial o of a chunk of keys is padded to a multiple of this number of floats
DTYPES = ("float32", "float16", "bfloat16", "int8", "float8_e4m3fn", "bool")  # enum type of vectors.h
NOT_COMPILED = "not-compiled.txt"  # an installation whose compiler fails writes the reason into this file
MISSING = (
    "the kernels in C are not there: install a C compiler (gcc or clang) and Flashpoint again; "
    "on x86-64 they need a processor with AVX2"
)


class Functions(NamedTuple):
    """The functions of one kernel, and its name in answers, such as `c-avx512`."""

    kernel: str
    forward: Any
    merge: Any
    backward: Any
    tangent: Any  # of float32


class Library(NamedTuple):
    """The kernels for one instruction set: one kernel for bfloat16, and one for other types of q.

    `gradients` has the kernels of the gradient if they are of another instruction set (see switches.py).
    """

    bfloat16: Functions
    others: Functions
    gradients: Library | None = None

    def of(self, q_dtype: str, direction: Direction = "forward") -> Functions:
        """Return the functions for a data type of q and a direction.

        The choice depends only on these, on the processor, and on what is switched off.
        """
        if direction == "backward" and self.gradients is not None:
            return self.gradients.of(q_dtype)
        return self.bfloat16 if q_dtype == "bfloat16" else self.others


@cache
def library() -> Library | None:
    """Return the library for this processor; None if it was not compiled, is switched off, or cannot run here."""
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
    best = processor_level()
    levels = LEVELS[: LEVELS.index(best) + 1] if best in LEVELS else (best,)
    if float32_only():
        levels = tuple(name for name in levels if name not in switches.BFLOAT16)
    built = {name: kernels for name in levels if (kernels := level(name)) is not None}
    best_of = [switches.allowed(built, direction)[-1:] for direction in switches.DIRECTIONS]
    if not all(best_of):
        return None
    (forward,), (backward,) = best_of
    return built[forward] if forward == backward else built[forward]._replace(gradients=built[backward])


def processor_level() -> str:
    """Return the highest level that the processor can run, `none` without any. There must be a compiled library."""
    loaded = ctypes.CDLL(str(HERE / LIBRARY))
    loaded.flashpoint_level.restype = ctypes.c_char_p
    found: bytes = loaded.flashpoint_level()
    return found.decode()


def names(direction: Direction = "forward") -> dict[str, str]:
    """Return the name of the kernel for each data type of q, such as `c-amx`; empty without the library."""
    kernels = library()
    if kernels is None:
        return {}
    return {name: kernels.of(name, direction).kernel for name in ("float32", "float16", "bfloat16")}


def missing() -> str:
    """Return why there is no `library`."""
    off = ", ".join(name for name in switches.switched_off() if name not in ("triton", "torch", "tiled"))
    if off and (HERE / LIBRARY).exists():
        return f"the kernels in C are switched off: {off}"
    with suppress(OSError):
        return f"{MISSING}; {(HERE / NOT_COMPILED).read_text(encoding='utf-8')}"
    return MISSING


def float32_only() -> bool:
    """Return whether FLASHPOINT_CPU_FLOAT32 asks for float32 arithmetic for all types, without AMX."""
    return os.environ.get(FLOAT32, "").lower() in ("1", "true", "yes", "on")


def level(name: str) -> Library | None:
    """Return the kernels of one instruction set, such as `avx2`; None if the library does not contain it."""
    loaded = ctypes.CDLL(str(HERE / LIBRARY))

    def functions(suffix: str) -> Functions:
        names = Functions._fields[1:]
        addresses = [getattr(loaded, f"flashpoint_{call}_{suffix}", None) for call in names]
        return Functions(f"c-{suffix}", *addresses)

    kernels = Library(functions(name), functions("avx512" if name in switches.BFLOAT16 else name))
    return kernels if all(f is not None for each in kernels[:2] for f in each) else None
