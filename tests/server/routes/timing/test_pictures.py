"""Plots wait in a line of their own: callers who have left have no place in it, and it delays no other call."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

from tests.support.messages import JSON, ask, post, problem
from tests.support.plot_rows import ROWS, job
from tests.support.servers import wait_for
from tests.support.sockets import connect

SMALL = b'{"q":[[1.0]],"k":[[1.0]],"v":[[1.0]]}'


@pytest.fixture(scope="module")
def drawn(start_server):
    """Return a server, and the path of a plot of a benchmark that has ended."""
    server = start_server(queue_limit=8)
    grid = {"shapes": [{"q_len": 8, "head_dim": 8}], "dtypes": ["float32"], "directions": ["forward"]}
    path = f"/benchmark/{post(server, '/benchmark', json.dumps(grid).encode(), JSON).json['id']}"
    wait_for(lambda: ask(server, path).json["state"] == "done", lambda: ask(server, path).json)
    return server, f"{path}/plot.svg"


def inside(server):
    return server.get("/info")[1]["load"]["requests"]


@contextlib.contextmanager
def waiting(server, count, request):
    """Send requests that wait inside the block. Their callers leave at its end, and so do the requests."""
    before = inside(server)
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(connect(server)).sendall(request)
        wait_for(lambda: inside(server) == before + count, lambda: inside(server))
        yield
    wait_for(lambda: inside(server) == before, lambda: inside(server))


def test_plots_wait_apart_and_leave_with_their_callers(drawn):
    """While they wait, they count as requests and their deadline holds, and small JSON is answered."""
    server, path = drawn
    others = set(server.children("formats.codec_process"))
    assert ask(server, path).status == 200
    (pid,) = set(server.children("formats.codec_process")) - others
    os.kill(pid, signal.SIGSTOP)
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    with waiting(server, 7, request):
        assert post(server, "/attention", SMALL, JSON).status == 200
        problem(ask(server, path, x_timeout_ms=50), 504, "deadline_exceeded")
        for _ in range(3):
            with waiting(server, 1, request):
                problem(ask(server, path), 429, "queue_full")
    # The stopped process was ended, because nobody waited for its call.
    wait_for(lambda: pid not in server.children("formats.codec_process"), lambda: "it is still there")
    assert ask(server, path).status == 200


def test_json_leaves_with_its_caller_while_it_waits(drawn):
    server, _ = drawn
    assert post(server, "/attention", SMALL, JSON).status == 200
    fields = f"Host: localhost\r\nContent-Type: {JSON}\r\nContent-Length: {len(SMALL)}\r\n\r\n"
    processes = server.children("formats.codec_process")
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    request = f"POST /attention HTTP/1.1\r\n{fields}".encode() + SMALL
    with waiting(server, 7, request):
        for _ in range(3):
            with waiting(server, 1, request):
                problem(post(server, "/attention", SMALL, JSON), 429, "queue_full")
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    assert post(server, "/attention", SMALL, JSON).status == 200


def test_a_plot_needs_no_writable_folder():
    """The process may write to no file, has no home, and prints nothing else."""
    program = """
import resource, sys, tempfile
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
from flashpoint_server.routes.timing.pictures import draw
job = sys.stdin.read()
for _ in range(2):
    picture = draw(job, "time", "svg", "light")
try:
    tempfile.mkdtemp()
except OSError:
    sys.stdout.buffer.write(picture)
"""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "MPL", "COV"))}
    drawn = subprocess.run(
        [sys.executable, "-c", program], input=job(ROWS).model_dump_json().encode(), capture_output=True,
        env=variables | {"HOME": "/dev/null"}, check=False,
    )  # fmt: skip
    assert (drawn.returncode, drawn.stdout[:5], b"Error" in drawn.stderr) == (0, b"<?xml", False), drawn.stderr
