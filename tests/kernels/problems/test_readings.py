"""The values of an index tensor on a device are read once for each tensor and version."""

import gc
import weakref
from typing import Any

import torch
from torch import Tensor

from flashpoint_kernels.problems.readings import Readings


class Numbers(list[int]):
    """A list that a weak reference can name."""


class Counted(Tensor):
    """A tensor that counts how often its values are read."""

    reads = 0

    def tolist(self) -> Any:
        Counted.reads += 1
        return Numbers(super().tolist())


def index(*numbers: int) -> Tensor:
    return torch.tensor(numbers).as_subclass(Counted)


def reads(readings: Readings, t: Tensor, expected: list[int]) -> int:
    """Assert that `readings` returns `expected` for `t`, and return how often it read the values of `t`."""
    before = Counted.reads
    assert readings.kept(t) == expected
    return Counted.reads - before


def test_a_devices_numbers_are_read_once_for_each_tensor_and_version() -> None:
    readings, t = Readings(), index(3, 4)
    assert [reads(readings, t, [3, 4]) for _ in range(3)] == [1, 0, 0]
    t.add_(1)
    assert [reads(readings, t, [4, 5]) for _ in range(2)] == [1, 0]
    t[:1].fill_(9)  # changes `t` through a view
    assert [reads(readings, t, [9, 5]) for _ in range(2)] == [1, 0]
    other = index(9, 5)
    assert reads(readings, other, [9, 5]) == 1
    t.data = torch.tensor([1, 2])  # other memory, same version
    assert reads(readings, t, [1, 2]) == 1


def test_readings_end_with_their_tensors_and_are_bounded() -> None:
    readings = Readings(limit=3)
    tensors = [index(n) for n in range(5)]
    for n, t in enumerate(tensors):
        readings.kept(t)
        assert readings.kept(t) == [n]
    assert [reads(readings, t, [n]) for n, t in reversed([*enumerate(tensors)])] == [0, 0, 0, 1, 1]
    for n in range(100):  # new tensors reuse the ids of freed ones
        assert readings.kept(index(n, n)) == [n, n]
    numbers = weakref.ref(readings.kept(t))
    del t
    tensors.clear()
    gc.collect()
    assert numbers() is None


def test_numbers_on_the_host_and_of_inference_are_read_in_each_call() -> None:
    """Values are read in each call from CPU tensors (a numpy array may share the memory) and from inference tensors."""
    readings = Readings()
    array = torch.tensor([1, 2]).numpy()
    t = torch.from_numpy(array)
    assert readings.numbers(t) == [1, 2]
    array[0] = 7
    assert readings.numbers(t) == [7, 2]
    with torch.inference_mode():
        made = torch.tensor([5])
        made.add_(1)  # changes no version
    assert readings.numbers(made) == [6]
