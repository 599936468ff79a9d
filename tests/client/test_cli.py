"""`flashpoint COMMAND`: how it finds and runs a command, and what it says where there is none."""

import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import flashpoint
from flashpoint import cli

FLASHPOINT = Path(sys.executable).parent / "flashpoint"
CAPACITY = ("--tflops", "1", "--network-gbit", "1", "--q-len", "8", "--head-dim", "8")


def test_help_lists_the_commands_that_are_installed(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "\n  serve      starts a server\n" in out
    assert out.startswith("usage: flashpoint COMMAND")


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"flashpoint {flashpoint.__version__}\n"


def test_no_command_and_an_unknown_one_say_what_there_is(capsys):
    for arguments in ([], ["sevre"]):
        assert cli.main(arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "\n  serve      starts a server\n" in err
    assert err.startswith("flashpoint: no command 'sevre'")


def brought_by_a_package(tmp_path, monkeypatch, text):
    """An installed package whose entry point is the command `greet`."""
    (tmp_path / "greeter.py").write_text(text)
    about = tmp_path / "greeter-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: greeter\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[{cli.GROUP}]\ngreet = greeter:greet\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "greeter", raising=False)


def test_a_command_gets_its_arguments_and_gives_the_exit_code(tmp_path, monkeypatch, capsys):
    brought_by_a_package(tmp_path, monkeypatch, "def greet(argv):\n    print(argv)\n    return len(argv)\n")
    assert cli.main(["greet", "--loud", "you"]) == 2
    assert cli.main(["greet"]) == 0
    assert capsys.readouterr().out == "['--loud', 'you']\n[]\n"


def test_a_command_that_lacks_a_package_says_what_to_install(tmp_path, monkeypatch, capsys):
    brought_by_a_package(tmp_path, monkeypatch, "import no_such_package.part\n")
    assert cli.main(["greet"]) == 2
    error = capsys.readouterr().err
    assert (
        error == "flashpoint greet needs no_such_package, which is not installed: pip install 'flashpoint[greeter]'\n"
    )


def test_every_command_of_ours_names_an_extra_and_says_what_it_does():
    points = cli.entry_points(group=cli.GROUP)
    for point in points:
        assert isinstance(point, EntryPoint)
        assert point.module.partition(".")[0] in cli._EXTRAS
    assert set(cli._ABOUT) == {point.name for point in points}


def test_help_that_nobody_reads_is_no_error(monkeypatch):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert cli.main(["--help"]) == 1


@pytest.mark.parametrize(
    ("arguments", "unbuffered"),
    [
        (["capacity", *CAPACITY, "--json", "-"], ""),
        pytest.param(["--help"], "1", marks=pytest.mark.slow),
        pytest.param(["--help"], "", marks=pytest.mark.slow),
        pytest.param(["--version"], "", marks=pytest.mark.slow),
        pytest.param(["--version"], "1", marks=pytest.mark.slow),
        pytest.param(["capacity", *CAPACITY, "--json", "-"], "1", marks=pytest.mark.slow),
    ],
)
def test_a_reader_that_has_read_enough_is_no_error(arguments, unbuffered):
    read, write = os.pipe()
    os.close(read)
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(
        [FLASHPOINT, *arguments], stdout=write, stderr=subprocess.PIPE, text=True, env=environment, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr.count("Traceback"), done.stderr.count("BrokenPipe")) == (1, 0, 0)
