"""`make loadtest`, run with few and short steps, checks the answers that it gets and writes a complete report."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

LOADTESTS = Path(__file__).resolve().parents[2] / "loadtests"
pytestmark = pytest.mark.slow

KINDS = ("forward", "gradient", "mixed", "decode", "json", "oip", "mix")


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Return (finished process of the load test, folder with its output)."""
    out = tmp_path_factory.mktemp("loadtest")
    command = [
        sys.executable, LOADTESTS / "run.py", "--only", "saturation", "drain", "--scale", "0.05", "--loads", "0.2",
        "--out", out, "--most-p99-ms", "1000", "--most-errors", "0.05", "--least-throughput", "1",
    ]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert "Traceback" not in ran.stderr, ran.stderr
    return ran, out


def test_every_kind_of_caller_gets_right_answers(ran):
    """All kinds of callers ran, and no step of the load test counts a wrong answer."""
    process, out = ran
    assert process.returncode in (0, 1), process.stdout  # 0: all verdicts are good, 1: not all
    steps = json.loads((out / "result.json").read_text())["steps"]
    capacity = [step for step in steps if step["scenario"] == "capacity"]
    assert {step["step"].partition(",")[0] for step in capacity} == set(KINDS)
    assert sum(step["calls"] for step in capacity) > 0
    assert not [step for step in steps if step["wrong"]]


def test_the_server_drains_under_load(ran):
    _, out = ran
    verdicts = json.loads((out / "result.json").read_text())["verdicts"]
    by_question = {verdict["question"]: verdict for verdict in verdicts}
    answered = by_question["Who asked before SIGTERM, and was answered?"]["found"]
    assert "; 0 of the others had been read" in answered
    assert by_question["Did it end well?"]["met"], by_question["Did it end well?"]


def test_the_report_is_whole_and_the_exit_code_follows_it(ran):
    process, out = ran
    document = json.loads((out / "result.json").read_text())
    assert process.returncode == (0 if all(verdict["met"] for verdict in document["verdicts"]) else 1), process.stdout
    assert len(list(csv.DictReader((out / "steps.csv").read_text().splitlines()))) == len(document["steps"])
    page = (out / "report.html").read_text()
    assert page.count("<svg") == 1
    assert all(step["step"] in page for step in document["steps"])
    assert (out / "latency.svg").read_text().lstrip().startswith("<?xml")
    assert all("Locust" in (out / f"{name}.html").read_text() for name in ("capacity", "saturation", "drain"))
    assert document["environment"]["commit"]


WRONG = """
import sys
import numpy as np
from cases import CASES, OIP, WrongAnswerError, oip, write


def answer(tensors, form):
    return b"  ".join(oip(tensors, {}, "outputs")) if form == OIP else write(tensors, {}, form)


for kind, cases in CASES.items():
    for case in cases:
        right = {name: value.astype(np.float32) for name, value in case.expected.items()}
        whole = answer(right, case.form)
        case.check(whole)
        name, value = next(iter(right.items()))
        off = value.copy()
        off.flat[-1] += 1e-4 * np.abs(off).max()
        others = [answer({**right, name: other}, case.form) for other in (off, value[..., :-1])]
        for wrong in [*others, whole[:-5], b""]:
            try:
                case.check(wrong)
            except WrongAnswerError:
                continue
            sys.exit(f"{kind}: a wrong answer was taken for right")
"""


def test_a_wrong_answer_is_seen():
    """The check of the load test accepts a right answer of each case, and rejects wrong and incomplete ones."""
    ran = subprocess.run([sys.executable, "-c", WRONG], cwd=LOADTESTS, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


EXPLAINED = """
from pathlib import Path
from types import SimpleNamespace
import report
from scenarios import Verdict

args = SimpleNamespace(record=False, out=Path())
for load, met in ((3.2, False), (0.1, False), (3.2, True)):
    env = {"load_average": [load, 0, 0], "cores": 2}
    verdicts = [Verdict("And soon?", "900 ms", "at most 500 ms", met)]
    code = report.conclude(args, "load", env, verdicts, result="", picture="")
    print(code)
"""


def test_a_no_is_explained_with_the_load_average():
    ran = subprocess.run([sys.executable, "-c", EXPLAINED], cwd=LOADTESTS, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    busy, idle, met = (part.split("\n")[1:] for part in ran.stdout.split("And soon?")[1:])
    assert busy[0].startswith("load average before the test: 3.2 on 2 cores. Other programs were busy: end them")
    assert idle[0].startswith("load average before the test: 0.1 on 2 cores, idle enough: report.html")
    assert met[0] == "0"
