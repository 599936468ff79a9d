"""`unpad_input` packs the valid rows, and `pad_input` puts each row back in its place."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from flashpoint_kernels.flash_attn import bert_padding


@given(mask=st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4))
def test_rows_that_are_packed_come_back_to_their_places(mask: list[list[bool]]) -> None:
    seen = torch.tensor(mask)
    x = torch.randn(len(mask), 5, 3, requires_grad=True)
    rows, indices, starts, longest, used = bert_padding.unpad_input(x, seen)
    assert torch.equal(rows, x[seen])
    assert starts.tolist() == [0, *seen.sum(1).cumsum(0).tolist()]
    assert (longest, used.tolist()) == (int(seen.sum(1).max()), seen.sum(1).tolist())
    back = bert_padding.pad_input(rows, indices, len(mask), 5)
    assert torch.equal(back, x * seen[..., None])
    (gradient,) = torch.autograd.grad(back.sum(), x)
    assert torch.equal(gradient, seen[..., None].expand_as(x).float())


def test_rows_of_several_sequences_are_told_apart() -> None:
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    x = torch.randn(3, 6, 2)
    rows, _, starts, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert starts.tolist() == [0, 2, 5, 8, 10, 16]
    assert longest == 6
    assert torch.equal(rows, torch.cat([x[0, :5], x[1, :5], x[2]]))
