"""The functions of `flash_attn.bert_padding`: remove padding rows from sequences, and put them back. Differentiable."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from flashpoint_kernels.operators.torch_rules import overridable
from flashpoint_kernels.problems.memory import check_memory


@overridable
def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Return the rows of x (n, …) at the given indices."""
    check_memory(x=x, indices=indices)
    return x[indices]


@overridable
def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Return (first_axis_dim, …) with `values` in the rows `indices`, and 0 elsewhere."""
    check_memory(values=values, indices=indices)
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_put((indices,), values)


@overridable
def index_first_axis_residual(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of x at the given indices, and x detached from autograd."""
    return index_first_axis(x, indices), x.detach()


@overridable
def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Return the rows of `hidden_states` (B, S, …) whose mask is true, one after another.

    Args:
        hidden_states: (B, S, …).
        attention_mask: (B, S), bool or 0 and 1: true for valid rows.
        unused_mask: (B, S): further rows to return, which do not count as used.

    Returns:
        The rows (T, …), their indices in the B·S rows, the start of each sequence (int32, (B + 1,)), the largest
        length, and the number of used rows of each sequence.
    """
    check_memory(hidden_states=hidden_states, attention_mask=attention_mask, unused_mask=unused_mask)
    mask = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = mask.sum(-1, dtype=torch.int32)
    indices = mask.flatten().nonzero().flatten()
    starts = functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    rows = hidden_states.flatten(0, 1)[indices]
    return rows, indices, starts, int(lengths.max()), attention_mask.sum(-1, dtype=torch.int32)


@overridable
def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Remove padding like `unpad_input`, but each of the B rows of tokens may contain several sequences.

    `attention_mask_in_length` (B, S) has the lengths of each row's sequences, followed by zeros.
    """
    check_memory(hidden_states=hidden_states, attention_mask_in_length=attention_mask_in_length)
    length = attention_mask_in_length.sum(-1)
    mask = torch.arange(hidden_states.shape[1], dtype=torch.int64, device=length.device) < length[:, None]
    lengths = attention_mask_in_length.flatten()
    lengths = lengths[lengths.nonzero().flatten()]
    indices = mask.flatten().nonzero().flatten()
    starts = functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return hidden_states.flatten(0, 1)[indices], indices, starts, int(lengths.max())


@overridable
def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Return (batch, seqlen, …): the given rows at their original positions, and 0 elsewhere."""
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.view(batch, seqlen, *hidden_states.shape[1:])
