"""Exact attention and its gradients on every backend: see `attention`.

Names are imported at their first use, so that `flashpoint_kernels.dispatching.support` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashpoint_contract.options import Options as Options
    from flashpoint_contract.options import ProblemError as ProblemError
    from flashpoint_kernels.block_masks import create_block_mask as create_block_mask
    from flashpoint_kernels.dispatching.dispatch import available_backends as available_backends
    from flashpoint_kernels.dispatching.dispatch import run as run
    from flashpoint_kernels.flex import flex_attention as flex_attention
    from flashpoint_kernels.functional import attention as attention
    from flashpoint_kernels.functional import attention_backward as attention_backward
    from flashpoint_kernels.judging.judge import judge as judge
    from flashpoint_kernels.merging import merge as merge
    from flashpoint_kernels.problems.problem import Problem as Problem
    from flashpoint_kernels.quantization import dequantize as dequantize
    from flashpoint_kernels.quantization import quantize as quantize
    from flashpoint_kernels.sdpa import scaled_dot_product_attention as scaled_dot_product_attention
    from flashpoint_kernels.verification import verify as verify
    from flashpoint_kernels.weights import attention_weights as attention_weights
    from flashpoint_kernels.weights import key_weights as key_weights

_HOME = {
    "attention": "flashpoint_kernels.functional",
    "attention_backward": "flashpoint_kernels.functional",
    "attention_weights": "flashpoint_kernels.weights",
    "available_backends": "flashpoint_kernels.dispatching.dispatch",
    "create_block_mask": "flashpoint_kernels.block_masks",
    "flex_attention": "flashpoint_kernels.flex",
    "judge": "flashpoint_kernels.judging",
    "key_weights": "flashpoint_kernels.weights",
    "merge": "flashpoint_kernels.merging",
    "run": "flashpoint_kernels.dispatching.dispatch",
    "Problem": "flashpoint_kernels.problems.problem",
    "Options": "flashpoint_contract.options",
    "ProblemError": "flashpoint_contract.options",
    "dequantize": "flashpoint_kernels.quantization",
    "quantize": "flashpoint_kernels.quantization",
    "scaled_dot_product_attention": "flashpoint_kernels.sdpa",
    "verify": "flashpoint_kernels.verification",
}
__all__ = [
    "Options",
    "Problem",
    "ProblemError",
    "attention",
    "attention_backward",
    "attention_weights",
    "available_backends",
    "create_block_mask",
    "dequantize",
    "flex_attention",
    "judge",
    "key_weights",
    "merge",
    "quantize",
    "run",
    "scaled_dot_product_attention",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
