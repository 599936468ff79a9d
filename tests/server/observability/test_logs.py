"""Probes are logged at level debug, a console format is for people, and any text can be logged."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.conftest import DEVICE
from tests.support.gated import PROGRAM
from tests.support.messages import ask


def test_probes_are_logged_at_debug_alone(server, gated):
    probes = ("/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready", "/v2/models/attention/ready")
    names = [f"probe-{number}-{os.urandom(4).hex()}" for number in range(len(probes))]
    for target in (server, gated.server):
        for path, name in zip(probes, names, strict=True):
            assert ask(target, path, x_request_id=name).status == 200
    levels = [gated.server.wait_for_request(name)["level"] for name in names]
    assert levels == ["debug"] * len(probes)
    last = f"after-{os.urandom(4).hex()}"
    ask(server, "/info", x_request_id=last)
    assert server.wait_for_request(last)["level"] == "info"
    assert not [line for line in server.lines if line.get("request_id") in names]


def test_a_start_that_a_person_reads_ends_with_where_the_page_is():
    command = [sys.executable, *PROGRAM, "--port=0", f"--device={DEVICE}", "--log-format=console"]
    lines = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            while not (lines and "Open " in lines[-1]):
                lines.append(process.stderr.readline())
                assert lines[-1], "the server has ended"
        finally:
            process.terminate()
    (port,) = re.findall(r"port=(\d+)", "".join(lines))
    assert re.search(rf"\] Open http://localhost:{port} ", lines[-1])
    assert len([line for line in lines if "] ready " in line]) == 1
    assert max(map(len, lines)) < 400


LONE = """
import logging, os
import structlog
from flashpoint_server.observability import logs

logs.configure("json", "info")
name = os.fsdecode(b"FLASHPOINT_\\xff")
structlog.stdlib.get_logger("test").info("no such setting", name=name, names=[name], by={name: 1}, rate=float("nan"))
logging.getLogger("library").warning("about %s", name)
"""


def test_text_that_is_not_unicode_is_escaped():
    """A text with a lone surrogate can be logged: Python reads a non-UTF-8 byte of a variable's name as one."""
    ran = subprocess.run([sys.executable, "-c", LONE], capture_output=True, timeout=60, check=True)
    ours, theirs = (json.loads(line, parse_constant=pytest.fail) for line in ran.stderr.splitlines())
    name = os.fsdecode(b"FLASHPOINT_\xff")
    assert (ours["name"], ours["names"], ours["by"], ours["rate"]) == (name, [name], {name: 1}, None)
    assert theirs["event"] == f"about {name}"
