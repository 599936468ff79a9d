"""Import Gluon's functions, by names that are the same for all supported releases of Triton.

Triton's interpreter does not run Gluon. The tests replace this module by their own interpreter.
"""

from importlib import import_module
from typing import Any

from flashpoint_kernels.triton_backend.kernels.interpret import INTERPRETED

if INTERPRETED:
    raise RuntimeError("the kernels for Hopper need a GPU of sm_90: Triton's interpreter does not run Gluon")

gl: Any = import_module("triton.experimental.gluon.language")
hopper: Any = import_module("triton.experimental.gluon.language.nvidia.hopper")
constexpr_function: Any = import_module("triton.experimental.gluon").constexpr_function
jit: Any = import_module("triton.experimental.gluon").jit
mbarrier: Any = hopper.mbarrier
tma: Any = hopper.tma
# Triton has `async_load` from 3.9 on, and `async_copy_global_to_shared` before.
tma_load: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
wgmma: Any = hopper.warpgroup_mma
wgmma_wait: Any = hopper.warpgroup_mma_wait
