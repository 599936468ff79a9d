"""Kernels that are switched off: by the variable FLASHPOINT_KERNELS_OFF, or because a check found them wrong.

The variable lists names, separated by commas. A name is

    LEVEL.DIRECTION    one kernel in C, such as `amx.backward`: the next lower level replaces it
    LEVEL              both kernels of a level, such as `avx512`
    BACKEND            a whole backend, such as `tiled`: `auto` takes the next backend

The kernels of BFLOAT16 call those for AVX-512 where products may overflow, so `avx512` switches them off, too. If a
direction has no level left, the backend `cpu` is off. `reference` cannot be switched off. Does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

VARIABLE = "FLASHPOINT_KERNELS_OFF"
SETTING = f"the setting {VARIABLE}"  # the reason of what the variable switches off
LEVELS = ("generic", "avx2", "avx512", "avx512bf16", "amx")  # instruction sets, lowest first
BFLOAT16 = ("avx512bf16", "amx")  # levels that differ from avx512 for bfloat16 alone, and multiply it in bfloat16
DIRECTIONS = ("forward", "backward")
BACKENDS = ("triton", "cpu", "torch", "tiled")
KNOWN = (*BACKENDS, *(name for level in LEVELS for name in (level, *(f"{level}.{way}" for way in DIRECTIONS))))

_found: dict[str, str] = {}  # what a check has switched off in this process, and why


def parse(text: str) -> tuple[str, ...]:
    """Return the names in a list separated by commas. Raises ValueError for a name that is not in KNOWN."""
    names = tuple(dict.fromkeys(name for part in text.split(",") if (name := part.strip())))
    if unknown := [name for name in names if name not in KNOWN]:
        listed = ", ".join(map(repr, unknown))
        raise ValueError(
            f"there is no kernel or backend {listed}; give names among {', '.join(KNOWN)}, separated by commas"
        )
    return names


def switched_off() -> Mapping[str, str]:
    """Return what is switched off, each name with its reason. Raises ValueError like `parse`."""
    try:
        named = parse(os.environ.get(VARIABLE, ""))
    except ValueError as error:
        raise ValueError(f"{VARIABLE}: {error}") from None
    return dict.fromkeys(named, SETTING) | _found


def note(found: Mapping[str, str]) -> None:
    """Switch kernels off in this process, each name with its reason. Call this through `dispatch.switch_off`."""
    parse(",".join(found))
    _found.update(found)


def allowed(levels: Iterable[str], direction: str) -> list[str]:
    """Return those of `levels` whose kernel for a direction is not switched off."""
    off = switched_off()

    def is_off(level: str) -> bool:
        return level in off or f"{level}.{direction}" in off or (level in BFLOAT16 and is_off("avx512"))

    return [] if "cpu" in off else [level for level in levels if not is_off(level)]
