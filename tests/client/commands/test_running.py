"""Commands check their output files before they start, and print nothing but JSON with `--json -`."""

import json
import os
import pty
import subprocess
import sys
import typing
from pathlib import Path

import numpy as np
import pytest

import flashpoint
from flashpoint.commands import running
from flashpoint.commands.app import CommandError
from tests.support.verify_answers import says

GRID = ("--q-len", "64", "--head-dim", "16")


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
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)  # simulated, as root could write anywhere
    code, _, err = run("info", "--json", tmp_path / "info.json")
    assert (code, err) == (2, f"flashpoint info: --json: {tmp_path / 'info.json'} cannot be written: no permission\n")


def test_json_alone_on_stdout(run, scripted):
    scripted.script.append(says({"version": "1", "device": None, "versions": {}, "options": {}}))
    code, out, err = run("info", "--url", scripted.url, "--json", "-")
    assert (code, json.loads(out)["version"]) == (0, "1")
    assert "not known yet" in err
    assert "KV caches" not in err


def test_what_is_missing_says_what_to_install(monkeypatch):
    class WithoutTorch:
        def load(self):
            raise ModuleNotFoundError(name="torch")

    monkeypatch.setattr(running, "entry_points", lambda **_: [WithoutTorch()])
    with pytest.raises(CommandError, match="needs torch, which is not installed on this machine") as caught:
        running.local("verify")
    assert caught.value.hint.startswith("install it with: pip install '.[server]' in a checkout")
    assert "--url" in caught.value.hint


def test_every_stage_of_a_verification_has_words():
    stage = flashpoint.VerifyProgress.model_fields["stage"].annotation
    assert set(running.STAGES) == set(typing.get_args(stage))


def test_progress_is_shown_on_a_terminal_to_the_end_of_a_wrong_answer(tmp_path):
    """A wrong answer adds a stage, the search for causes; this stage must also have a progress text."""
    pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")
    q = np.random.default_rng(0).standard_normal((1, 1, 9, 16), np.float32)
    case = flashpoint.save_case(tmp_path / "case.safetensors", q=q, k=q, v=q, o=q, causal=True)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "flashpoint", "verify", case]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while part := read_terminal(ours):
            shown += part
    assert (process.returncode, b"Traceback" in shown, b"FAIL" in shown) == (1, False, True), shown.decode()


def read_terminal(descriptor):
    """Return the next bytes of a terminal, or b"" if all processes have closed it, which Linux reports as EIO."""
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:
        return b""
