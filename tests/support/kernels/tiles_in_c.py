"""Our attention with the kernels for AMX, whose tile instructions are C code: it runs on processors without AMX.

`library` compiles them, with a fault of the bank if one is named; `attention` uses the library that the environment
variable TILES names, so that a process of its own finds it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

from torch import Tensor

import flashpoint_kernels
from flashpoint_kernels import native
from flashpoint_kernels.native import build

BANK = Path(__file__).parents[2] / "faults/bank"


def library(folder: Path, fault: str = "", products: str = "TILES_IN_C") -> Path:
    """Compile the library into `folder`, from a copy of the sources with the fault of this id, and return its path.

    `products` is the macro that replaces instructions: PAIRS_IN_C replaces those of AVX512-BF16.
    """
    sources = folder / "sources"
    shutil.copytree(build.HERE, sources, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    if fault:
        faults = [each for file in BANK.glob("*.toml") for each in tomllib.loads(file.read_text())["fault"]]
        each = next(each for each in faults if each["id"] == fault)
        place = sources / Path(each["file"]).name
        text = place.read_text()
        assert text.count(each["old"].strip("\n")) == 1, f"{fault} does not fit its source"
        place.write_text(text.replace(each["old"].strip("\n"), each["new"].strip("\n")))
    command = build.compiler()
    assert command is not None
    flags = [*build.FLAGS, *build.X86_64["avx512"].split(), "-Werror", "-O1"]
    tiles_in_c = [f"-D{products}", "-DISA=tiles"]
    # If products may overflow, the tiled gradient calls the AVX-512 kernel for them.
    parts = {**dict.fromkeys(build.KERNELS, tiles_in_c), "large": ["-DISA=avx512"]}
    for name, options in parts.items():
        source = str(sources / ("backward.c" if name == "large" else f"{name}.c"))
        compiled = [*command, *flags, *options, "-c", source, "-o", str(folder / f"{name}.o")]
        ran = subprocess.run(compiled, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
    made = folder / "tiles.so"
    objects = [str(folder / f"{name}.o") for name in parts]
    subprocess.run([*command, "-shared", *objects, "-o", str(made), "-lm"], check=True, capture_output=True)
    return made


def loaded(path: str | Path) -> native.Library:
    """Return the library at `path`."""
    functions = ctypes.CDLL(str(path))
    names = native.Functions._fields[1:]
    tiles = native.Functions("c-tiles", *(functions[f"flashpoint_{name}_tiles"] for name in names))
    return native.Library(tiles, tiles)


if "TILES" in os.environ:
    _library = loaded(os.environ["TILES"])
    native.library = lambda: _library  # type: ignore[assignment]


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None,
    window: tuple[int, int] = (-1, -1), softcap: float = 0.0, attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, return_lse: bool = False,
) -> Any:  # fmt: skip
    return flashpoint_kernels.attention(
        q, k, v, causal=causal, scale=scale, window=window, softcap=softcap, attn_mask=attn_mask,
        alibi_slopes=alibi_slopes, sinks=sinks, return_lse=return_lse, backend="cpu",
    )  # fmt: skip
