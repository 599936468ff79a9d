"""Fill Triton's cache for GPUs that this machine does not have.

Use: `python -m flashpoint_kernels.triton_backend.tools.ahead`.
A container image contains this cache, so its first request compiles nothing. It has attention and its gradients in 16
bits and float32, at D 64 and 128: plain, with a window, and with a mask. The kernels are compiled by the same code that
runs them, up to the launch, so a later look-up has the same key. `_Driver` replaces Triton's driver, which needs a GPU.

The cache is in TRITON_CACHE_DIR. TRITON_INTERPRET must not be set. A key contains a hash of Triton's compiled library,
which differs between versions of Python: --library is that of the machine that will use the cache.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget

from flashpoint_contract.options import Direction, Options
from flashpoint_kernels.problems.problem import Problem
from flashpoint_kernels.triton_backend.host import config
from flashpoint_kernels.triton_backend.host.configurations import SHARED_KIB
from flashpoint_kernels.triton_backend.host.launch import compile_ahead

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


class Wanted(NamedTuple):
    """A launch to compile for sm_`arch`; `level` is that of `Spec.level`."""

    arch: int
    dtype: str
    head_dim: int
    level: int
    direction: Direction

    def problems(self) -> list[Problem]:
        """Return two problems, which together need all kernels of the launch.

        One has so many keys that they are split, which needs one more kernel. The other has so many queries that it
        uses the path for Hopper on sm_90.
        """
        return [self._problem(16, 4096), self._problem(128, 128)]

    def _problem(self, q_len: int, kv_len: int) -> Problem:
        shapes = {"q": (1, 1, q_len, self.head_dim), "k": (1, 1, kv_len, self.head_dim)}
        shapes |= {"v": shapes["k"]} | ({"do": shapes["q"]} if self.direction == "backward" else {})
        tensors = {name: torch.zeros(shape, dtype=DTYPES[self.dtype], device="cpu") for name, shape in shapes.items()}
        if self.level == 2:
            tensors["attn_mask"] = torch.ones(q_len, kv_len, dtype=torch.bool, device="cpu")
        return Problem.create(tensors, Options(window=(64, 0) if self.level == 1 else (-1, -1)), self.direction)


class _Driver:
    """A driver that answers Triton's calls up to the launch, without a GPU."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def pretend(arch: int) -> None:
    """Make this process compile for sm_`arch`, as if the GPU were present. This cannot be undone.

    Raises RuntimeError if this process compiles for another architecture already: Triton's kernels keep their first
    target.
    """
    if config.stand_in is not None and config.stand_in.arch != arch:
        raise RuntimeError(f"this process compiles for sm_{config.stand_in.arch}: compile for sm_{arch} in another")
    config.stand_in = config.Chip(arch, SHARED_KIB[arch])
    triton.runtime.driver.set_active(_Driver(arch))


def use_keys_of(library: Path) -> None:
    """Make the cache keys of this process those of a Triton of the same release with this compiled library.

    The other files of a release are the same for all versions of Python.
    """
    own = Path(triton.__path__[0], "_C", "libtriton.so")
    before, after = (hashlib.sha256(path.read_bytes()).hexdigest() for path in (own, library))
    key: str = triton.runtime.cache.triton_key()
    assert before in key or after in key, "Triton's key has no hash of its library"
    changed = key.replace(before, after)
    triton.runtime.cache.triton_key = lambda: changed


def fill(one: Wanted, library: Path | None = None) -> Wanted:
    """Compile one launch, in a process for its architecture. Raises the errors of Triton."""
    pretend(one.arch)
    if library:
        use_keys_of(library)
    for problem in one.problems():
        compile_ahead([problem]).result()
    return one


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", choices=SHARED_KIB, default=list(SHARED_KIB))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--levels", type=int, nargs="+", choices=(0, 1, 2), default=[0, 1, 2])
    parser.add_argument("--library", type=Path, help="libtriton.so of the same release for another version of Python")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    for arch in arguments.arch:
        with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
            wanted = product([arch], arguments.dtypes, arguments.head_dims, arguments.levels, DIRECTIONS)
            for done in pool.map(partial(fill, library=arguments.library), (Wanted(*one) for one in wanted)):
                print(*done, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
