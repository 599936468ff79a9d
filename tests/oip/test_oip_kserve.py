"""KServe's own client, unmodified, in an environment of its own, as its pins differ. Run by `make test-kserve`."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.oip.cases import CASES, ask, judge

PROGRAM = Path(__file__).parent / "clients" / "kserve_client.py"
KSERVE = "kserve==0.21.0"


@pytest.mark.full
def test_kserves_client(url, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", KSERVE]
    installed = subprocess.run(install, capture_output=True, text=True)
    assert installed.returncode == 0, installed.stderr
    report, answers = ask([python, PROGRAM], tmp_path, url, CASES)
    judge(report, answers, CASES)
    assert report["ready"] == [True, True, True]
