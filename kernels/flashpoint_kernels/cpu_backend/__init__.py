"""The backend `cpu`: the kernels in C (flashpoint_kernels.native), for problems on a CPU."""

from flashpoint_contract.spec import Spec
from flashpoint_contract.tensors import EVERY_FEATURE
from flashpoint_kernels import native

SUPPORT = EVERY_FEATURE - {"float64", "wide_head_dim", "large_head_dim"}


def supports(spec: Spec) -> bool:
    """Return whether the kernels are available and support the problem."""
    return native.library() is not None and spec.features <= SUPPORT
