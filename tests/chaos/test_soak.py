"""`make soak`, some seconds of it: what the service holds stays as it is. How fast it is, is left to who measures."""

import json
import subprocess
import sys
from pathlib import Path

LOADTESTS = Path(__file__).resolve().parents[2] / "loadtests"
TIMES = ("How many calls were refused or late?", "Flat: p50_ms")
# With the most requests at a time, for longer than a test lasts. What is resident is private or shared; the private
# part is asked for by itself.
GROWS = ("Flat: shared_mib", "Flat: resident_mib", "Flat: descriptors")


def test_what_the_service_holds_stays_as_it_is(tmp_path):
    command = [sys.executable, LOADTESTS / "soak.py", "--minutes", "0.2", "--window", "4", "--out", tmp_path]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert "Traceback" not in ran.stderr, ran.stderr
    found = json.loads((tmp_path / "soak.json").read_text())
    verdicts = {verdict["question"]: verdict for verdict in found["verdicts"]}
    broken = [v for question, v in verdicts.items() if question not in (*TIMES, *GROWS) and not v["met"]]
    assert not broken
    assert {*TIMES, *GROWS, "Flat: private_mib", "Flat: threads", "Did it end well?"} <= verdicts.keys()
    assert all(window["calls"] for window in found["windows"])
    assert (tmp_path / "soak.svg").read_text().lstrip().startswith("<?xml")
    assert ran.returncode == (0 if all(verdict["met"] for verdict in verdicts.values()) else 1)
