"""The licences of the packages that a server needs are compatible with Apache-2.0, and docs/licences.md lists them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import load

PROGRAM = Path(__file__).parents[2] / "docs" / "make_licences.py"
make_licences = load(PROGRAM)


@pytest.mark.slow
def test_the_page_is_complete_and_every_licence_goes_together():
    for module in ("torch", "jax", "ray"):
        pytest.importorskip(module, reason="install every extra: pip install '.[dev]'")
    done = subprocess.run([sys.executable, PROGRAM, "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("licence", "goes"),
    [
        ("MIT License", True),
        ("Apache-2.0 AND BSD-3-Clause", True),
        ("GPL-3.0 OR MIT", True),
        ("GPLv2", False),
        ("GPL-3.0 AND MIT", False),
        ("UNKNOWN", False),
        ("LGPL-2.1", False),
    ],
)
def test_which_licences_go_together(licence, goes):
    assert make_licences.compatible(licence) == goes
