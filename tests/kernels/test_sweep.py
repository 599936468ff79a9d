"""Every kernel agrees with the oracle for any case around the edges of its blocks (tests/support/sweep).

`make test` draws some 400 cases in all, the same in each run. `make test-full` draws new ones for an hour.
"""

import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flashpoint_kernels.native import switches
from flashpoint_kernels.tiled_backend import tiles
from flashpoint_kernels.triton_backend.host import config
from flashpoint_kernels.triton_backend.host.configurations import Config, Tile
from tests.conftest import EXPLORING
from tests.support.kernels.routes import forget
from tests.support.sweep import guards
from tests.support.sweep.cases import WIDE_DIMS, cases, edges
from tests.support.sweep.check import check_all

ROOT = Path(__file__).parents[2]
CASES = 100  # of a level, in `make test`: all residues of windows, and each feature alone or in a pair
# `make test-full` draws new cases, and `make test` the same ones in each run. An error has the case as a note.
SEED = random.SystemRandom().getrandbits(32) if EXPLORING else 0


def of_level(level: str, count: int, longest: int, *more: str) -> None:
    """Run cases on a level of the guarded library, in a process of its own."""
    path = guards.library(level, small="usual" not in more)
    command = [
        sys.executable,
        "-m",
        "tests.support.sweep",
        str(path),
        level,
        str(count),
        str(longest),
        str(SEED),
        *more,
    ]
    ran = subprocess.run(command, cwd=ROOT, env=guards.environment(), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-2000:] + "\n".join(ran.stderr.splitlines()[:60])
    assert f"{count} cases on {level}" in ran.stdout


# Cases of up to 200 queries and keys: a block of tiles has 96 queries. Only the products of `avx512bf16` are not those
# of `amx`; in C they take a minute and a half for 100 cases.
@pytest.mark.parametrize("level", guards.levels())
def test_cpu_with_small_blocks(level: str) -> None:
    if not EXPLORING and level == "avx512bf16" and guards.is_in_c(level):
        of_level(level, CASES // 4, 200)
        return
    of_level(level, 12_000 if EXPLORING else CASES, 200 if level in switches.BFLOAT16 else 150)


@pytest.mark.slow
@pytest.mark.parametrize("level", guards.levels())
def test_cpu_with_its_own_blocks(level: str) -> None:
    of_level(level, 300 if EXPLORING else 60, 300, "usual")


@contextmanager
def smallest_tiles() -> Iterator[None]:
    """Make the tiles of `tiled` and of Triton's interpreter as small as they can be."""
    with pytest.MonkeyPatch.context() as patch:
        for name, tile in (("FORWARD_TILE", (16, 24)), ("BACKWARD_TILE", (24, 16))):
            patch.setattr(tiles, name, tile)
            patch.setattr(tiles, f"DROPOUT_{name}", tile)
        smallest = Config(
            Tile(32, 16), Tile(16, 32), Tile(32, 16, num_stages=3), Tile(16, 16),
            split_keys=32, few_queries=8, least_keys=16, least_programs=4,
        )  # fmt: skip
        patch.setattr(config, "_INTERPRETER", smallest)
        forget()
        yield
    forget()


@pytest.fixture(scope="module")
def small_tiles() -> Iterator[None]:
    with smallest_tiles():
        yield


def test_tiled_with_small_tiles(small_tiles: None) -> None:
    count = 20_000 if EXPLORING else 100
    check_all(cases(count, edges([16, 24], 75), edges([16, 24], 75), seed=SEED), "tiled")
    check_all(cases(count // 10, edges([16, 24], 50), edges([16, 24], 50), dims=WIDE_DIMS, seed=SEED), "tiled")


def test_triton_with_its_smallest_tiles(small_tiles: None) -> None:
    count = 3_000 if EXPLORING else 60
    check_all(cases(count, edges([16], 40), edges([16], 60), dims=(8, 16, 24), seed=SEED), "triton")
    check_all(cases(count // 20, edges([16], 20), edges([16], 40), dims=WIDE_DIMS, seed=SEED), "triton")


def test_reference() -> None:
    count = 5_000 if EXPLORING else 60
    check_all(cases(count, edges([16], 40), edges([16], 40), seed=SEED), "reference")
