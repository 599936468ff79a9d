"""A server that cannot start prints the reason and the remedy in one line."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

FLASHPOINT = Path(sys.executable).parent / "flashpoint"


def serve(*flags):
    done = subprocess.run(
        [FLASHPOINT, "serve", "--log-format", "json", *flags], capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr
    return done.returncode, [json.loads(line) for line in done.stderr.splitlines()]


@pytest.mark.parametrize(
    ("flags", "error", "advice"),
    [
        (["--port", "{taken}"], "port {taken} is in use by another program", "set --port (FLASHPOINT_PORT) to another"),
        (["--host", "no-such-host.invalid"], "the host name 'no-such-host.invalid' has no address", "set --host"),
        (["--host", "192.0.2.1", "--insecure"], "192.0.2.1 is no address of this machine", "127.0.0.1"),
    ],
)
def test_a_port_or_host_that_cannot_be_used(flags, error, advice):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, lines = serve(*("--port", "0") if "--port" not in flags else (), *(f.format(taken=port) for f in flags))
    (line,) = lines
    assert (code, line["event"], line["error"]) == (1, "cannot listen", error.format(taken=port))
    assert advice in line["advice"]


def test_a_port_that_needs_permission(monkeypatch):
    from flashpoint_server.cli.serving import _why

    error = _why(PermissionError(13, "Permission denied"), "127.0.0.1", 80, "--port")
    assert error["error"] == "this user may not listen on port 80"
    assert "1024" in error["advice"]


@pytest.mark.slow
def test_a_device_that_is_not_there_is_one_sentence():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code, lines = serve("--port", "0", "--device", "cuda")
    sentence = "device cuda is not available: torch finds no CUDA device; set --device cpu"
    assert code == 1
    assert [line["error"] for line in lines if line["event"] == "broken"] == [sentence]
    assert [line["reason"] for line in lines if line["event"] == "failed"] == [sentence]
    assert all("exception" not in line for line in lines)
