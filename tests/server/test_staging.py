import numpy as np
import pytest

from flashpoint import wire
from flashpoint_server.staging import Staging

TENSORS = [
    ("q", "float32", (3, 5)),
    ("empty", "float32", (0, 4)),
    ("k", "bool", (7,)),
    ("v", "int64", (2,)),
    ("s", "float16", ()),
]


def filled(pieces):
    head = wire.parse_head(wire.build_head(TENSORS, {}))
    data = np.random.default_rng(0).integers(0, 256, head.data_size, np.uint8).tobytes()
    staging = Staging(head)
    for start in range(0, len(data), pieces):
        chunk = memoryview(data)[start : start + pieces]
        assert not staging.full
        assert staging.write(chunk) == len(chunk)
    return head, data, staging


@pytest.mark.parametrize("pieces", [1, 3, 7, 60, 61, 1000])
def test_every_tensor_is_whole_and_aligned_however_the_chunks_fall(pieces):
    head, data, staging = filled(pieces)
    assert staging.full
    assert list(staging.tensors) == ["q", "empty", "k", "v", "s"]
    for spec in head.tensors:
        t = staging.tensors[spec.name]
        assert (t.dtype, t.shape) == (spec.dtype, spec.shape)
        assert t.data.tobytes() == data[spec.start : spec.stop]
        assert t.data.ctypes.data % 64 == 0 or not t.data.size


def test_what_does_not_fit_is_left():
    _, _, staging = filled(1000)
    assert staging.write(memoryview(b"more")) == 0


def test_a_message_without_data_is_full_at_once():
    staging = Staging(wire.parse_head(wire.build_head([("q", "float32", (0, 8))], {})))
    assert staging.full
    assert staging.tensors["q"].data.size == 0
