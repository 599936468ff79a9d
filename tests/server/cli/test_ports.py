"""A port has one owner: a second server fails at its start, and processes of the first one join it."""

import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading

import pytest

pytest.importorskip("grpc", reason="install the extra: pip install '.[grpc]'")

from flashpoint_server.cli import ports
from flashpoint_server.config.settings import Settings
from tests.support.servers import wait_for


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def joined(port):
    """Listen on a port as gRPC does in each HTTP process."""
    sock = socket.socket()
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        sock.setsockopt(socket.SOL_SOCKET, option, 1)
    sock.bind(("127.0.0.1", port))
    sock.listen()
    return sock


def test_a_reserved_port_has_one_owner_before_while_and_after_its_processes_listen():
    settings = Settings(grpc_port=free_port())
    with ports.reserve(settings):
        assert ports.reserve(settings) is None
        for _ in range(2):  # the second time, connections of the first are in TIME_WAIT
            with joined(settings.grpc_port) as one, joined(settings.grpc_port):
                assert ports.reserve(settings) is None
                assert ports.reserve(Settings(host="0.0.0.0", grpc_port=settings.grpc_port)) is None
                with socket.create_connection(("127.0.0.1", settings.grpc_port)):
                    one.setblocking(False)
                    with contextlib.suppress(BlockingIOError):  # the other one got it
                        one.accept()[0].close()
            assert ports.reserve(settings) is None
    with ports.reserve(settings):
        pass


def test_of_owners_that_start_together_one_gets_the_port():
    settings = Settings(grpc_port=free_port())
    for _ in range(100):
        owners, start = [], threading.Barrier(2)

        def own(owners=owners, start=start):
            start.wait()
            owners.append(ports.reserve(settings))

        threads = [threading.Thread(target=own) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(owner is not None for owner in owners) <= 1
        for owner in owners:
            if owner is not None:
                owner.close()


@pytest.mark.slow
def test_a_second_server_on_a_port_ends_with_a_sentence_and_the_first_one_answers(start_server):
    first = start_server(workers=2, grpc_port=0, ready=False)
    grpc = first.wait_for_line(lambda line: line["event"] == "listening for gRPC")["port"]
    for taken, *flags in (
        (grpc, "--workers=2", "--port=0", f"--grpc-port={grpc}"),
        (first.port, "--workers=1", f"--port={first.port}", "--grpc-port=0"),
    ):
        command = [sys.executable, "-m", "flashpoint_server.cli.serve", "--device=cpu", *flags]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert ended.returncode == 1, ended.stderr
        assert f"port {taken} is in use by another program" in ended.stderr
        assert "Traceback" not in ended.stderr
    victim, other = wait_for(lambda: len(pids := first.children("cli.worker")) == 2 and pids, lambda: "two workers")
    os.kill(victim, 9)
    wait_for(lambda: len(set(first.children("cli.worker")) - {victim, other}) == 1, lambda: "no new worker")
    listening = lambda: [line for line in list(first.lines) if line["event"] == "listening for gRPC"]  # noqa: E731
    wait_for(lambda: len(listening()) == 3, lambda: f"the new worker does not join: {first.lines[-5:]}")
    assert first.get("/health/live")[0] == 200


def test_a_port_that_needs_permission():
    error = ports.why(PermissionError(errno.EACCES, "Permission denied"), "127.0.0.1", 80, "--grpc-port")
    assert error["error"] == "this user may not listen on port 80"
    assert "1024" in error["advice"]
    assert "FLASHPOINT_GRPC_PORT" in error["advice"]
