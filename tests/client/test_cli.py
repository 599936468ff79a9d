import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import flashpoint
from flashpoint import cli

FLASHPOINT = Path(sys.executable).parent / "flashpoint"


def flashpoint_command(*arguments):
    return subprocess.run([FLASHPOINT, *arguments], capture_output=True, text=True)


def test_help_lists_the_commands_that_are_installed():
    done = flashpoint_command("--help")
    assert done.returncode == 0
    assert "\n  serve\n" in done.stdout
    assert done.stdout.startswith("usage: flashpoint COMMAND")


def test_version():
    done = flashpoint_command("--version")
    assert (done.returncode, done.stdout) == (0, f"flashpoint {flashpoint.__version__}\n")


def test_no_command_and_an_unknown_one_say_what_there_is():
    for arguments in ([], ["sevre"]):
        done = flashpoint_command(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert "\n  serve\n" in done.stderr
    assert done.stderr.startswith("flashpoint: no command 'sevre'")


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


def test_every_command_of_ours_names_an_extra():
    for point in cli.entry_points(group=cli.GROUP):
        assert isinstance(point, EntryPoint)
        assert point.module.partition(".")[0] in cli._EXTRAS
