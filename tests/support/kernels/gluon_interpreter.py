"""An interpreter of Gluon, which replaces triton_backend/hopper/gluon.py: Triton's interpreter lacks Gluon.

Layouts have no effect here. Each role of a warp-specialised kernel is a thread, and one thread runs at a time. Missing
synchronisation gives NaN or an error. From the start of a copy, its tile is NaN until a role waits for the copy's
barrier. A thread that arrives at a barrier continues only when no other thread can, so the others run as early as a GPU
allows. A matrix product reads its tiles when a role waits for it, and its result cannot be used earlier. A wait for an
event that never comes raises an error, and so does a product of a tile while a copy writes this tile.
"""

from __future__ import annotations

import builtins
import contextvars
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.language import float32, int64

from flashpoint_kernels.triton_backend.host import config
from flashpoint_kernels.triton_backend.host.configurations import SHARED_KIB
from flashpoint_kernels.triton_backend.kernels.interpret import dot

PATIENCE = 60.0  # the most seconds that a role waits for another

observed: deque[int] = deque(maxlen=10_000)  # number of running copies when each product is issued

_Role = tuple[Callable[..., None], tuple[Any, ...]]


def install() -> None:
    """Replace the Gluon module of the kernels for Hopper, and pretend to have an sm_90. Call it before their import."""
    sys.modules["flashpoint_kernels.triton_backend.hopper.gluon"] = sys.modules[__name__]
    config.stand_in = config.Chip(90, SHARED_KIB[90], multiprocessors=3)  # a launch has more programs


def jit(do_not_specialize: Any = None) -> Any:
    """Return the jitted function, or a decorator if `jit` has arguments: a stand-in for `gluon.jit`."""
    return triton.jit(do_not_specialize) if callable(do_not_specialize) else triton.jit


