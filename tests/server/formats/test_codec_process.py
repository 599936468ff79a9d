"""At a request's deadline, the server stops waiting for the JSON process, which can then serve other requests."""

import os
import signal

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

from tests.support.messages import JSON, post, problem, small

GOOD = small()


def test_a_deadline_that_passes_while_the_answer_is_written_as_json_is_504(server):
    """If the deadline passes while the JSON process is stopped by SIGSTOP, the answer is 504."""
    assert post(server, "/attention", GOOD, accept=JSON).status == 200  # starts the JSON process
    codec = server.json_pid
    os.kill(codec, signal.SIGSTOP)
    try:
        problem(post(server, "/attention", GOOD, accept=JSON, x_timeout_ms=200), 504, "deadline_exceeded")
    finally:
        os.kill(codec, signal.SIGCONT)
    assert post(server, "/attention", GOOD, accept=JSON).status == 200
