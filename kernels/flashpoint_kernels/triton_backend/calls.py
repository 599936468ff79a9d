"""One call of a kernel as a value: it is made, and then run, or compiled before it is needed.

Triton takes seconds to compile a call. `start_compiling` does that in threads: the compiler's passes and ptxas run
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

from flashpoint_kernels.triton_backend.configurations import Tile
from flashpoint_kernels.triton_backend.groups import Constants
from flashpoint_kernels.triton_backend.interpret import INTERPRETED

_ready: set[Hashable] = set()  # variants that this process has compiled, or has run


def compile_options(tile: Tile) -> dict[str, Any]:
    """Return Triton's compile options.

    They request fused multiply-adds, because the default differs between releases.
    """
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": True}


@dataclass(eq=False)
class Call:
    """A kernel, its grid, its tile, its constants, and a function that makes its arguments when they are needed."""

    kernel: Any
    programs: int
    tile: Tile
    device: torch.device
    args: Callable[[], tuple[Any, ...]]
    constants: Constants

    @property
    def variant(self) -> Hashable:
        """Return the key of this call's compiled code: Triton compiles once per key."""
        return self.kernel.__name__, self.device, self.constants, self.tile.num_warps, self.tile.num_stages

    @property
    def compiled(self) -> bool:
        """Return whether the kernel is compiled.

        It must be compiled even if this call has no programs: another call has some.
        """
        return INTERPRETED or self.variant in _ready

    def run(self) -> None:
        """Launch the kernel, unless the call has no programs."""
        if self.programs == 0:
            return
        # NumPy warns about arithmetic that a GPU does silently: −inf, and overflow of values that are masked later.
        with np.errstate(all="ignore") if INTERPRETED else contextlib.nullcontext():
            self._with(lambda args, options: self.kernel[(self.programs,)](*args, **options))

    def compile(self) -> None:
        """Do everything that `run` does before the launch."""
        if not self.compiled:
            self._with(lambda args, options: self.kernel.warmup(*args, grid=(self.programs,), **options))

    def _with(self, act: Callable[[tuple[Any, ...], dict[str, Any]], object]) -> None:
        def scratch(size: int, _alignment: int, _stream: int | None) -> torch.Tensor:
            """Return memory for the descriptors that a kernel makes."""
            return torch.empty(size, dtype=torch.int8, device=self.device)

        def inside() -> None:
            triton.set_allocator(scratch)
            with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
                act(self.args(), options)

        options = {"C": self.constants, **compile_options(self.tile)}
        contextvars.copy_context().run(inside)  # leave the caller's own allocator unchanged
        _ready.add(self.variant)


def start_compiling(calls: Callable[[], Iterable[Call]]) -> Future[None]:
    """Compile the calls from `calls` in a thread. The future raises what Triton raises."""

    def work() -> None:
        with torch.no_grad():
            for call in calls():
                call.compile()

    return _pool().submit(work)


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    """Return a pool with half of the cores; the other half serve requests that need no compilation."""
    return ThreadPoolExecutor(max((os.cpu_count() or 1) // 2, 1), thread_name_prefix="flashpoint-compile")
