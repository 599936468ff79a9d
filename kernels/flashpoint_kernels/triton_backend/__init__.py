"""The Triton kernels as a backend: all options, forward and backward, any mix of problems in one grouped launch.

The functions are imported from launch.py at their first use, so SUPPORT can be read without torch and Triton.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flashpoint_contract.tensors import EVERY_FEATURE

if TYPE_CHECKING:
    from flashpoint_kernels.triton_backend.host.launch import compile_ahead as compile_ahead
    from flashpoint_kernels.triton_backend.host.launch import compiled as compiled
    from flashpoint_kernels.triton_backend.host.launch import prepare as prepare

SUPPORT = EVERY_FEATURE - {"float64", "large_head_dim"}
__all__ = ["SUPPORT", "compile_ahead", "compiled", "prepare"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("flashpoint_kernels.triton_backend.host.launch"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
