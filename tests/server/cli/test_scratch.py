"""The temporary directory of a killed process is removed by a later process, and that of a running one stays."""

import subprocess
import sys
import tempfile

from flashpoint_server.cli import scratch

OWNER = """
import sys
from flashpoint_server.cli.scratch import directory
with directory() as path:
    (path / "file").touch()
    print(path, flush=True)
    sys.stdin.read()
"""


def test_a_killed_process_directory_is_removed_and_a_living_one_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "other").mkdir()
    for name in ("flashpoint-peers", "flashpoint-serve-file"):
        (tmp_path / name).touch()
    (tmp_path / "flashpoint-serve-link").symlink_to(tmp_path / "other")
    before = set(tmp_path.iterdir())

    def content():
        scratch.remove_left()
        return set(tmp_path.iterdir()) - before

    command = [sys.executable, "-c", OWNER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as killed, subprocess.Popen(command, **pipes) as ended:
        assert len({process.stdout.readline() for process in (killed, ended)}) == 2
        assert len(content()) == 2
        killed.kill()
        killed.wait()
        (left,) = content()
        assert {path.name for path in left.iterdir()} == {"file"}
        ended.stdin.close()
        assert ended.wait() == 0
        assert content() == set()
    assert before == set(tmp_path.iterdir())
