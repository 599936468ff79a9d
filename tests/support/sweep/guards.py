"""The guarded build: the kernels in C with small blocks, for every instruction set, with sanitizers.

Blocks are as small as the code allows, so that problems of 100 × 100 have several blocks in each loop. There is a gap
behind each array of scratch memory, and AddressSanitizer and UndefinedBehaviorSanitizer end the process at the first
wrong access or undefined operation. On a processor without AVX-512, the compiler makes the code for 16 lanes of
narrower vectors. The level `amx` is the code for AMX with the tile instructions in C, on every processor; `avx512bf16`
is the same code with the products of AVX512-BF16, in C on processors that lack it.

A build takes about 70 s of processor time. Its files are kept in build/guards, by the checksums of what they are made
from.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from flashpoint_kernels.native import build, switches

KEPT = Path(__file__).parents[3] / "build" / "guards"
MOST = 120  # files kept
_IN_C = {"amx": "-DTILES_IN_C", "avx512bf16": "-DPAIRS_IN_C"}
AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
FLAGS = (
    "-std=gnu11", "-O1", "-g1", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", "-Werror",
    "-Wno-psabi",
)  # fmt: skip
GUARDS = (
    "-DGUARDS", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer",
)  # fmt: skip


class Blocks(NamedTuple):
    """The sizes of a level's blocks: macros of forward.c, backward.c and tangent.c, and the cuts of native/*.py."""

    forward: Mapping[str, int]
    backward: Mapping[str, int]
    tangent: Mapping[str, int]
    tile: int  # rows.TILE
    step: int  # rows._STEP
    part: int  # backward._ROWS

    @property
    def chunk(self) -> int:
        return self.forward["CHUNK"]

    @property
    def queries(self) -> int:
        return self.backward["QUERIES"]


# A chunk has two blocks, so that a softmax goes on from block to block. In the gradient of AMX, a block has three
# strips of 32 queries: with two, a fault between strips once stayed hidden.
_OF_TANGENT = {"BLOCK": 64, "STRIP": 12}
_TILES = Blocks({"BLOCK": 64, "CHUNK": 128}, {"KEYS": 32, "QUERIES": 96}, _OF_TANGENT, 80, 16, 96)
_NARROW = Blocks(
    {"BLOCK": 32, "STRIP": 12, "CHUNK": 64}, {"KEYS": 32, "QUERIES": 12}, {"BLOCK": 32, "STRIP": 12}, 40, 10, 24
)
SMALL = {
    "avx2": _NARROW,
    "generic": _NARROW,
    "avx512": _NARROW._replace(forward={"BLOCK": 64, "STRIP": 12, "CHUNK": 128}, tangent=_OF_TANGENT),
    "avx512bf16": _TILES,
    "amx": _TILES,
}
USUAL = {level: Blocks({"CHUNK": 1024}, {"QUERIES": 128}, {}, 384, 96, 2048) for level in SMALL}


def levels() -> tuple[str, ...]:
    """Return the levels of a guarded build on this machine."""
    return tuple(SMALL) if platform.machine() in build.LEVELS else ("generic", *switches.BFLOAT16)


def options_of(level: str) -> list[str]:
    """Return the compiler's options for one level. `avx512` also computes what the levels with tiles leave to it."""
    sets = build.LEVELS.get(platform.machine(), {})
    options = [f"-DISA={level}"]
    if level == "avx512" or is_in_c(level):
        return [
            *options,
            *([_IN_C[level]] if level in _IN_C else ()),
            *(sets["avx512"].split() if has(*AVX512) else ["-DLANES_16", *sets.get("avx2", "").split()]),
        ]
    return [*options, *sets.get(level, "").split()]


def is_in_c(level: str) -> bool:
    """Return whether C code computes the level's products of bfloat16 in the place of the processor's instructions."""
    return level == "amx" or (level == "avx512bf16" and not has("avx512_bf16"))


