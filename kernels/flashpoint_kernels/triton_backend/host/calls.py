"""Represent one call of a kernel as a value that can be run, or only compiled in advance.

Triton takes seconds to compile a kernel. `start_compiling` compiles in threads: the compiler's passes and ptxas run
without Python's lock.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton

from flashpoint_kernels.triton_backend.host.configurations import Tile
from flashpoint_kernels.triton_backend.kernels.groups import Constants
from flashpoint_kernels.triton_backend.kernels.interpret import INTERPRETED

_ready: set[Hashable] = set()  # variants that this process has compiled, or has run


def compile_options(tile: Tile) -> dict[str, Any]:
    """Return Triton's compile options.

    They request fused multiply-adds, because the default differs between releases.
    """
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": True}


class Code:
    """A kernel with its tile and its constants on a device: what Triton compiles once.

    `variant` is the key of the compiled code; `options` are the keywords of a launch. If `describes`, the kernel makes
    descriptors, in memory that Triton requests from an allocator.
    """

    def __init__(self, kernel: Any, tile: Tile, device: torch.device, constants: Constants) -> None:
        self.kernel, self.tile, self.device, self.constants = kernel, tile, device, constants
        self.variant: Hashable = (kernel.__name__, device, constants, tile.num_warps, tile.num_stages)
        self.options = {"C": constants, **compile_options(tile)}
        self.describes = kernel.__name__.endswith("_hopper")


@dataclass(eq=False)
class Call:
    """A launch of a kernel: its code, its grid, and a function that makes its arguments when they are needed."""

    code: Code
    programs: int
    args: Callable[[], tuple[Any, ...]]

    @property
    def kernel(self) -> Any:
        return self.code.kernel

    @property
    def tile(self) -> Tile:
        return self.code.tile

    @property
    def constants(self) -> Constants:
        return self.code.constants

    @property
    def compiled(self) -> bool:
        """Return whether this process has compiled the kernel; always true in Triton's interpreter."""
        return INTERPRETED or self.code.variant in _ready

    def run(self) -> None:
        run_calls([self])

    def warmup(self) -> Any:
        """Do all work of `run` except the launch, and return Triton's compiled kernel."""
        return _inside(self.code.device, self.code.describes, self._warmup)

    def compile(self) -> None:
        """Compile the kernel, unless this process has compiled it."""
        if not self.compiled:
            self.warmup()

    def _warmup(self) -> Any:
        compiled = self.kernel.warmup(*self.args(), grid=(self.programs,), **self.code.options)
        _ready.add(self.code.variant)
        return compiled

    def _launch(self) -> None:
        self.kernel[(self.programs,)](*self.args(), **self.code.options)
        _ready.add(self.code.variant)


def run_calls(calls: Iterable[Call]) -> None:
    """Launch the kernels in order. Omit calls whose grid is empty."""
    running = [call for call in calls if call.programs]
    if not running:
        return

    def launch() -> None:
        for call in running:
            call._launch()

    _inside(running[0].code.device, any(call.code.describes for call in running), launch)


def _inside(device: torch.device, describes: bool, act: Callable[[], Any]) -> Any:
    """Call `act` on a device; if `describes`, with an allocator for descriptors during the call."""

    def scratch(size: int, _alignment: int, _stream: int | None) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int8, device=device)

    def inside() -> Any:
        triton.set_allocator(scratch)
        return act()

    around: Any = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    if INTERPRETED:
        # Triton's interpreter computes with NumPy, which warns about arithmetic that a GPU does silently: −inf, and
        # overflow of values that are masked later.
        around = np.errstate(all="ignore")
    with around:
        return contextvars.copy_context().run(inside) if describes else act()


def start_compiling(calls: Callable[[], Iterable[Call]]) -> Future[None]:
    """Compile the calls from `calls` in a thread. The future raises what Triton raises."""

    def work() -> None:
        with torch.no_grad():
            for call in calls():
                call.compile()

    return _pool().submit(work)


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    """Return a pool with a thread for every second core: requests that need no compilation use the other cores."""
    return ThreadPoolExecutor(max((os.cpu_count() or 1) // 2, 1), thread_name_prefix="flashpoint-compile")
