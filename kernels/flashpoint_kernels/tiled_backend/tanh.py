"""The hyperbolic tangent that caps scores, their slowest step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def tanh_(t: Tensor) -> Tensor:
    """Replace `t` (float32) by its hyperbolic tangent, and return it.

    numpy's takes half the time of torch's on a thread of the CPU: 386 and 881 µs for 2^18 numbers on an AMD EPYC. It
    is within 1.4 units in the last place, and a number has the same bits at each position in the tensor. It has only
    one thread, so torch's is used with several.
    """
    if t.is_cuda or torch.get_num_threads() > 1:
        return t.tanh_()
    np.tanh(t.numpy(), out=t.numpy())
    return t
