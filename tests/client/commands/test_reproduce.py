"""`flashpoint reproduce` measures published claims, shows progress, and writes the results so far after Ctrl-C."""

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flashpoint.commands import reproduce

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")
import torch

from flashpoint_kernels.reproduction import bench, claims


@pytest.mark.slow
def test_claims_are_measured_shown_written_and_drawn(run, tmp_path, monkeypatch):
    monkeypatch.setattr(claims.Claim, "limit", 3600)  # a busy machine needs longer than the limit
    code, out, err = run(
        "reproduce", "--only", "equations,table,flash-attn", "--json", tmp_path / "all.json",
        "--plots", tmp_path / "new" / "folder",
    )  # fmt: skip
    assert code == 0
    assert [line for line in err.splitlines() if line[:1] != " "] == ["1/3 table", "2/3 flash-attn", "3/3 equations"]
    assert "  forward · naive · N 512\n" in err
    assert "block products, online softmax" in out
    document = json.loads((tmp_path / "all.json").read_text())
    by_name = {claim["name"]: claim for claim in document["claims"]}
    marked = any(row["busy"] for row in document["rows"] if row["skipped"] is None)
    assert by_name["table"]["verdict"] == ("needs a quiet machine" if marked else "PASS")
    assert by_name["equations"]["verdict"] == "PASS"
    assert "forward: naive" in by_name["table"]["measured"]
    if not torch.cuda.is_available():
        assert by_name["flash-attn"]["verdict"] == "needs a GPU"
    assert all(claim["seconds"] >= 0 and claim["source"] and claim["claim"] for claim in document["claims"])
    rows = [row for row in document["rows"] if row["skipped"] is None]
    assert {row["direction"] for row in rows} == {"forward", "backward"}
    assert all(row["flops"] and row["bytes"] and row["arithmetic_intensity"] for row in rows)
    assert {row["speedup_over_naive"] is None for row in rows if row["backend"] != "naive"} == {False}
    assert document["environment"]["peaks"]["float32"]["tflops"] > 0
    names = {path.name for path in (tmp_path / "new" / "folder").glob("*.svg")}
    assert {"time.svg", "time-dark.svg", "roofline.svg", "speedup.svg"} <= names


def test_a_claim_that_fails_ends_with_1(run, monkeypatch):
    monkeypatch.setattr(claims, "EXACT", 0.0)
    code, out, _ = run("reproduce", "--only", "equations")
    assert code == 1
    assert "FAIL" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "equations,best"), "claim 'best' does not exist; use precision, table"),
        (("--plots", __file__), "is no folder"),
        (("--plots", f"{__file__}/below"), "is no folder"),
    ],
)
def test_what_is_called_wrongly_ends_with_2(run, arguments, message):
    code, out, err = run("reproduce", *arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_an_example_that_is_not_there_or_ends_badly(run, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "EXAMPLES", tmp_path)
    code, out, _ = run("reproduce", "--only", "gpt")
    assert (code, "needs a clone" in " ".join(out.split())) == (0, True)
    monkeypatch.setattr(claims.Claim, "limit", 600)
    (tmp_path / "train_gpt.py").write_text("raise SystemExit('no text')")
    code, out, _ = run("reproduce", "--only", "gpt")
    assert code == 1
    assert "no text" in out


def test_progress_is_said_and_ctrl_c_keeps_what_there_is(run, monkeypatch, tmp_path):
    def interrupted(_):
        yield {"type": "progress", "what": "waiting"}
        raise KeyboardInterrupt

    stopped = claims.Claim("stopped", "nowhere", "it never ends", interrupted, 1)
    equations = next(claim for claim in claims.CLAIMS if claim.name == "equations")
    monkeypatch.setattr(claims, "CLAIMS", (equations, stopped))
    code, _, err = run("reproduce", "--json", tmp_path / "some.json")
    assert (code, "ended early" in err) == (130, True)
    assert [claim["name"] for claim in json.loads((tmp_path / "some.json").read_text())["claims"]] == ["equations"]


SLOW_CLAIM = """
import sys, time
from flashpoint import cli
from flashpoint_kernels.reproduction import claims

def endless(_):
    yield {"type": "progress", "what": "waiting"}
    time.sleep(600)

equations = next(claim for claim in claims.CLAIMS if claim.name == "equations")
claims.CLAIMS = (equations, claims.Claim("endless", "nowhere", "it never ends", endless, 1))
sys.exit(cli.main(["reproduce", "--json", sys.argv[1]]))
"""


@contextlib.contextmanager
def with_signals():
    """Start processes that Ctrl-C ends: the shell of a background job has told this one to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_claim_is_printed_as_soon_as_it_is_known_and_kept_when_a_signal_ends_the_command(tmp_path, signum, code):
    """The reader of stdout has the first claim while the second one runs; then the signal comes."""
    program = [sys.executable, "-c", SLOW_CLAIM, tmp_path / "some.json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with with_signals(), subprocess.Popen(program, **pipes) as running:
        shown = []
        for line in running.stdout:
            shown.append(line)
            if line.startswith("  how "):
                break
        for line in running.stderr:
            if line.startswith("  waiting"):
                break
        running.send_signal(signum)
        try:
            _, err = running.communicate(timeout=60)
        finally:
            running.kill()
    assert running.returncode == code, err
    assert "2 claims: about 1 min on two idle cores, at most 2 min" in "".join(shown)
    assert any(line.startswith("equations  PASS") for line in shown)
    assert "ended early" in err
    assert [claim["name"] for claim in json.loads((tmp_path / "some.json").read_text())["claims"]] == ["equations"]


def words(text):
    return set(text.replace("\n", " ").split())


@pytest.mark.parametrize("width", [140, 80, 60])
def test_claims_break_between_words(width):
    results = Path(__file__).parents[3] / "benchmarks/results/reproduce-intel-r-xeon-r-processor.json"
    claims = json.loads(results.read_text())["claims"]
    text = "\n".join(line.plain for claim in claims for line in reproduce._lines(claim, width))
    assert max(map(len, text.splitlines())) <= width
    expected = {
        word for claim in claims for name in ("name", "claim", "measured", "how") for word in claim[name].split()
    }
    assert expected <= words(text)
