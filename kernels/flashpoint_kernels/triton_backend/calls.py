"""One call of a kernel, as a value: made, then run, or compiled before it is needed.

A call that is not compiled yet takes Triton seconds. `start_compiling` has that done aside, in threads: the compiler's
passes and ptxas run outside Python's lock.
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
    """Return Triton's compile options. They request fused multiply-adds, since releases differ in their default."""
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": True}


@dataclass(eq=False)
class Call:
    """A kernel, its grid, its tile, its constants, and what makes its arguments once they are needed."""

    kernel: Any
    programs: int
    tile: Tile
    device: torch.device
    args: Callable[[], tuple[Any, ...]]
    constants: Constants

    @property
    def variant(self) -> Hashable:
        """Return the key for which Triton compiles once."""
        return self.kernel.__name__, self.device, self.constants, self.tile.num_warps, self.tile.num_stages

    @property
    def compiled(self) -> bool:
        """Also where it has no program: others of the same launch key have some."""
        return INTERPRETED or self.variant in _ready

    def run(self) -> None:
        """Launch it; nothing where there is no program."""
        if self.programs == 0:
            return
        # NumPy warns of what a GPU does silently (−inf arithmetic, overflow of garbage that is masked after).
        with np.errstate(all="ignore") if INTERPRETED else contextlib.nullcontext():
            self._with(lambda args, options: self.kernel[(self.programs,)](*args, **options))

    def compile(self) -> None:
        """Do everything that `run` does before the launch."""
        if not self.compiled:
            self._with(lambda args, options: self.kernel.warmup(*args, grid=(self.programs,), **options))

    def _with(self, act: Callable[[tuple[Any, ...], dict[str, Any]], object]) -> None:
        def scratch(size: int, _alignment: int, _stream: int | None) -> torch.Tensor:
            """Memory for the descriptors that a kernel makes."""
            return torch.empty(size, dtype=torch.int8, device=self.device)

        def inside() -> None:
            triton.set_allocator(scratch)
            with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
                act(self.args(), options)

        options = {"C": self.constants, **compile_options(self.tile)}
        contextvars.copy_context().run(inside)  # the caller's own allocator stays what it was
        _ready.add(self.variant)


def start_compiling(calls: Callable[[], Iterable[Call]]) -> Future[None]:
    """Compile what `calls` yields, in a thread. Raises there what Triton raises."""

    def work() -> None:
        with torch.no_grad():
            for call in calls():
                call.compile()

    return _pool().submit(work)


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    """Half the cores: the other half serve what is compiled."""
    return ThreadPoolExecutor(max((os.cpu_count() or 1) // 2, 1), thread_name_prefix="flashpoint-compile")
