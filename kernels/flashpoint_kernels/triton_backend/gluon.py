"""Gluon, the language of Triton's lower level, or what stands for it where Triton interprets: for hopper.py.

Its names are not those of a stable language yet: only who asks for these kernels imports this.
"""

from importlib import import_module
from typing import Any

from flashpoint_kernels.triton_backend.interpret import INTERPRETED

_LANGUAGE = "triton.experimental.gluon.language"

if INTERPRETED:
    gl: Any = import_module("flashpoint_kernels.triton_backend.gluon_interpreter")
    hopper: Any = gl.hopper
    jit: Any = gl.jit
else:
    gl = import_module(_LANGUAGE)
    hopper = import_module(f"{_LANGUAGE}.nvidia.hopper")
    jit = import_module("triton.experimental.gluon").jit

mbarrier: Any = hopper.mbarrier
tma: Any = hopper.tma
copy: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # from triton 3.9 on, and before
multiply: Any = hopper.warpgroup_mma
wait_for: Any = hopper.warpgroup_mma_wait
