"""Compile the CPU kernels with the system's C compiler: `python kernels/flashpoint_kernels/native/build.py`.

The build of the wheel, and of an editable installation, calls `compile_library` (hatch_build.py). Nothing is compiled
when the package runs. Without a compiler the package works as well: the `torch` backend then computes with torch's own
operators.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zlib
from itertools import product
from pathlib import Path

HERE = Path(__file__).parent
LIBRARY = "libflashpoint.so"
KERNELS = ("forward", "backward")
SOURCES = ("forward.c", "backward.c", "options.h", "vectors.h", "isa.c")
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-Wall", "-Wextra", "-Wno-psabi")
# The instruction sets for which the kernels are compiled, and the compiler's options for them.
_AVX2 = "-mavx2 -mfma -mf16c -mbmi2"
X86_64 = {"v3": _AVX2, "v4": f"{_AVX2} -mavx512f -mavx512bw -mavx512dq -mavx512vl"}
LEVELS = {"x86_64": X86_64, "AMD64": X86_64}  # by the name of the machine


def checksum(folder: Path = HERE) -> int:
    """Return the checksum of the sources: a library from other sources is not loaded."""
    found = 0
    for name in SOURCES:
        found = zlib.crc32((folder / name).read_bytes(), found)
    return found


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
    levels = LEVELS.get(platform.machine(), {"v1": ""})
    with tempfile.TemporaryDirectory() as temporary:
        objects = []
        for (level, options), kernel in product(levels.items(), KERNELS):
            objects.append(f"{temporary}/{kernel}_{level}.o")
            source = str(folder / f"{kernel}.c")
            _run([*command, *FLAGS, *options.split(), f"-DISA={level}", "-c", source, "-o", objects[-1]])
        objects.append(f"{temporary}/isa.o")
        sources = f"-DSOURCES={checksum(folder)}u"
        _run([*command, *FLAGS, sources, "-c", str(folder / "isa.c"), "-o", objects[-1]])
        made = f"{temporary}/{LIBRARY}"
        _run([*command, "-shared", *objects, "-o", made])
        target = folder / LIBRARY
        target.unlink(missing_ok=True)  # a process that has loaded the old file keeps it
        shutil.copyfile(made, target)
    return target


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


if __name__ == "__main__":
    try:
        print(compile_library() or "no C compiler was found: set CC, or install gcc")
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(error.cmd)}\n{error.stderr}")
    except OSError as error:
        sys.exit(f"{error}: set CC to a C compiler")
