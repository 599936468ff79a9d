"""A child process that dies is started again, and ends when its parent stops it."""

import asyncio

import psutil
import pytest

from flashpoint_server.processes import processes
from flashpoint_server.processes.processes import Child

PATIENCE = 240  # seconds; a longer wait is a hang


def test_a_child_that_dies_is_started_again_and_ends_when_it_is_told_to(tmp_path, monkeypatch):
    """A child that dies twice is started a third time.

    At each start it appends a letter to a file; the third process stays alive until it is stopped.
    """
    module = tmp_path / "dies_twice.py"
    module.write_text(
        "import pathlib, signal, sys\n"
        "notes = pathlib.Path(sys.argv[-1])\n"
        "notes.write_text(notes.read_text() + 'x')\n"
        "sys.exit(3) if len(notes.read_text()) < 3 else signal.pause()\n"
    )
    notes = tmp_path / "notes"
    notes.write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(processes, "FIRST_PAUSE", 0.005)  # seconds between two starts

    async def run():
        def fail(*_):
            raise KeyError("what is done at each start and end")

        child = Child("dies twice", "dies_twice", [str(notes)], [], ended=fail, started=fail)
        async with child.running(PATIENCE):
            async with asyncio.timeout(PATIENCE):
                while len(notes.read_text()) < 3 or child.starts < 3:  # noqa: ASYNC110  # another process's state
                    await asyncio.sleep(0.005)
            pid = child.pid
        assert not psutil.pid_exists(pid)

    asyncio.run(run())


@pytest.mark.slow
def test_an_engine_stores_ds_as_the_settings_of_its_server_say(start_server):
    server = start_server(environment={"FLASHPOINT_STORE_DS": "on"}, workspace_bytes="3MiB", device="cpu")
    environment = psutil.Process(server.engine_pid).environ()
    assert environment["FLASHPOINT_STORE_DS"] == "True"
    assert environment["FLASHPOINT_WORKSPACE_BYTES"] == str(3 << 20)
    environment = psutil.Process(start_server(device="cpu").engine_pid).environ()
    assert (environment["FLASHPOINT_STORE_DS"], environment["FLASHPOINT_WORKSPACE_BYTES"]) == ("False", str(1 << 30))
