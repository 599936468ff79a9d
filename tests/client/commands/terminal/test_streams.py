"""Commands write in every encoding of stdout, and end without a traceback if stdout is closed or full."""

import io
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from flashpoint import cli
from flashpoint.commands.registry import COMMANDS
from flashpoint.commands.terminal import streams
from tests.support.verify_answers import EVENTS, JOB, REPORT, ROW, ROW_FIGURES, SIZES, says
from tests.support.verify_answers import streams as streamed

ENCODINGS = ("ascii", "cp1252", "latin-1", "gbk", "cp437", "shift_jis", "utf-8", "utf-16")


@pytest.fixture
def terminal(monkeypatch):
    """Return `terminal(encoding, *arguments)`, which runs a command and returns (exit code, stdout, stderr)."""

    def terminal(encoding, *arguments):
        streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2)]
        with monkeypatch.context() as m:
            m.setattr(sys, "stdout", streams[0])
            m.setattr(sys, "stderr", streams[1])
            code = cli.main([str(each) for each in arguments])
        for each in streams:
            each.flush()
        return code, *(each.buffer.getvalue().decode(encoding) for each in streams)

    return terminal


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_command_writes_in_every_encoding(terminal, scripted, encoding):
    for command in COMMANDS:
        code, out, err = terminal(encoding, command, "--help")
        assert (code, f"flashpoint {command}" in out, err) == (0, True, "")
    row = ROW | ROW_FIGURES
    events = [*EVENTS[:2], {"id": 3, "kind": "row", "done": 1, "total": 2, "row": row}, *EVENTS[3:]]
    scripted.script.extend([says(JOB, 202), says(JOB), streamed(events), says(REPORT | {"ok": False})])
    code, out, err = terminal(encoding, "benchmark", *SIZES, "--url", scripted.url)
    assert (code, "1.25" in out, "128 D 64" in err) == (0, True, True)
    code, out, err = terminal(encoding, "verify", *SIZES, "--url", scripted.url)
    assert (code, "FAIL" in out, err) == (1, True, "")
    code, out, err = terminal(encoding, "capacity", *SIZES, "--tflops", "1", "--network-gbit", "1", "--load", "5")
    assert (code, "http process" in out, err) == (0, True, "")
    code, out, err = terminal(encoding, "verify", "Größe-Ω-\udcff.st")
    assert (code, out, "does not exist" in err) == (2, "", True)


def test_what_a_terminal_cannot_show_is_readable(terminal, scripted):
    scripted.script.append(says(REPORT))
    _, out, _ = terminal("ascii", "verify", *SIZES, "--url", scripted.url)
    assert "tiled - float32 - cpu" in out
    assert "\n+ o " in out
    assert streams.plain("3 × 4 µs … −∞ → é \U0001f600") == "3 x 4 us ... -inf -> \\xe9 \\U0001f600"


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_documents_on_stdout_are_whole_in_every_encoding(terminal, scripted, encoding, tmp_path):
    pytest.importorskip("pydantic_settings", reason="install the extra: pip install '.[server]'")
    info = {"version": "1 · é × Ω", "device": None, "versions": {}, "options": {}}
    scripted.script.append(says(info))
    _, out, _ = terminal(encoding, "info", "--url", scripted.url, "--json", "-")
    assert json.loads(out) == info
    keys = tmp_path / "Schlüssel-Ω-\U0001f600.toml"
    keys.write_text(f'[a]\nsha256 = "{"0" * 64}"\nrights = ["info"]\n')
    code, out, err = terminal(encoding, "config", "--api-keys-file", keys)
    assert (code, err) == (0, "")
    assert tomllib.loads(out.encode(encoding).decode("utf-8"))["api_keys_file"] == str(keys)


@pytest.mark.parametrize(
    "environment",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        pytest.param({"LC_ALL": "C"}, marks=pytest.mark.slow),
        pytest.param({"LC_ALL": "POSIX", "LANG": "de_DE.ISO-8859-1"}, marks=pytest.mark.slow),
        pytest.param({"PYTHONIOENCODING": "gbk:strict"}, marks=pytest.mark.slow),
    ],
)
def test_a_process_of_another_locale_ends_well(environment):
    done = subprocess.run(
        [Path(sys.executable).parent / "flashpoint", "benchmark", "--help"],
        env=os.environ | environment, capture_output=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"--q-len INT," in done.stdout


@pytest.mark.parametrize(
    ("command", "shell", "code", "says"),
    [
        ("--help", "2>&-", 0, ""),
        ("--help", ">&- 2>&-", 1, ""),
        ("--help", ">&-", 1, "stdout is closed"),
        ("config", ">&-", 1, "stdout is closed"),
        ("--version", ">&-", 1, "stdout is closed"),
        ("--help", "</dev/null >/dev/full", 1, "No space left"),
    ],
)
def test_a_closed_or_full_stdout_is_an_error_without_a_traceback(command, shell, code, says):
    flashpoint = Path(sys.executable).parent / "flashpoint"
    ran = f"{flashpoint} {command} {shell}"
    done = subprocess.run(ran, shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)
    assert says in done.stderr
