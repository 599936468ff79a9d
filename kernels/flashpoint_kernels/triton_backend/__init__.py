"""The Triton kernels as a backend: every option, forward and backward, any mix of problems in one grouped launch."""

from flashpoint_kernels.triton_backend.launch import backward, compile_ahead, compiled, forward

__all__ = ["backward", "compile_ahead", "compiled", "forward"]