def has(*names: str) -> bool:
    """Return whether the processor has these instruction sets, by Linux's names."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return all(f" {name}" in flags for name in names)


def library(level: str, small: bool = True, flags: tuple[str, ...] = GUARDS, folder: Path = build.HERE) -> Path:
    """Return the guarded library of one level, from the sources in `folder`; compile what is not kept from before.

    Raises:
        RuntimeError: there is no gcc, or it reports an error.
    """
    if shutil.which("gcc") is None:
        raise RuntimeError("the guarded build needs gcc, and there is none: install gcc")
    KEPT.mkdir(parents=True, exist_ok=True)
    with (KEPT / f"{level}.lock").open("w") as lock, ThreadPoolExecutor(os.cpu_count()) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the processes of one run wait for one build
        objects = list(pool.map(lambda job: _object(job, folder), _jobs(level, small, flags, build.checksum(folder))))
        kept = KEPT / f"{zlib.crc32(' '.join(map(str, objects)).encode()):08x}.so"
        if kept.exists():
            kept.touch()
        else:
            _made(["gcc", "-shared", *flags, *map(str, objects), "-pthread", "-lm"], folder, kept)
        for old in sorted(KEPT.glob("*.[os]*"), key=lambda made: made.stat().st_mtime)[:-MOST]:
            old.unlink()
    return kept


def _jobs(of: str, small: bool, flags: tuple[str, ...], checksum: int) -> list[list[str]]:
    """Return the command of each object file, without the file's name."""
    jobs = []
    for kernel in build.KERNELS:
        for level in ("avx512", of) if of in switches.BFLOAT16 else (of,):
            macros = getattr(SMALL[level], kernel) if small else {}
            sizes = [f"-D{name}={size}" for name, size in macros.items()]
            jobs.append(["gcc", *FLAGS, *flags, *options_of(level), *sizes, "-c", f"{kernel}.c"])
    for name in ("isa", "threads"):
        jobs.append(["gcc", *FLAGS, *flags, f"-DSOURCES={checksum}u", "-pthread", "-c", f"{name}.c"])
    return jobs


def _object(job: list[str], folder: Path) -> Path:
    """Return the object file of a command. Its name is a checksum of the command and of the preprocessed source."""
    text = _run([*job, "-E", "-fno-working-directory"], folder)
    kept = KEPT / f"{zlib.crc32(text.encode(), zlib.crc32(' '.join(job).encode())):08x}.o"
    if kept.exists():
        kept.touch()
    else:
        _made(job, folder, kept)
    return kept


def _made(command: list[str], folder: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=KEPT) as temporary:
        _run([*command, "-o", f"{temporary}/made"], folder)
        os.replace(f"{temporary}/made", target)


def _run(command: list[str], folder: Path) -> str:
    ran = subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder)
    if ran.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{ran.stderr}")
    return ran.stdout


def environment(sanitizer: str = "libasan.so") -> dict[str, str]:
    """Return the environment of a process that loads a guarded library: a sanitizer must be loaded first.

    AddressSanitizer fills new memory with NaN, so that a sum that begins without zeros is NaN.
    """
    # a sanitizer finds the function that throws C++ exceptions only where libstdc++ is loaded beside it
    names = [["gcc", f"-print-file-name={name}"] for name in (sanitizer, "libstdc++.so.6")]
    found = [subprocess.run(name, check=True, capture_output=True, text=True).stdout.strip() for name in names]
    fills = "max_malloc_fill_size=1073741824:malloc_fill_byte=255"
    return os.environ | {
        "LD_PRELOAD": " ".join(found),
        "ASAN_OPTIONS": f"detect_leaks=0:{fills}",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "2",
    }


def use(path: Path, level: str, blocks: Blocks) -> None:
    """Make this process use one level of a guarded library, with Python's cuts as small as the library's blocks."""
    from flashpoint_kernels import native
    from flashpoint_kernels.native import backward, calls, forward, prefix, rows, tangent

    native.LIBRARY = calls.LIBRARY = str(path)  # an absolute path: it replaces the folder before it
    functions = native.level(level)
    assert functions is not None, f"{path} lacks {level}"
    native.library = lambda: functions  # type: ignore[assignment]
    cuts: dict[Any, dict[str, int]] = {
        rows: {"CHUNK": blocks.chunk, "TILE": blocks.tile, "_STEP": blocks.step},
        prefix: {"CHUNK": blocks.chunk, "TILE": blocks.tile},
        forward: {"CHUNK": blocks.chunk, "TILE": blocks.tile, "TOGETHER": 5, "_LEAST_BYTES": 1, "_LEAST_FLOPS": 1},
        backward: {"QUERIES": blocks.queries, "_ROWS": blocks.part, "_PARTS": 3, "_LEAST_FLOPS": 1},
        tangent: {"_ROWS": blocks.part, "_LEAST": blocks.step, "_LEAST_FLOPS": 1},
    }
    for module, values in cuts.items():
        for name, value in values.items():
            assert hasattr(module, name), f"{module.__name__} has no {name}"
            setattr(module, name, value)


if __name__ == "__main__":
    for name in sys.argv[1:] or levels():
        print(library(name))
