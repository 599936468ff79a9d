"""Run calls of the kernels in C on several threads (threads.c): once, or repeatedly with other tensors."""

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
from flashpoint_kernels.native.teams import parallel

LARGEST = 1 << 20  # maximum bytes of a `Replay`: callers cache one for each shape of tensors
_TENSORS = 9  # maximum number of tensors of a replay, as in flashpoint_replay
_ITSELF, _FIRST = 1, 2  # values in `Table.bases`: address inside the replay's own memory; address inside tensor 0


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
    """Return the C functions flashpoint_share and flashpoint_replay, which use torch's threads if `parallel` allows."""
    loaded = ctypes.CDLL(str(HERE / LIBRARY))
    share, replay = loaded.flashpoint_share, loaded.flashpoint_replay
    share.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    replay.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * _TENSORS]
    loaded.flashpoint_use_team(ctypes.c_void_p(parallel()))
    return share, replay


def share(compute: Any, calls: Sequence[ctypes.Structure]) -> None:
    """Call the C function `compute` for each of `calls`, in this thread and further threads (threads.c)."""
    prepared(compute, calls)()


def prepared(compute: Any, calls: Sequence[ctypes.Structure], held: object = None) -> Callable[[], None]:
    """Return a function that does what `share` does each time it is called, and that keeps `held` alive."""
    memory, size, count = (type(calls[0]) * len(calls))(*calls), ctypes.sizeof(calls[0]), len(calls)
    run = _functions()[0]

    def again(_: object = held) -> None:
        if failed := run(compute, memory, size, count):
            raise _error(failed)

    return again


def _error(failed: int) -> Exception:
    """Return the error of a failed call, for its flags: NO_MEMORY and NO_ADDRESS of memory.h."""
    if failed & 2:
        return RuntimeError("a tensor with elements has no memory: its storage was freed")
    return MemoryError()


class Table:
    """C structures of one type for a `Replay`: each row is a structure, each column one of its members, of 8 bytes."""

    def __init__(self, numbers: ArrayLike, width: int) -> None:
        self.numbers = np.array(numbers, np.int64).reshape(-1, width)
        self.bases = np.zeros(self.numbers.shape, np.uint8)

    @classmethod
    def of(cls, structures: Sequence[ctypes.Structure]) -> Table:
        """Return the table whose rows are `structures`, all of one type."""
        return cls(array("q", b"".join(map(bytes, structures))), ctypes.sizeof(structures[0]) // 8)

    def of_tensor(self, column: int, tensor: int, address: int) -> None:
        """Mark the column as addresses inside tensor number `tensor`, which is now at `address`."""
        self._relative(column, _FIRST + tensor, address)

    def of_itself(self, column: int, address: int) -> None:
        """Mark the column as addresses inside the replay's own memory, whose start they call `address`."""
        self._relative(column, _ITSELF, address)

    def followed_by(self, column: int, parts: Sequence[array[int]]) -> int:
        """Set the column in row n to the address of `parts[n]`, in the replay's own memory.

        There the parts follow this table one after another. Return the end of the last part, in bytes from the
        beginning of the table.
        """
        edges = [*accumulate((8 * len(part) for part in parts), initial=self.numbers.nbytes)]
        self.numbers[:, column] = edges[:-1]
        self.of_itself(column, 0)
        return edges[-1]

    def _relative(self, column: int, base: int, address: int) -> None:
        self.numbers[:, column] -= address
        self.bases[:, column] = base


class Replay:
    """Calls of the C function `compute` that can be repeated with other tensors of equal shapes and strides.

    `calls` is the table of the calls' arguments. `tables` are the data to which these arguments point; they follow
    `calls` in the replay's memory, in this order.
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
        """Run the calls on tensors at `addresses`, in this thread and further threads (threads.c)."""
        replay, call = self._replay
        if failed := replay(call, *addresses, *(0,) * (_TENSORS - len(addresses))):
            raise _error(failed)
