"""A soak test of some seconds: the service's resources do not grow. Times and refusals are not checked."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.run import PRIVATE
from chaos.service import MIB

LOADTESTS = Path(__file__).resolve().parents[2] / "loadtests"
TIMES = ("How many calls were refused or late?", "Flat: p50_ms")
# These resources grow with the highest number of concurrent requests, which is larger on a busy machine. For private
# memory, the test below applies the wider bounds of chaos/ instead.
GROWS = ("Flat: shared_mib", "Flat: resident_mib", "Flat: private_mib", "Flat: descriptors")


@pytest.mark.slow
def test_what_the_service_holds_stays_as_it_is(tmp_path):
    command = [sys.executable, LOADTESTS / "soak.py", "--minutes", "0.1", "--window", "1.5", "--out", tmp_path]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert "Traceback" not in ran.stderr, ran.stderr
    report = json.loads((tmp_path / "soak.json").read_text())
    verdicts = {verdict["question"]: verdict for verdict in report["verdicts"]}
    broken = [v for question, v in verdicts.items() if question not in (*TIMES, *GROWS) and not v["met"]]
    assert not broken
    assert {*TIMES, *GROWS, "Flat: threads", "Did it end well?"} <= verdicts.keys()
    _, first, *_, last = report["windows"]  # the first window is a warm-up
    assert last["private_mib"] <= first["private_mib"] * PRIVATE[0] + PRIVATE[1] / MIB
    assert (tmp_path / "soak.svg").read_text().lstrip().startswith("<?xml")
    assert ran.returncode == (0 if all(verdict["met"] for verdict in verdicts.values()) else 1)
