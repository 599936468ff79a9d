"""Several HTTP processes serve one port and share limits. If one dies, the others continue, and it is replaced."""

import contextlib
import os
import signal
import subprocess

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import psutil

from tests.support.messages import post, problem, read_metrics, small
from tests.support.servers import wait_for
from tests.support.sockets import segments, send

SMALL = small()


@pytest.mark.slow
def test_several_workers_on_one_port_survive_each_others_death(start_server):
    server = start_server(workers=2)
    wait_for(lambda: len(server.children("cli.worker")) == 2, lambda: "two workers")
    engine, (victim, other) = server.engine_pid, server.children("cli.worker")
    expected = post(server, "/attention", SMALL).body
    answered = 'flashpoint_ended_total{how="answered"}'  # the sum over all workers, including the dead one
    wait_for(lambda: read_metrics(server).get(answered) == 1, lambda: "the first answer is not counted")
    os.kill(victim, signal.SIGKILL)
    server.wait_for_line(lambda line: line["event"] == "lost" and line["pid"] == victim)
    for _ in range(8):
        assert post(server, "/attention", SMALL).body == expected
    wait_for(lambda: len(set(server.children("cli.worker")) - {victim, other}) == 1, lambda: "another worker")
    assert server.engine_pid == engine
    assert not psutil.pid_exists(victim)
    wait_for(lambda: read_metrics(server)[answered] == 9, lambda: "answers are not counted")
    assert read_metrics(server)["flashpoint_accepted_total"] == 9
    wait_for(lambda: read_metrics(server)["flashpoint_queue_requests"] == 0, lambda: "requests that never leave")
    wait_for(lambda: len(segments(engine)) <= 2, lambda: "the engine keeps a dead worker's memory")
    family = [server.engine_pid, *server.children("cli.worker")]
    server.stop()
    assert not any(psutil.pid_exists(pid) for pid in family)


@pytest.mark.slow
def test_limits_hold_over_all_workers_and_a_dead_one_has_nothing_inside(start_server):
    """With queue_limit=1, a request that lacks its last byte fills the queue of both workers until its worker dies."""
    server = start_server(workers=2, queue_limit=1)
    wait_for(lambda: workers_ready(server) == 2, lambda: f"{workers_ready(server)} of two workers are ready")
    with send(server, SMALL[:-1], length=len(SMALL)) as unsent:
        wait_for(lambda: server.get("/info")[1]["load"]["requests"] == 1, lambda: "it never comes inside")
        for _ in range(16):
            answer = post(server, "/attention", SMALL)
            assert problem(answer, 429, "queue_full")["detail"].startswith("the queue is full: it has 1 requests")
        (victim,) = [pid for pid in server.children("cli.worker") if connected_to(pid, unsent)]
        os.kill(victim, signal.SIGKILL)
        server.wait_for_line(lambda line: line["event"] == "lost" and line["pid"] == victim)
        wait_for(lambda: server.get("/info")[1]["load"] == {"requests": 0, "bytes": 0}, lambda: "it stays inside")
        assert post(server, "/attention", SMALL).status == 200


def workers_ready(server):
    """Return the number of HTTP processes that have logged that they are ready."""
    return len([line for line in list(server.lines) if line["event"] == "ready"])


def connected_to(pid, connection):
    """Return whether process `pid` has the server's end of this connection."""
    return connection.getsockname() in [c.raddr for c in psutil.Process(pid).net_connections() if c.raddr]


@pytest.mark.slow
def test_a_full_or_missing_folder_for_temporary_files_ends_no_process(start_server, tmp_path):
    """With a full disk, or without the folder, a killed HTTP process is replaced and no count is lost."""
    folder = tmp_path / "full"
    folder.mkdir()
    with full(folder):
        server = start_server(workers=2, environment={"TMPDIR": str(folder)})
        expected = post(server, "/attention", SMALL).body
        for _ in range(2):
            before = set(server.children("cli.worker"))
            for pid in before:
                os.kill(pid, signal.SIGKILL)
                server.wait_for_line(lambda line, pid=pid: line["event"] == "lost" and line["pid"] == pid)
            server.wait_ready()
            assert not before & set(server.children("cli.worker"))
            assert post(server, "/attention", SMALL).body == expected
        assert read_metrics(server)["flashpoint_accepted_total"] == 3
    folder.rmdir()
    for pid in server.children("cli.worker"):
        os.kill(pid, signal.SIGKILL)
    server.wait_ready()
    assert post(server, "/attention", SMALL).body == expected
    signals = [line for line in server.lines if line["event"] == "lost" and line["exit_code"] != -signal.SIGKILL]
    assert not signals


@contextlib.contextmanager
def full(folder):
    """Make a folder a full file system, if this user may mount; else one that the user may not write."""
    mounted = not subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", folder], check=False).returncode
    if mounted:
        with contextlib.suppress(OSError):
            (folder / "filled").write_bytes(bytes(1 << 20))
    else:
        folder.chmod(0o500)
    try:
        yield
    finally:
        if mounted:
            subprocess.run(["umount", folder], check=True)
        else:
            folder.chmod(0o700)