def constexpr_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn`, as a stand-in for `gluon.constexpr_function`: the interpreter knows every value."""
    return fn


def __getattr__(name: str) -> Any:
    """Return any other name from Triton's language, with the interpreter's replacement if it is active."""
    return getattr(tl, name)


class _Layout:
    """A stand-in for every layout; it has no effect."""

    def __init__(self, *_: object) -> None: ...

    @classmethod
    def get_default_for(cls, *_: object) -> _Layout:
        return cls()


NVMMASharedLayout = NVMMADistributedLayout = DotOperandLayout = SliceLayout = BlockedLayout = _Layout
DistributedLinearLayout = _Layout


def arange(start: int, end: int, _layout: object) -> Any:
    return tl.arange(start, end)


def full(shape: Sequence[Any], value: float, dtype: Any, _layout: object) -> Any:
    return tl.full(shape, value, dtype)


def convert_layout(x: Any, _layout: object) -> Any:
    return x


static_range = builtins.range


_Place = tuple[tuple[str, int], ...]


def _place() -> _Place:
    """Return where a descriptor is made: the lines of the kernel that lead there, from the role's function on.

    The compiler inlines all functions, so a function that is called at two places makes descriptors in two memories.
    """
    lines = []
    frame = sys._getframe(2)
    while (back := frame.f_back) is not None:
        if frame.f_globals["__name__"].startswith(("flashpoint_kernels", "tests.kernels")):
            lines.append((frame.f_code.co_name, frame.f_lineno))
        frame = back
    return tuple(lines)


class _Part(threading.local):
    """The state of each thread: the unfinished products of its role, and the stage of its program."""

    def __init__(self) -> None:
        self.products: list[_Product] = []  # the oldest first
        self.stage = _Stage()


class _Stage:
    """The roles of one program. One runs at a time; one that arrives at a barrier lets all other roles run first."""

    def __init__(self) -> None:
        self.turn = threading.Condition()  # the running role holds this condition
        self.roles = 1  # unfinished roles
        self.waiting: list[Callable[[], bool]] = []  # the conditions that roles wait for
        self.gave_way: list[object] = []  # roles in `give_way`, which continue in this order
        self.raised: list[BaseException] = []
        self.copies: list[np.ndarray] = []  # the tiles of running copies
        self.places: list[_Place] = []  # for each of them, where its descriptor is made

    def wait_for(self, ready: Callable[[], bool], what: str) -> None:
        self.waiting.append(ready)
        self._sleep_until(ready, what)
        self.waiting.remove(ready)

    def give_way(self) -> None:
        """Wait until no other role can continue."""
        mine = object()

        def alone() -> bool:
            stopped = len(self.waiting) + len(self.gave_way) == self.roles
            return stopped and self.gave_way[0] is mine and not any(ready() for ready in self.waiting)

        self.gave_way.append(mine)
        self._sleep_until(alone, "the others have not come to a stop")
        self.gave_way.remove(mine)

    def _sleep_until(self, ready: Callable[[], bool], what: str) -> None:
        self.turn.notify_all()
        came = self.turn.wait_for(lambda: bool(self.raised) or ready(), PATIENCE)
        if self.raised:
            raise RuntimeError("another role has failed")
        if not came:
            raise RuntimeError(f"{what} in {PATIENCE:g} s")


_part = _Part()


def warp_specialize(roles: Sequence[_Role], _warps: Sequence[int], _registers: Sequence[int]) -> None:
    """Run each role in a thread. Raise the error of the first role that failed."""
    stage = _Stage()
    stage.roles = len(roles)

    def play(role: _Role) -> None:
        _part.stage = stage
        with stage.turn:
            try:
                role[0](*role[1])
            except BaseException as error:  # raised again in the thread that launched the kernel
                stage.raised.append(error)
            stage.roles -= 1
            stage.turn.notify_all()

    threads = [threading.Thread(target=contextvars.copy_context().run, args=(play, role)) for role in roles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if stage.raised:
        raise stage.raised[0]


class _Barrier:
    """An mbarrier (PTX ISA, "mbarrier"): a phase ends when all its arrivals and all its bytes have arrived."""

    def __init__(self) -> None:
        self.arrivals = self.missing = self.phase = self.bytes = 0
        self.copies: list[Callable[[], int]] = []  # running copies; a call ends one and returns the number of its bytes

    def arrive(self, count: int) -> None:
        self.missing -= count
        self.end_phase()

    def end_phase(self) -> None:
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing = self.phase ^ 1, self.arrivals

    def over(self, phase: int) -> bool:
        """Finish the running copies, and return whether the phase has ended."""
        copies, self.copies = self.copies, []
        for copy in copies:
            self.bytes -= copy()
            self.end_phase()
        return bool(self.phase != phase)


class _Shared:
    """An allocation of shared memory, or a view of a part."""

    def __init__(self, data: np.ndarray, dtype: Any) -> None:
        self.data, self.dtype = data, dtype

    def index(self, at: int) -> _Shared:
        return _Shared(self.data[at], self.dtype)

    def slice(self, start: int, length: int, dim: int = 0) -> _Shared:
        return _Shared(self.data[(slice(None),) * dim + (slice(start, start + length),)], self.dtype)

    def load(self, _layout: object) -> Any:
        """Return the tile's content. Unlike a product, a load reads at once: its tile must have arrived."""
        if any(np.shares_memory(self.data, written) for written in _part.stage.copies):
            raise RuntimeError("a tile is loaded into registers while a copy to it is under way")
        return _tensor(self)

    def permute(self, order: Sequence[int]) -> _Shared:
        return _Shared(self.data.transpose([int(axis) for axis in order]), self.dtype)

    def reshape(self, shape: Sequence[Any]) -> _Shared:
        return _Shared(self.data.reshape([int(n) for n in shape]), self.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def barrier(self) -> _Barrier:
        stored: _Barrier = self.data[0]
        return stored


def allocate_shared_memory(dtype: Any, shape: Sequence[Any], _layout: object) -> _Shared:
    """Return shared memory: tiles hold values as float32; barriers are int64."""
    lengths = [int(n) for n in shape]
    if dtype == int64:
        return _Shared(np.array([_Barrier() for _ in range(np.prod(lengths))]).reshape(lengths), dtype)
    return _Shared(np.full(lengths, np.nan, np.float32), dtype)


class _Block:
    def __init__(self, shape: Sequence[Any], dtype: Any) -> None:
        self.shape = [int(n) for n in shape]
        self.nbytes: int = int(np.prod(self.shape)) * dtype.primitive_bitwidth // 8


class _Descriptor:
    """A tensor descriptor (TMA) of (rows, columns) or (heads, rows, columns). Loads outside rows or columns give 0."""

    def __init__(
        self, base: Any, shape: Sequence[Any], strides: Sequence[Any], block: Sequence[Any], place: _Place
    ) -> None:
        self.base, self.shape, self.strides, self.place, self.layout = base, shape, strides, place, _Layout()
        self.block_type = _Block(block, base.dtype.element_ty)

    def load(self, first: Sequence[Any]) -> np.ndarray:
        *heads, rows, columns = self.block_type.shape
        assert heads in ([], [1])
        i, d = (first[-2] + tl.arange(0, rows))[:, None], (first[-1] + tl.arange(0, columns))[None, :]
        inside = (i >= 0) & (i < self.shape[-2]) & (d < self.shape[-1])
        base = self.base
        if heads:
            assert first[0] < self.shape[0]
            base += first[0] * self.strides[0]
        loaded = tl.load(base + i.to(int64) * self.strides[-2] + d, mask=inside, other=0.0)
        values: np.ndarray = loaded.to(float32).handle.data
        return values.reshape(self.block_type.shape)


class _Product:
    """A matrix product a @ b (+ acc), whose value is unknown until a role waits for it."""

    def __init__(self, a: Any, b: _Shared, acc: Any) -> None:
        self.a, self.b, self.acc = a, b, acc
        self.value: Any = None
        self._check()
        observed.append(len(_part.stage.copies))

    def _check(self) -> None:
        tiles = [x.data for x in (self.a, self.b) if isinstance(x, _Shared)]
        if any(np.shares_memory(tile, written) for tile in tiles for written in _part.stage.copies):
            raise RuntimeError("a product reads a tile while a copy to it is under way")

    def finish(self) -> None:
        self._check()
        a, b = (_tensor(x) if isinstance(x, _Shared) else x for x in (self.a, self.b))
        acc = tl.zeros([a.shape[0], b.shape[1]], float32) if self.acc is None else self.acc
        self.value = dot(a, b, acc, False)


def _tensor(shared: _Shared) -> Any:
    """Return the current content of shared memory."""
    data = np.ascontiguousarray(shared.data)
    x = tl.full(list(data.shape), 0.0, float32)
    x.handle.data = data.copy()
    return x


class _MBarrier:
    """A stand-in for `hopper.mbarrier`."""

    MBarrierLayout = _Layout

    @staticmethod
    def init(shared: _Shared, count: int) -> None:
        shared.barrier.arrivals = shared.barrier.missing = int(count)

    @staticmethod
    def expect(shared: _Shared, nbytes: int) -> None:
        shared.barrier.bytes += int(nbytes)
        shared.barrier.arrive(1)

    @staticmethod
    def arrive(shared: _Shared, count: int, pred: Any = True) -> None:
        if pred:
            shared.barrier.arrive(int(count))
            _part.stage.give_way()

    @staticmethod
    def wait(shared: _Shared, phase: Any, pred: Any = True) -> None:
        if pred:
            wanted = int(phase)
            _part.stage.wait_for(lambda: shared.barrier.over(wanted), f"a barrier's phase {wanted} has not ended")


class _TMA:
    """A stand-in for `hopper.tma`."""

    @staticmethod
    def make_tensor_descriptor(
        base: Any, shape: Sequence[Any], strides: Sequence[Any], block: Sequence[Any], _layout: object
    ) -> _Descriptor:
        # In a loop a descriptor reuses the memory of the previous one, which a copy may still read.
        place = _place()
        if place in _part.stage.places:
            raise RuntimeError("a descriptor is made while a copy by the last one of this place is under way")
        return _Descriptor(base, shape, strides, block, place)

    @staticmethod
    def async_load(rows: _Descriptor, at: Sequence[Any], shared: _Shared, tile: _Shared) -> None:
        stage = _part.stage
        written = tile.data

        def come() -> int:
            written[...] = rows.load(at)
            ended = next(n for n, each in enumerate(stage.copies) if each is written)
            del stage.copies[ended], stage.places[ended]
            return rows.block_type.nbytes

        assert list(written.shape) == rows.block_type.shape
        written[...] = np.nan
        stage.copies.append(written)
        stage.places.append(rows.place)
        shared.barrier.copies.append(come)


class hopper:  # noqa: N801 -- a module's name
    """A stand-in for `gluon.language.nvidia.hopper`."""

    mbarrier, tma = _MBarrier, _TMA

    @staticmethod
    def fence_async_shared() -> None: ...

    @staticmethod
    def warpgroup_mma(a: Any, b: _Shared, acc: Any, *, use_acc: Any = True, is_async: bool) -> _Product:
        assert is_async
        _part.products.append(_Product(a, b, acc if use_acc else None))
        return _part.products[-1]

    @staticmethod
    def warpgroup_mma_wait(outstanding: int, deps: Sequence[Any]) -> Any:
        """Finish all products but the newest `outstanding`, and return the values of `deps`."""
        while len(_part.products) > outstanding:
            _part.products.pop(0).finish()
        values = tuple(each.value if isinstance(each, _Product) else each for each in deps)
        assert not any(value is None for value in values), "a product is used that was not waited for"
        return values if len(values) > 1 else values[0]


# The kernels import these names from hopper/gluon.py, which this module replaces.
gl = sys.modules[__name__]
mbarrier, tma, tma_load = hopper.mbarrier, hopper.tma, hopper.tma.async_load
wgmma, wgmma_wait = hopper.warpgroup_mma, hopper.warpgroup_mma_wait
