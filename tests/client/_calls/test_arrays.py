"""NumPy arrays of every dtype, shape and alignment reach the server and come back bit for bit."""

import ml_dtypes
import numpy as np
import pytest

import flashpoint
from tests.support.framed import Q
from tests.support.scripted_server import message


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_numpy_arrays_come_back_bit_for_bit(scripted, connect, dtype):
    bits = np.random.default_rng(0).integers(0, 256, (2, 1, 5, 3, 8), np.uint8)
    array = bits.view(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)[..., 0].copy()
    o = connect(scripted.url).attention(array, array, array)
    assert (o.dtype, o.shape, o.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert o.flags.writeable


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (3, 4), (1, 0, 4)])
def test_empty_tensors_and_every_rank_travel(scripted, connect, shape):
    q = np.zeros(shape, ">f4")
    o = connect(scripted.url).attention(q, q, q)
    assert (o.shape, o.dtype) == (shape, np.float32)


def test_a_tensor_behind_one_of_smaller_elements_is_aligned(scripted, connect):
    o, lse = np.ones(3, np.float16), np.array([1.5, 2.5], np.float32)
    scripted.script.append(lambda h: h.answer(body=message({"o": o, "lse": lse})))
    actual = connect(scripted.url).attention(Q, Q, Q, return_lse=True)
    assert [t.tolist() for t in actual] == [o.tolist(), lse.tolist()]
    assert all(t.flags.aligned for t in actual)


def test_lengths_may_be_lists_and_say_so(scripted, connect):
    with pytest.raises(flashpoint.InvalidInputError, match="must be a numpy array, a torch tensor or a list, not int"):
        connect(scripted.url).attention(Q, Q, Q, kv_lengths=3)
