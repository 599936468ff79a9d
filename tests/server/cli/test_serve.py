"""`flashpoint serve` ends with a reason if it cannot start, and warns of misspelt variables."""

import json
import os
import subprocess
import sys

import pytest

from flashpoint_server.cli import serve


@pytest.mark.slow
def test_a_wrong_start_ends_with_a_reason_for_a_person():
    ended = start("--port", "70000")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "--port: " in ended.stderr


def test_a_variable_that_is_nearly_a_setting_is_warned_of(server):
    """A variable with a misspelt setting causes a warning. Then the server ends, because its port is in use."""
    variables = {
        "FLASHPOINT_QEUE_LIMIT": "1",
        "FLASHPOINT_API_KEY": "a-client-s",
        "FLASHPOINT_PORT_8000_TCP": "tcp://x",
    }
    ended = start("--port", str(server.port), **variables)
    assert (ended.returncode, ended.stdout) == (1, "")
    *warned, last = map(json.loads, ended.stderr.splitlines())
    warnings = [(line["variable"], line["perhaps"]) for line in warned if line["event"] == "unknown setting"]
    assert warnings == [("FLASHPOINT_QEUE_LIMIT", "FLASHPOINT_QUEUE_LIMIT")]
    assert last["event"] == "cannot listen"


@pytest.mark.slow
def test_a_server_whose_device_is_not_there_ends_with_a_reason():
    ended = start("--log-format", "console", "--port", "0", "--device", "cuda:9")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "listening" in ended.stderr
    assert "no CUDA device" in ended.stderr


def start(*flags, **variables):
    """Run `flashpoint serve` with these flags and variables until it ends by itself; return the finished process."""
    command = [sys.executable, "-m", "flashpoint_server.cli.serve", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **variables})


def test_without_keys_others_are_served_by_choice_alone(capsys, monkeypatch):
    """Without API keys, a server on a public address refuses to start, and names the remedies.

    It refuses before it opens a socket: no machine has the address of this test, 192.0.2.1.
    """
    host = ["--host", "192.0.2.1", "--port", "0"]
    assert serve.main(host) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("flashpoint serve: --host: other machines can reach 192.0.2.1")
    for way in ("--api-keys-file", "--tls-client-ca", "--insecure", "FLASHPOINT_INSECURE=true", "--host 127.0.0.1"):
        assert way in errors
    chosen = []
    monkeypatch.setattr("flashpoint_server.cli.serve.run", lambda settings: chosen.append(settings.insecure) or 0)
    monkeypatch.setattr("flashpoint_server.observability.logs.configure", lambda *_: None)
    assert serve.main([*host, "--insecure"]) == 0
    monkeypatch.setenv("FLASHPOINT_INSECURE", "true")
    assert serve.main(host) == 0
    assert chosen == [True, True]


def test_without_its_extra_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "grpc", None)
    assert serve.main(["--grpc-port=0"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "pip install '.[grpc]'" in printed.err
