"""Several engines have one state, and a dead child process is restarted; no engine process runs."""

import asyncio

import psutil

from flashpoint_server.ipc.client import Engine, Engines, State
from flashpoint_server.processes import processes
from flashpoint_server.processes.processes import Child

PATIENCE = 240  # seconds; only ends a hang


def test_the_service_fails_only_when_all_engines_have_failed():
    engines = Engines()
    engines._engines = [Engine(name, engines._resume, engines._keep, []) for name in (b"a", b"b")]
    first, second = engines._engines
    first.state, first.failure = State.FAILED, "broken"
    assert (engines.state, engines.failure) == (State.STARTING, None)
    second.state = State.READY
    assert (engines.state, engines.failure) == (State.READY, None)
    second.state, second.failure = State.FAILED, "broken too"
    assert (engines.state, engines.failure) == (State.FAILED, "broken")


def test_a_child_that_dies_is_started_again_and_ends_when_it_is_told_to(tmp_path, monkeypatch):
    """The child writes a letter to a file at each start, and stays alive from the third start."""
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
        child = Child("dies twice", "dies_twice", [str(notes)], [])
        async with child.kept(PATIENCE):
            async with asyncio.timeout(PATIENCE):
                while len(notes.read_text()) < 3 or child.starts < 3:  # noqa: ASYNC110  # another process's state
                    await asyncio.sleep(0.005)
            pid = child.pid
        assert not psutil.pid_exists(pid)

    asyncio.run(run())
