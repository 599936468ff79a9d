"""SIGHUP ends no process of the service, and the service writes no temporary files."""

import os
import signal

import psutil
import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

from tests.support.messages import JSON, message, normal, post
from tests.support.servers import wait_for

SMALL = message({name: normal(2, 3) for name in "qkv"})


def hang_up(server):
    """Send SIGHUP to every process of a server, as a terminal does when it closes; return their process ids."""
    family = [server.pid, *(child.pid for child in psutil.Process(server.pid).children(recursive=True))]
    for pid in family:
        os.kill(pid, signal.SIGHUP)
    return family


def hang_ups(server):
    return len([line for line in server.lines if line["event"] == "nothing to read again"])


def test_sighup_without_anything_to_read_again_is_logged_and_changes_nothing(server):
    assert post(server, "/attention", SMALL, accept=JSON).status == 200  # starts the JSON process
    before = hang_ups(server)
    family = hang_up(server)
    assert len(family) >= 3
    wait_for(lambda: hang_ups(server) == before + 1, lambda: server.lines[-3:])
    assert post(server, "/attention", SMALL, accept=JSON).status == 200
    assert all(psutil.pid_exists(pid) for pid in family)
    assert server.get("/health/ready")[0] == 200


@pytest.mark.slow
def test_several_processes_outlast_sighup_and_write_no_files(start_server, tmp_path):
    server = start_server(workers=2, environment={"TMPDIR": str(tmp_path)})
    family = hang_up(server)
    wait_for(lambda: hang_ups(server) == 3, lambda: server.lines[-3:])
    assert all(post(server, "/attention", SMALL).status == 200 for _ in range(4))
    assert not [line for line in server.lines if line["event"] == "lost"]
    assert not list(tmp_path.iterdir())
    server.process.kill()
    assert server.wait_exit() == -signal.SIGKILL
    wait_for(lambda: not any(map(psutil.pid_exists, family)), lambda: f"left behind: {family}")
