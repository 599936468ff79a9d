"""Compute the attention of Hugging Face models with this library, on the CPU and through Triton.

    flashpoint_kernels.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="local_attention")

Training and every mode of `generate` work. Needs transformers 5.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashpoint_contract import transformers as models
from flashpoint_contract.options import ProblemError
from flashpoint_kernels.functional import attention

NAME = "local_attention"

__all__ = ["NAME", "register"]


def register(name: str = NAME) -> None:
    """Make `attn_implementation="local_attention"` run on these kernels, for every model of this process.

    Args:
        name: Name of the implementation, which models take as `attn_implementation`. transformers takes each name
            with "flash" in it for FlashAttention, so `flashpoint` cannot be one.

    Raises:
        ProblemError: the name is one of transformers' own, or has another meaning there. After the registration, a
            model that is given the name also raises it if its attention cannot be replaced; if only a part of it
            cannot, the model warns.
    """
    models.register(name, _compute, models.lazy_mask, _invalid)


def _compute(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, causal: bool,
    window: int | None, **options: Any,
) -> Any:  # fmt: skip
    """Return o, as `flashpoint_contract.transformers.Solve` specifies. `window` is not used: the mask contains it."""
    return attention(q, k, v, **models.mask_options(q, k, mask, bias, causal), **options)


def _invalid(field: str, message: str) -> ProblemError:
    return ProblemError([(field, message)])
