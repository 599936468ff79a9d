"""`flashpoint` prints its version, and no traceback if Typer, a reader of stdout or a command is missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import flashpoint
from flashpoint import cli
from flashpoint.commands.registry import COMMANDS

FLASHPOINT = Path(sys.executable).parent / "flashpoint"
CAPACITY = ("--tflops", "1", "--network-gbit", "1", "--q-len", "8", "--head-dim", "8")


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version(capsys, flag):
    assert cli.main([flag]) == 0
    assert capsys.readouterr().out == f"flashpoint {flashpoint.__version__}\n"


def test_no_command_and_an_unknown_one_say_what_there_is(run):
    code, out, err = run()
    assert (code, out) == (2, "")
    assert COMMANDS["serve"].about in err
    assert run("sevre") == (2, "", "flashpoint: no command 'sevre'\n  hint: did you mean serve?\n")
    assert run("xyz") == (2, "", "flashpoint: no command 'xyz'\n  hint: flashpoint --help lists the commands\n")


def test_without_typer_the_command_says_what_to_install_and_its_version_is_there():
    program = "import sys; sys.modules['typer'] = None; from flashpoint.cli import main; sys.exit(main())"
    runs = [subprocess.run([sys.executable, "-c", program, name], capture_output=True, text=True, check=False)
             for name in ("info", "--version")]  # fmt: skip
    assert [each.returncode for each in runs] == [2, 0]
    assert runs[0].stderr.startswith(
        "flashpoint info: needs typer, which is not installed\n  hint: install it with: pip"
    )


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
