"""The kernels in C are built for each instruction set that the compiler knows, and compiler errors are reported."""

import platform
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashpoint_kernels import native
from flashpoint_kernels.native import build, switches
from tests.support.kernels.solving import check, qkv
from tests.support.sweep import guards

FOUND = native.library()
ROOT = Path(__file__).parents[3]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    for name in build.SOURCES:
        (tmp_path / name).write_bytes((build.HERE / name).read_bytes())
    return tmp_path


def test_a_machine_without_a_compiler_builds_nothing(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(sources))
    monkeypatch.delenv("CC", raising=False)
    assert build.compile_library(sources) is None
    assert not (sources / build.LIBRARY).exists()


def test_a_library_of_other_sources_is_not_used(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(build.HERE / build.LIBRARY, sources)
    monkeypatch.setattr(native, "HERE", sources)
    monkeypatch.setattr(native, "checksum", lambda: build.checksum(sources))
    library = native.library.__wrapped__()
    assert library is not None
    assert FOUND is not None
    assert library.bfloat16.kernel == FOUND.bfloat16.kernel
    (sources / "isa.c").write_text((sources / "isa.c").read_text() + "\n/* changed */\n")
    with pytest.warns(RuntimeWarning, match=r"compiled from other sources"):
        assert native.library.__wrapped__() is None


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other architectures have one level")
@pytest.mark.parametrize(
    ("option", "left"),
    [
        ("-mamx-tile", {"avx2", "avx512", "avx512bf16"}),
        ("-mavx512bf16", {"avx2", "avx512"}),
        ("-mavx512f", {"avx2"}),
    ],
)
def test_a_compiler_that_does_not_know_a_level_builds_the_others(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str,
    left: set[str],
) -> None:  # fmt: skip
    compiler = build.compiler()
    assert compiler is not None
    old = tmp_path / "old"
    old.write_text(f'#!/bin/sh\ncase " $* " in *" {option} "*) exit 1;; esac\nexec {" ".join(compiler)} "$@" -O1\n')
    old.chmod(0o755)
    monkeypatch.setenv("CC", str(old))
    built = build.compile_library(sources)
    assert built is not None
    errors = capsys.readouterr().err
    assert {name for name in build.LEVELS["x86_64"] if f"the kernels for {name} are left out" not in errors} == left
    monkeypatch.setattr(native, "HERE", sources)
    assert {name for name in build.LEVELS["x86_64"] if native.level(name) is not None} == left
    library = native.library.__wrapped__()
    assert library is not None
    assert library.bfloat16.kernel.removeprefix("c-") in left
    monkeypatch.setattr(native, "library", lambda: library)
    check("cpu", qkv(1, 2, 66, 70, 40, dtype=torch.bfloat16), causal=True)


def test_the_script_reports_an_error_of_the_compiler(sources: Path) -> None:
    (sources / "build.py").write_bytes((build.HERE / "build.py").read_bytes())
    (sources / "forward.c").write_text("this is not C")
    ran = subprocess.run([sys.executable, str(sources / "build.py")], capture_output=True, text=True)
    assert ran.returncode == 1
    assert "forward.c" in ran.stderr


@pytest.mark.slow
def test_the_sources_compile_without_warnings(tmp_path: Path) -> None:
    """The sources compile without warnings, also for a processor without a known instruction set."""
    command = build.compiler()
    assert command is not None
    for options in ("", *build.LEVELS.get(platform.machine(), {}).values()):
        flags = [*build.FLAGS, "-O1", "-Werror", *options.split(), "-DISA=any", "-DSOURCES=0u"]
        for name in (name for name in build.SOURCES if name.endswith(".c")):
            ran = subprocess.run(
                [*command, *flags, "-c", str(build.HERE / name), "-o", str(tmp_path / "made.o")],
                capture_output=True, text=True,
            )  # fmt: skip
            assert ran.returncode == 0, ran.stderr


def test_an_installation_whose_compiler_fails_says_why_later(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The build hook keeps the last line of the compiler, and `missing`, which the server and `auto` show, has it."""
    hook = runpy.run_path(str(ROOT / "hatch_build.py"))
    folder = sources / hook["NATIVE"]
    folder.mkdir(parents=True)
    for name in (*build.SOURCES, "build.py"):
        (folder / name).write_bytes((build.HERE / name).read_bytes())
    failing = sources / "failing"
    failing.write_text("#!/bin/sh\necho 'fatal error: disk quota exceeded' >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CC", str(failing))
    warnings: list[str] = []
    app = SimpleNamespace(display_warning=warnings.append)
    data: dict[str, Any] = {"artifacts": []}
    hook["NativeKernels"](str(sources), {}, None, None, str(sources), "wheel", app).initialize("standard", data)
    assert data == {"artifacts": []}
    assert any("disk quota exceeded" in line for line in warnings)
    monkeypatch.setattr(native, "HERE", folder)
    assert native.missing() == f"{native.MISSING}; the compiler failed: fatal error: disk quota exceeded"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="the guarded build needs gcc")
@pytest.mark.parametrize("level", ["avx512", *switches.BFLOAT16])
def test_the_guarded_build_knows_16_lanes_without_avx512(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On such a processor the sweep once did not compile, which no processor with AVX-512 shows."""
    monkeypatch.setattr(guards, "has", lambda *_: False)
    for kernel in build.KERNELS:
        command = ["gcc", *guards.FLAGS, *guards.options_of(level), "-fsyntax-only", f"{kernel}.c"]
        ran = subprocess.run(command, cwd=build.HERE, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
