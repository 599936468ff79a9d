"""`--help` lists the commands, and truncates no text in a narrow terminal."""

import shlex

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


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_a_terminal_of_80_columns(run, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(*command.split(), "--help")
    assert [line for line in out.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_shell_reads_the_examples_of_a_narrow_terminal_as_those_of_a_wide_one(run, monkeypatch, command):
    read = []
    for width in ("60", "120"):
        monkeypatch.setenv("COLUMNS", width)
        _, out, _ = run(command, "--help")
        lines = out[out.index("Examples:\n") :].replace("\\\n", "").split("\n\n")[0].splitlines()[1:]
        read.append([shlex.split(line, comments=True) for line in lines])
    assert read[0] == read[1]
    assert all("flashpoint" in words for words in read[0])
