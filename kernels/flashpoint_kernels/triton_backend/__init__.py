"""The Triton kernels as a backend: every option, forward and backward, any mix of problems in one grouped launch."""

from flashpoint_kernels.triton_backend.launch import backward, forward

__all__ = ["backward", "forward"]
