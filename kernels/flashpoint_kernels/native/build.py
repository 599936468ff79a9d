"""Compile the CPU kernels with the system's C compiler: `python kernels/flashpoint_kernels/native/build.py`.

The build of the wheel, and of an editable installation, calls `compile_library` (hatch_build.py). Nothing is compiled
when the package runs. The package also works without a compiler: `auto` then takes the backend `tiled`.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

HERE = Path(__file__).parent
LIBRARY = "libflashpoint.so"
KERNELS = ("forward", "backward", "tangent")
SOURCES = (
    "forward.c", "forward.h", "forward_float32.h", "forward_amx.h", "backward.c", "backward.h", "backward_float32.h",
    "backward_amx.h", "tangent.c", "memory.h", "options.h", "products.h", "tiles.h", "vectors.h", "isa.c", "threads.c",
)  # fmt: skip
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", "-Wno-psabi")
# The instruction sets for which the kernels are compiled, with compiler options. Each set includes the sets before it.
_AVX2 = "-mavx2 -mfma -mf16c -mbmi2"
_AVX512 = f"{_AVX2} -mavx512f -mavx512bw -mavx512dq -mavx512vl"
_AVX512BF16 = f"{_AVX512} -mavx512bf16"
_AMX = f"{_AVX512BF16} -mamx-tile -mamx-bf16"
X86_64 = {"avx2": _AVX2, "avx512": _AVX512, "avx512bf16": _AVX512BF16, "amx": _AMX}
LEVELS = {"x86_64": X86_64, "AMD64": X86_64}  # keys are values of `platform.machine()`
OTHERS = {"generic": ""}


def checksum(folder: Path = HERE) -> int:
    """Return a checksum of the C sources. `native.library` loads no library that was compiled from other sources."""
    crc = 0
    for name in SOURCES:
        crc = zlib.crc32((folder / name).read_bytes(), crc)
    return crc


def compiler() -> list[str] | None:
    """Return the command of the C compiler: $CC, or the first of cc, gcc and clang; None without one."""
    if given := os.environ.get("CC", "").split():
        return given
    return next(([path] for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)


def compile_library(folder: Path = HERE) -> Path | None:
    """Compile the sources in `folder` into `folder`/libflashpoint.so and return its path; None without a C compiler.

    Raises:
        subprocess.CalledProcessError: the compiler reports an error, which is in `stderr`.
        OSError: there is no such compiler as $CC.
    """
    if (command := compiler()) is None:
        return None
    with tempfile.TemporaryDirectory() as temporary:
        objects = []
        for level, options in LEVELS.get(platform.machine(), OTHERS).items():
            if not _knows(command, options, temporary):
                print(f"{command[0]} does not know {options}: the kernels for {level} are left out", file=sys.stderr)
                continue
            for kernel in KERNELS:
                objects.append(f"{temporary}/{kernel}_{level}.o")
                source = str(folder / f"{kernel}.c")
                _run([*command, *FLAGS, *options.split(), f"-DISA={level}", "-c", source, "-o", objects[-1]])
        for name in ("isa", "threads"):
            objects.append(f"{temporary}/{name}.o")
            sources = f"-DSOURCES={checksum(folder)}u"
            _run([*command, *FLAGS, sources, "-pthread", "-c", str(folder / f"{name}.c"), "-o", objects[-1]])
        made = f"{temporary}/{LIBRARY}"
        _run([*command, "-shared", *objects, "-o", made, "-pthread", "-lm"])
        target = folder / LIBRARY
        target.unlink(missing_ok=True)  # processes that have loaded the old file keep it
        shutil.copyfile(made, target)
    return target


def _knows(command: list[str], options: str, folder: str) -> bool:
    """Return whether the compiler supports these options."""
    empty = f"{folder}/empty.c"
    Path(empty).write_text("")
    tried = [*command, *options.split(), "-c", empty, "-o", f"{folder}/empty.o"]
    return subprocess.run(tried, check=False, capture_output=True).returncode == 0


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


if __name__ == "__main__":
    try:
        print(compile_library() or "no C compiler was found: set CC, or install gcc")
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(error.cmd)}\n{error.stderr}")
    except OSError as error:
        sys.exit(f"{error}: set CC to a C compiler")
