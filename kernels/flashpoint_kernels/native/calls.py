"""Run calls of the kernels in C: their shares on several threads (threads.c), once, or again with other tensors."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from flashpoint_kernels.native.build import HERE, LIBRARY

LARGEST = 1 << 20  # bytes of tasks: larger calls are not kept, because each shape would keep as much memory
_TENSORS = 9  # of a replay, at most: arguments of flashpoint_replay
_ITSELF, _FIRST = 1, 2  # bases of integers: the replay's own memory, and the first tensor


class _Replay(ctypes.Structure):
    """struct replay of threads.c."""

    _fields_ = (
        ("compute", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("size", "count", "length")),
        ("integers", ctypes.c_void_p),
        ("bases", ctypes.c_void_p),
    )


@cache
def _functions() -> tuple[Any, Any]:
    """Return flashpoint_share and flashpoint_replay."""
    loaded = ctypes.CDLL(str(HERE / LIBRARY))
    share, replay = loaded.flashpoint_share, loaded.flashpoint_replay
    share.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    replay.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * _TENSORS]
    return share, replay


def share(compute: Any, calls: Sequence[ctypes.Structure]) -> None:
    """Compute some calls of one function, each on a thread of its own, the first in this one."""
    prepared(compute, calls)()


def prepared(compute: Any, calls: Sequence[ctypes.Structure], held: object = None) -> Callable[[], None]:
    """Return a function like `share` with these calls, which may be called again; it keeps `held` alive."""
    memory, size, count = (type(calls[0]) * len(calls))(*calls), ctypes.sizeof(calls[0]), len(calls)
    run = _functions()[0]

    def again(_: object = held) -> None:
        if run(compute, memory, size, count):
            raise MemoryError

    return again


class Table:
    """Integers of a replay: rows of a C structure, whose members are 8 bytes each."""

    def __init__(self, numbers: ArrayLike, width: int) -> None:
        self.numbers = np.array(numbers, np.int64).reshape(-1, width)
        self.bases = np.zeros(self.numbers.shape, np.uint8)

    @classmethod
    def of(cls, structures: Sequence[ctypes.Structure]) -> Table:
        """Return the table of some structures of one type."""
        return cls(array("q", b"".join(map(bytes, structures))), ctypes.sizeof(structures[0]) // 8)

    def of_tensor(self, column: int, tensor: int, address: int) -> None:
        """Say that a member is an address in the tensor with this number, which is now at `address`."""
        self._relative(column, _FIRST + tensor, address)

    def of_itself(self, column: int, address: int) -> None:
        """Say that a member is an address in the replay's own memory, as if this began at `address`."""
        self._relative(column, _ITSELF, address)

    def followed_by(self, column: int, parts: Sequence[array[int]]) -> int:
        """Say that a member is the address of each row's part, which lie one after another behind this table.

        Return where the parts end, in bytes from the beginning of the table.
        """
        edges = [*accumulate((8 * len(part) for part in parts), initial=self.numbers.nbytes)]
        self.numbers[:, column] = edges[:-1]
        self.of_itself(column, 0)
        return edges[-1]

    def _relative(self, column: int, base: int, address: int) -> None:
        self.numbers[:, column] -= address
        self.bases[:, column] = base


class Replay:
    """Some calls of one function that are made again with other tensors of the same kind.

    `calls` has the calls themselves; `tables` what these point to, in the order in which it lies behind them.
    """

    __slots__ = ("_call", "_compute", "_replay", "bases", "count", "integers", "size")

    def __init__(self, compute: Any, calls: Table, *tables: Table) -> None:
        every = (calls, *tables)
        self.integers = np.concatenate([table.numbers.reshape(-1) for table in every])
        self.bases = np.concatenate([table.bases.reshape(-1) for table in every])
        self.size, self.count = calls.numbers[0].nbytes, len(calls.numbers)
        self._compute = compute
        address, places = ctypes.cast(compute, ctypes.c_void_p), (self.integers.ctypes.data, self.bases.ctypes.data)
        self._call = _Replay(address, self.size, self.count, len(self.integers), *places)
        self._replay = _functions()[1], ctypes.addressof(self._call)

    def __call__(self, *addresses: int) -> None:
        """Make the calls with the tensors at these addresses, in this thread and those of the calls."""
        replay, call = self._replay
        if replay(call, *addresses, *(0,) * (_TENSORS - len(addresses))):
            raise MemoryError
