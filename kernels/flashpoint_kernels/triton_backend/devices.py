"""The GPUs and the releases of Triton for which the kernels are right. Imports neither torch nor Triton."""

from __future__ import annotations

import re

from flashpoint_kernels.triton_backend.configurations import SHARED_KIB

FENCES = (3, 7, 1)  # the first release that orders asynchronous copies before products (see ptx.py)


def has_fences(version: str) -> bool:
    """Return whether this version of Triton orders asynchronous copies before products by a proxy fence."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3]) >= FENCES


def refusal(arch: int, version: str | None) -> str:
    """Return why the kernels do not run on sm_`arch` with this version of Triton; "" if they do.

    `version` is None if Triton is not installed.
    """
    if arch // 10 not in {known // 10 for known in SHARED_KIB}:
        return f"the kernels are for {', '.join(f'sm_{known}' for known in SHARED_KIB)}, and this GPU is an sm_{arch}"
    if version is None:
        return "triton is not installed"
    if arch // 10 == 10 and not has_fences(version):
        return (
            f"triton {version} leaves out proxy fences on sm_{arch}, which gives wrong answers; install triton "
            f"{'.'.join(map(str, FENCES))} or later"
        )
    if arch == 103:
        return "triton multiplies two parts of a head dimension wrongly on sm_103 (triton-lang/triton#10821)"
    return ""
