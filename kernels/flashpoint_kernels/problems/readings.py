"""Read the values of index tensors (lengths, cu_seqlens), which decide a problem's sequences.

Values on a device are read once for each tensor and version, because reading them waits for all work on the device. A
loop that passes the same tensor again does not wait. A change through torch, in place or through a view, gives the
tensor another version, and it is read again. A change by another library's kernel, or by the replay of a CUDA graph,
does not change the version. After such a change, pass another tensor, or call `torch.autograd.graph.increment_version`.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor


class _Reading(NamedTuple):
    of: weakref.ref[Tensor]
    version: Any
    numbers: Sequence[int]


class Readings:
    """A cache of the values of at most `limit` tensors. Threads may share it: an entry is replaced, never changed."""

    def __init__(self, limit: int = 1024) -> None:
        self._most = limit
        self._kept: OrderedDict[int, _Reading] = OrderedDict()

    def numbers(self, t: Tensor) -> Sequence[int]:
        """Return the values of `t`. The caller must not write to the result."""
        if t.device.type == "cpu" or t.is_inference():  # inference tensors have no version counter
            numbers: list[int] = t.tolist()
            return numbers
        return self.kept(t)

    def kept(self, t: Tensor) -> Sequence[int]:
        """Return the values of a tensor with a version counter; read them unless this version is in the cache."""
        key, version = id(t), (t._version, t.data_ptr(), t.shape, t.stride())
        reading = self._kept.get(key)
        if reading is not None and reading.version == version and reading.of() is t:
            return reading.numbers
        made = _Reading(weakref.ref(t, lambda _: self._kept.pop(key, None)), version, t.tolist())
        self._kept[key] = made
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return made.numbers


readings = Readings()
