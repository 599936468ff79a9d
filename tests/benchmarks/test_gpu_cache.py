"""Triton's compile cache is packed into a few files by `make gpu`, and works in the folder where it is unpacked."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_day import cache, checkout

FILL = """
import sys
from flashpoint_kernels.triton_backend.tools.ahead import Wanted, fill
fill(Wanted(90, "bfloat16", 64, 0, "forward"))
"""


def entry(folder: Path, name: str, size: int = 10, at: float = 1000.0) -> Path:
    """Create an entry of Triton's compile cache: a folder with files of `size` random bytes and the mtime `at`."""
    made = folder / name
    made.mkdir(parents=True)
    names = ("kernel.cubin", "kernel.ptx", "kernel.ttir", "kernel.json")
    for file in names:
        (made / file).write_bytes(os.urandom(size))
    (made / "__grp__kernel.json").write_text(json.dumps({"child_paths": {f: str(made / f) for f in names}}))
    for path in made.iterdir():
        os.utime(path, (at, at))
    return made


def test_an_entry_leads_to_its_own_files_wherever_it_is_unpacked(tmp_path: Path) -> None:
    made = entry(tmp_path / "a", "KEY")
    (tmp_path / "a" / "LAUNCHER").mkdir()
    (tmp_path / "a" / "LAUNCHER" / "launcher.so").write_bytes(b"of this machine")
    assert cache.pack(tmp_path / "a", tmp_path / "out", 1) == (1, 0)
    assert cache.unpack(tmp_path / "out", tmp_path / "b") == 1
    there = tmp_path / "b" / "KEY"
    assert {path.name for path in there.iterdir()} == {
        "kernel.cubin",
        "kernel.ptx",
        "kernel.json",
        "__grp__kernel.json",
    }
    assert (there / "kernel.cubin").read_bytes() == (made / "kernel.cubin").read_bytes()
    group = json.loads((there / "__grp__kernel.json").read_text())["child_paths"]
    assert group["kernel.cubin"] == str(there / "kernel.cubin")
    assert cache.unpack(tmp_path / "out", tmp_path / "b") == 0, "existing entries stay"


def test_the_oldest_entries_are_left_out_and_files_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_PART_BYTES", 1 << 20)
    for n in range(8):
        entry(tmp_path / "a", f"K{n}", 100_000, at=1000.0 + n)  # 0.3 MB when packed: its .ttir file is left out
    assert cache.pack(tmp_path / "a", tmp_path / "out", 2) == (6, 2)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["part-0.tar.gz", "part-1.tar.gz"]
    assert sum(path.stat().st_size for path in (tmp_path / "out").iterdir()) <= 2 << 20
    cache.unpack(tmp_path / "out", tmp_path / "b")
    assert {path.name for path in (tmp_path / "b").iterdir()} == {f"K{n}" for n in range(2, 8)}
    assert cache.pack(tmp_path / "b", tmp_path / "out", 1) == (3, 3), "unpacked entries keep their age"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["part-0.tar.gz"]


def test_a_part_that_is_cut_off_or_leads_elsewhere_harms_nothing(tmp_path: Path) -> None:
    for n in range(3):
        entry(tmp_path / "a", f"K{n}", 100_000, at=1000.0 - n)
    cache.pack(tmp_path / "a", tmp_path / "out", 5)
    part = tmp_path / "out" / "part-0.tar.gz"
    part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    assert 1 <= cache.unpack(tmp_path / "out", tmp_path / "b") < 3
    part.write_bytes(gzip.compress(b"no tar"))
    assert cache.unpack(tmp_path / "out", tmp_path / "c") == 0
    outside = entry(tmp_path / "d", "K")
    (tmp_path / "out" / "part-0.tar.gz").write_bytes(b"")
    assert cache.unpack(tmp_path / "out", tmp_path / "c") == 0
    assert cache.unpack(tmp_path / "nothing", tmp_path / "c") == 0
    assert outside.exists()


@pytest.mark.slow
def test_triton_compiles_nothing_that_was_brought_along(tmp_path: Path) -> None:
    """Compile a kernel for an absent GPU, pack its cache, unpack it elsewhere, and load the kernel from there."""

    def fill(folder: Path) -> None:
        env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        env |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": checkout.python_path()}
        subprocess.run([sys.executable, "-c", FILL], env=env, check=True)

    fill(tmp_path / "a")
    assert list((tmp_path / "a").rglob("*.ttir"))
    packed, _ = cache.pack(tmp_path / "a", tmp_path / "out", 40)
    assert cache.unpack(tmp_path / "out", tmp_path / "b") == packed > 0
    fill(tmp_path / "b")
    assert not list((tmp_path / "b").rglob("*.ttir")), "a compilation would leave this form, too"
