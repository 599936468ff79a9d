"""The torch side of the engine: tensors from bytes, and the check that a backend must pass before it serves."""

import numpy as np
import pytest
import torch

from flashpoint_kernels import tiled
from flashpoint_kernels.spec import Options, TensorInfo, plan
from flashpoint_server.device import Device
from flashpoint_server.job import Job, RawTensor, Timings
from flashpoint_server.refusal import Refusal


@pytest.fixture(scope="module")
def device():
    return Device.open("cpu")


def raw(array):
    return RawTensor(array.dtype.name, array.shape, array.reshape(-1).view(np.uint8).copy())


def test_every_byte_of_a_bool_but_0_becomes_1(device):
    """A caller may send any byte; a bool that is neither 0 nor 1 is undefined behaviour in compiled code."""
    given = RawTensor("bool", (2, 2), np.array([0, 1, 2, 255], np.uint8))
    assert device._tensor("attn_mask", given).view(torch.uint8).tolist() == [[0, 1], [1, 1]]


def test_tensors_are_views_of_the_bytes_that_came(device):
    given = raw(np.arange(6, dtype=np.float32).reshape(2, 3))
    assert device._tensor("q", given).data_ptr() == given.data.ctypes.data
    assert device._tensor("q", given).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_every_backend_of_this_device_is_proven(device):
    device.prove()


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_backend_that_computes_wrongly_is_not_served(device, direction, monkeypatch):
    """As after a miscompilation: one element in one answer is off by a hundredth."""
    compute = getattr(tiled, direction)

    def miscompiled(problems):
        compute(problems)
        next(reversed(problems[0].outputs.values())).view(-1)[-1] += 0.01

    monkeypatch.setattr(tiled, direction, miscompiled)
    with pytest.raises(RuntimeError, match="the tiled backend disagrees with the reference on cpu"):
        device.prove()


def test_index_tensors_that_do_not_fit_are_422(device):
    q = np.zeros((2, 1, 3, 8), np.float32)
    tensors = {"q": raw(q), "k": raw(q), "v": raw(q), "kv_lengths": raw(np.array([1, 4]))}
    infos = {name: TensorInfo(t.dtype, t.shape) for name, t in tensors.items()}
    job = Job("an-id", plan(infos, Options(), "forward"), "tiled", tensors, Timings(0.0))
    with pytest.raises(Refusal) as caught:
        device.run(job)
    assert caught.value.status == 422
    assert [field for field, _ in caught.value.errors] == ["kv_lengths"]
    assert job.timings.encode >= job.timings.compute > 0
