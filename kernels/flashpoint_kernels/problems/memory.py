"""Check that a tensor's elements lie in its memory, as code that reads them by an address expects.

Torch has tensors for which this is not so: a parameter whose storage was freed (FSDP frees it between its uses) or
shrunk, an efficient zero tensor of autograd, and a view with the negative bit, whose memory has the negated numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from flashpoint_contract.options import ProblemError

# The address of a tensor without memory is its offset in its storage. On Linux, memory usually has addresses above
# 2^40, so one comparison is enough for nearly all tensors.
SUSPECT = 1 << 40
_PLAIN = (Tensor, torch.nn.Parameter)


def in_memory(name: str, t: Tensor) -> Tensor:
    """Return the tensor, or a copy with its elements in memory.

    Raises ProblemError, which names the tensor, if its storage was freed or is too small.
    """
    if t.is_meta or t.layout != torch.strided:
        return t
    if (address := t.data_ptr()) < SUSPECT and t.numel():
        if t._is_zerotensor():
            return torch.zeros(t.shape, dtype=t.dtype, device=t.device)
        if not address or not t.untyped_storage().nbytes():
            kind = type(t).__name__
            why = "its storage was freed" if type(t) in _PLAIN else f"the subclass {kind} holds its elements elsewhere"
            raise ProblemError([(name, f"has no memory, because {why}: pass a tensor with its elements in memory")])
    if t.numel():
        needed, held = t.storage_offset() * t.itemsize + extent(t), t.untyped_storage().nbytes()
        if held < needed:
            why = f"its storage has {held} bytes, and its elements need {needed}"
            raise ProblemError([(name, f"is not in memory, because {why}: pass a tensor with all its elements")])
    return t.resolve_neg()


def extent(t: Tensor) -> int:
    """Return the number of bytes from the first element to the end of the last one in memory."""
    if t.is_contiguous():
        return t.nbytes
    return (1 + sum([(n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True)])) * t.itemsize


def check_memory(**tensors: object) -> None:
    """Raise ProblemError if the storage of a tensor was freed or shrunk, for functions made of torch's operators.

    These operators would read other memory. Values that are not plain tensors are not checked.
    """
    if torch.compiler.is_compiling():
        return
    for name, t in tensors.items():
        if isinstance(t, Tensor) and type(t) in _PLAIN and not is_functorch_wrapped_tensor(t):
            in_memory(name, t)
