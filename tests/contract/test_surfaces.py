"""A new tensor and a new option, which nothing handles yet, are refused by name everywhere, and ignored nowhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flashpoint_contract
from flashpoint_contract.options import OPTIONS
from flashpoint_contract.surfaces import TAKES
from flashpoint_contract.tensors import TENSORS

HERE = Path(__file__).parent
TENSOR = """    Tensor("made_up_tensor", ("Hq",), "(Hq,): a tensor that nothing handles"),
    Tensor(
        "q", """
OPTION = """    made_up_option: int = _row(0, Integer(0, 9, "must be 0 to 9"), "an option that nothing handles", 3)
    deterministic: bool ="""


@pytest.mark.parametrize("surface", TAKES)
def test_a_surface_takes_an_entry_or_has_a_reason(surface: str) -> None:
    for name, row in (TENSORS | OPTIONS).items():
        assert (name in TAKES[surface]) != (surface in row.refused), name
    assert TAKES[surface] <= TENSORS.keys() | OPTIONS.keys()


@pytest.mark.parametrize(
    ("where", "places"),
    [pytest.param("here", 36, id="in a process"), pytest.param("served", 22, id="of a server", marks=pytest.mark.slow)],
)
def test_a_made_up_tensor_and_a_made_up_option_are_refused_everywhere(tmp_path: Path, where: str, places: int) -> None:
    """A copy of the contract has the two rows. A process of its own imports it, and asks every backend and surface."""
    pytest.importorskip("torch", reason="install the extra: pip install '.[dev]'")
    copy = tmp_path / "flashpoint_contract"
    shutil.copytree(Path(flashpoint_contract.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for file, before, after in (
        ("tensors.py", '    Tensor(\n        "q", ', TENSOR),
        ("options.py", "    deterministic: bool =", OPTION),
    ):
        text = (copy / file).read_text()
        assert before in text
        (copy / file).write_text(text.replace(before, after, 1))
    path = os.pathsep.join([str(tmp_path), str(HERE.parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, str(HERE / "made_up_rows.py"), where], env=os.environ | {"PYTHONPATH": path}, cwd=tmp_path,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wrong" not in done.stdout, done.stdout
    assert done.stdout.count("refused") == places, done.stdout


def test_the_command_names_each_place_that_does_not_list_a_row() -> None:
    pytest.importorskip("torch", reason="install the extra: pip install '.[dev]'")
    from tests.support.unhandled import PLACES, unhandled

    assert unhandled("made_up") == [*PLACES]
    assert unhandled("q") == []
    assert unhandled("block_mask") == [
        "backend torch (HANDLES)", "derivatives of cpu (IN_DERIVATIVES)", "surface sharded (TAKES)",
        "repeated calls in C (_REPEATED)", "parts that the engine caches (_CACHED)",
        "calls over forks computed together (_SHARED)",
    ]  # fmt: skip
