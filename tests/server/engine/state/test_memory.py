"""Tensors of a request are views of the memory that its HTTP process shares."""

import mmap

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch

from flashpoint_server.engine.state.memory import MappedMemory, bytes_in, tensor_in
from flashpoint_server.ipc.bodies import SLOT, PlacedTensor


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int64", "int8"])
def test_a_tensor_is_a_view_at_its_place(dtype):
    segment = mmap.mmap(-1, 4096)
    memory = MappedMemory({5: segment, 6: mmap.mmap(-1, 4096)}, 6, 64)
    placed = PlacedTensor("q", dtype, (2, 3), 5, 256)
    view = tensor_in(memory, placed)
    assert (view.shape, view.dtype) == ((2, 3), getattr(torch, dtype))
    view.fill_(3)
    written = segment[: 256 + view.nbytes]
    assert written[:256] == bytes(256)
    assert torch.equal(torch.frombuffer(bytearray(written[256:]), dtype=view.dtype), torch.full((6,), 3).to(view.dtype))
    in_slot = PlacedTensor("q", dtype, (2, 3), SLOT, 192)
    assert torch.equal(tensor_in(MappedMemory({5: segment}, 5, 64), in_slot), view)


def test_every_byte_but_0_is_true_and_an_empty_tensor_has_no_place():
    segment = mmap.mmap(-1, 4096)
    segment[:4] = bytes([0, 1, 2, 255])
    placed = PlacedTensor("attn_mask", "bool", (4,), 5, 0)
    memory = MappedMemory({5: segment}, 5, 0)
    assert tensor_in(memory, placed).tolist() == [False, True, True, True]
    assert bytes_in(memory, placed).tolist() == [0, 1, 2, 255]
    empty = tensor_in(MappedMemory({}, 5, 0), PlacedTensor("k", "float32", (2, 0, 8), 9, 1 << 40))
    assert (empty.shape, empty.dtype) == ((2, 0, 8), torch.float32)
