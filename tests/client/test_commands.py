"""`flashpoint verify`, `benchmark` and `info` send, show and write the right data and return the right exit codes."""

import json
import os
from pathlib import Path

import pytest

import flashpoint
from flashpoint.commands import running
from flashpoint.commands.app import CommandError
from flashpoint.commands.terminal.tables import count, number, size
from tests.support.proof_answers import EVENTS, JOB, REPORT, ROW, says, streams

GRID = ("--q-len", "64", "--head-dim", "16")
MEASURED = ROW | {
    "ms": 1.25, "ms_p20": 1.0, "ms_p80": 2.0, "tflops": 0.5, "speedup_over_naive": 3.5, "peak_bytes": 2e6,
    "flops": 33_554_432, "bytes": 999_600, "roofline_percent": 407.0, "threads": 1, "busy": True,
    "peak_bytes_low": True, "ms_by_threads": {"1": 1.25, "2": 24.3}, "waited": 0.6,
}  # fmt: skip


def test_every_command_helps_with_examples(run):
    for command in ("verify", "benchmark", "info"):
        code, out, _ = run(command, "--help")
        assert code == 0
        assert f"  flashpoint {command} " in out
        assert "Exit codes: 0 right, 1 wrong or failed, 2 called wrongly" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("benchmark", "--q-len", "64"), "--q-len, --head-dim: give both for a grid, or give a --preset"),
        (("benchmark", "--q-len", "x", "--head-dim", "16"), "--q-len: must be integers, with a comma between two"),
        (
            ("benchmark", "--q-len", "64,,128", "--head-dim", "16"),
            "--q-len: must be integers, with a comma between two",
        ),
        (("benchmark", "--preset", "papers", "--q-len", "3"), "--preset: has its own shapes"),
        (("benchmark", "--preset", "papers", "--batch", "2"), "--preset: has its own shapes"),
        (("benchmark", *GRID, "--dtype", "int8"), "--dtype"),
        (("benchmark", *GRID, "--preset", "papers"), "--preset: has its own shapes"),
        (("benchmark", "--preset", "papers", "--dtype", "float16"), "the preset has its own dtypes"),
        (("benchmark", *GRID, "--plot", "a.gif"), ".svg or .png"),
        (("benchmark", *GRID, "--nonsense"), "--nonsense: unknown option"),
        (("info", "--url", "localhost:18100"), "url: must begin with http:// or https://"),
        (("info", "--url", "http://localhost:18100", "--timeout", "1e9"), "timeout: must be a number of seconds"),
        (("verify", "--q-len", "8"), "or give a FILE"),
        (("verify", "no-such-file"), "no-such-file"),
    ],
)
def test_what_is_called_wrongly_ends_with_2(run, arguments, message):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize("option", ["--json", "--plot"])
@pytest.mark.parametrize("command", ["verify", "benchmark"])
@pytest.mark.parametrize("path", ["missing/a.svg", "file/a.svg", "folder.svg"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(run, tmp_path, monkeypatch, option, command, path):
    def work(*_):
        raise AssertionError("the work has started")

    monkeypatch.setattr("flashpoint.commands.running.local", lambda _: work)
    (tmp_path / "file").touch()
    (tmp_path / "folder.svg").mkdir()
    code, out, err = run(command, *GRID, option, tmp_path / path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"flashpoint {command}: {option}: {tmp_path / path} ")


def test_a_file_in_a_folder_that_may_not_be_written_is_refused(run, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)  # root may write everywhere
    code, _, err = run("info", "--json", tmp_path / "info.json")
    assert (code, err) == (2, f"flashpoint info: --json: {tmp_path / 'info.json'} cannot be written: no permission\n")


def test_a_server_that_is_not_there_ends_with_3(run, scripted):
    scripted.script.extend([lambda h: h.problem(503, Retry_After="61")] * 9)
    code, out, err = run("info", "--url", scripted.url, "--timeout", "60")
    assert (code, out) == (3, "")
    assert err.startswith("flashpoint info: 503 some_code")


def test_a_refusal_ends_with_2_and_a_fault_with_1(run, scripted):
    for status, expected in ((422, 2), (401, 2), (413, 2), (500, 1)):
        scripted.script.append(lambda h, status=status: h.problem(status))
        assert run("verify", "--q-len", "8", "--head-dim", "4", "--url", scripted.url)[0] == expected


def test_a_benchmark_of_a_server_is_shown_written_and_drawn(run, scripted, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHPOINT_API_KEY", "secret")
    events = [*EVENTS[:2], {"id": 3, "kind": "row", "done": 1, "total": 2, "row": MEASURED}, *EVENTS[3:]]
    scripted.script.extend([says(JOB, 202), says(JOB | {"rows": [MEASURED]}), streams(events)])
    code, out, err = run(
        "benchmark", *GRID, "--causal", "both", "--backend", "tiled,naive", "--url", scripted.url,
        "--json", tmp_path / "all.json", "--plot", tmp_path / "some.svg", "--kind", "all", "--theme", "dark",
    )  # fmt: skip
    assert (code, err.count("no picture of")) == (0, 2)
    assert "forward · float32 · B 1 H 2/1 N 128 D 64" in out
    assert "~*1.25  1.00 – 2.00        1      500" in out
    assert "<1.91 MiB" in out
    assert "* busy: other programs used the cores" in out
    assert "< memory below what the algorithm must hold" in out
    assert "33.6 M" in out
    assert "!407" in out
    assert "~ noisy: p20 and p80" in out
    assert "! above the measured roof" in out
    assert "tiled skipped: too large" in out
    assert err.startswith("1/2 forward · float32 · B 1 H 2/1 N 128 D 64 · tiled\n2/2 ")
    job = flashpoint.BenchmarkJob.model_validate_json((tmp_path / "all.json").read_text())
    assert [row.skipped for row in job.rows] == [None, "too large"]
    assert (job.rows[0].busy, job.rows[0].peak_bytes_low) == (True, True)
    assert job.rows[0].ms_by_threads == {"1": 1.25, "2": 24.3}
    pictures = sorted(path.name for path in tmp_path.glob("*.svg"))
    assert pictures == ["some-memory.svg", "some-speedup.svg", "some-time.svg"]
    sent = flashpoint.BenchmarkRequest.model_validate_json(scripted.requests[0][3])
    assert (sent.causal, sent.backends, sent.shapes[0].q_len) == ((False, True), ("tiled", "naive"), 64)
    assert {headers["Authorization"] for _, _, headers, _ in scripted.requests} == {"Bearer secret"}


@pytest.mark.parametrize("state", ["failed", "cancelled"])
def test_a_benchmark_that_did_not_end_well_ends_with_1(run, scripted, state):
    last = EVENTS[4] | {"state": state, "error": "no memory"}
    scripted.script.extend([says(JOB, 202), says(JOB), streams([*EVENTS[:3], last])])
    code, out, err = run("benchmark", *GRID, "--url", scripted.url)
    assert code == 1
    assert "N 128" in out
    assert f"no memory\nflashpoint benchmark: {state} after 1 of 2 cases" in err


def test_ctrl_c_cancels_at_the_server_and_keeps_what_there_is(run, scripted, monkeypatch):
    def interrupt(job, event):
        raise KeyboardInterrupt

    scripted.script.extend([says(JOB, 202), says(JOB), streams(EVENTS), says(JOB | {"state": "cancelled"})])
    from flashpoint.commands import benchmark

    monkeypatch.setattr(benchmark, "_progress", lambda: _Given(interrupt))
    assert run("benchmark", *GRID, "--url", scripted.url)[0] == 130
    assert scripted.requests[-1][:2] == ("DELETE", "/benchmark/j1")


class _Given:
    def __init__(self, value):
        self.value = value

    def __enter__(self):
        return self.value

    def __exit__(self, *_):
        return False


def test_json_alone_on_stdout(run, scripted):
    scripted.script.append(says({"version": "1", "device": None, "versions": {}, "options": {}}))
    code, out, err = run("info", "--url", scripted.url, "--json", "-")
    assert (code, json.loads(out)["version"]) == (0, "1")
    assert "not known yet" in err
    assert "KV caches" not in err


def test_info_says_what_caches_hold(run, scripted):
    usage = {"caches": 12, "bytes": 3 << 29, "limit_bytes": 4 << 30}
    scripted.script.append(says({"version": "1", "device": None, "versions": {}, "options": {}, "caches": usage}))
    code, out, _ = run("info", "--url", scripted.url)
    assert code == 0
    assert "12, 1.5 GiB; at most 4 GiB in each engine" in out


def test_a_verification_of_a_server_is_shown(run, scripted, tmp_path):
    scripted.script.extend([says(REPORT), says(REPORT | {"ok": False})])
    code, out, _ = run(
        "verify", "--q-len", "8", "--head-dim", "4", "--causal", "--window", "3,0", "--url", scripted.url,
        "--plot", tmp_path / "errors.png",
    )  # fmt: skip
    assert code == 0
    assert "✓ o" in out
    assert (tmp_path / "errors.png").read_bytes().startswith(b"\x89PNG")
    sent = flashpoint.VerifyRequest.model_validate_json(scripted.requests[0][3])
    assert (sent.causal, sent.window, sent.shape.q_len) == (True, (3, 0), 8)
    assert run("verify", "--q-len", "8", "--head-dim", "4", "--url", scripted.url)[0] == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (0.0, "0"),
        (float("nan"), "nan"),
        (12345.6, "12,346"),
        (99.4, "99.4"),
        (0.5, "0.500"),
        (1e-5, "1.0e-05"),
    ],
)
def test_numbers_have_three_digits(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("count", "text"), [(None, ""), (512, "512 B"), (1536, "1.5 KiB"), (1023 << 20, "1,023 MiB"), (2 << 30, "2.0 GiB")]
)
def test_sizes_have_their_unit(count, text):
    assert size(count) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, ""), (12, "12"), (1234, "1.23 k"), (2.1e12, "2.1 T"), (3e17, "300 P")]
)
def test_counts_are_short(value, text):
    assert count(value) == text


def test_what_is_missing_says_what_to_install(monkeypatch):
    class WithoutTorch:
        def load(self):
            raise ModuleNotFoundError(name="torch")

    monkeypatch.setattr(running, "entry_points", lambda **_: [WithoutTorch()])
    with pytest.raises(CommandError, match="needs torch, which is not installed on this machine") as caught:
        running.local("verify")
    assert caught.value.hint.startswith("install it with: pip install '.[server]' in a checkout")
    assert "--url" in caught.value.hint
