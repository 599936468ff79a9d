"""`--help` lists the commands, and truncates no text in a narrow terminal."""

import pytest

from flashpoint.commands import app
from flashpoint.commands.registry import COMMANDS


def test_help_lists_the_commands(run):
    for arguments in (["--help"], ["-h"], ["help"]):
        code, out, _ = run(*arguments)
        assert code == 0
        assert out.startswith("usage: flashpoint COMMAND")
        for name, command in COMMANDS.items():
            assert f"  {name.ljust(9)}" in out
            assert " ".join(command.about.split()) in " ".join(out.split())


@pytest.mark.parametrize("width", ["40", "80", "200"])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_cuts_nothing_short(run, monkeypatch, command, width):
    monkeypatch.setenv("COLUMNS", width)
    code, out, _ = run(command, "--help")
    assert code == 0
    for param in app.load(command).params:
        for name in (*param.opts, *param.secondary_opts):
            assert not name.startswith("-") or name in out
        assert " ".join(param.help.split()) in " ".join(out.split())
    assert "\n  flashpoint " in out
    assert max(len(line) for line in out.splitlines() if not line.startswith("  ")) <= max(50, int(width))
