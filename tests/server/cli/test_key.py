"""`flashpoint key` edits a key file atomically, keeps its comments, and shows no API key except a new one."""

import hashlib
import os
import re
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from flashpoint import cli
from flashpoint_server.access.keys import Keyring
from flashpoint_server.config import key_edits, key_file
from flashpoint_server.config.settings import Settings

FLASHPOINT = Path(sys.executable).parent / "flashpoint"


DRAWN = re.compile(r"fp_[\w-]{43}")


TEXT = f"""# Keys of the team

# Alice's laptop
[alice] # since May
sha256 = "{"a" * 64}"
rights = [
  "info",
  "attention",  # [not a header]
]

# Bob's [machine]
["bob"]
sha256 = "{"b" * 64}"
rights = ["metrics"]
concurrent = 3
# the end"""


@pytest.fixture
def run(capsys):
    def run(*arguments):
        code = cli.main(["key", *map(str, arguments)])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(TEXT)
    return path


def test_a_new_file_is_made_for_its_owner_alone(run, tmp_path):
    path = tmp_path / "keys.toml"
    old = os.umask(0)
    try:
        code, out, err = run("alice", "--file", path, "--rights", "info+metrics", "--concurrent", "2")
    finally:
        os.umask(old)
    assert (code, err) == (0, "the key of alice, which is not stored, is on stdout\n")
    drawn = out.removesuffix("\n")
    assert DRAWN.fullmatch(drawn)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    entry = key_file.read(path)["alice"]
    assert (entry.rights, entry.concurrent) == ({"info", "metrics"}, 2)
    assert drawn not in path.read_text()
    assert [each.name for each in tmp_path.iterdir()] == ["keys.toml"]


def test_on_a_terminal_the_sentence_ends_where_the_key_begins(tmp_path):
    terminal, its_end = os.openpty()
    try:
        command = [FLASHPOINT, "key", "alice", "--file", tmp_path / "keys.toml"]
        subprocess.run(command, stdout=its_end, stderr=its_end, check=True)
        shown = os.read(terminal, 4096).decode().splitlines()
    finally:
        os.close(terminal)
        os.close(its_end)
    assert shown[0] == "the key of alice, which is not stored:"
    assert DRAWN.fullmatch(shown[1])


def test_a_name_twice_changes_nothing(run, file):
    for name in ("alice", "bob"):
        code, out, err = run(name, "--file", file)
        assert (code, out, DRAWN.search(err)) == (2, "", None)
        assert f"has a key {name} already: --rotate draws a new key for it, --revoke removes it" in err
    assert file.read_text() == TEXT


def test_comments_permissions_and_links_stay(run, file, tmp_path):
    file.chmod(0o640)
    link = tmp_path / "link.toml"
    link.symlink_to(file)
    assert run("carol", "--file", link)[0] == 0
    assert link.is_symlink()
    assert file.read_text().startswith(f"{TEXT}\n\n[carol]\n")
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert run("carol", "--revoke", "--file", link)[0] == 0
    assert file.read_text().rstrip("\n") == TEXT


@pytest.mark.parametrize("name", ["alice", "bob"])
def test_a_revoked_key_is_gone_and_the_other_is_not(run, file, name):
    other = {"alice": "bob", "bob": "alice"}[name]
    before = tomllib.loads(TEXT)[other]
    code, out, err = run(name, "--revoke", "--file", file)
    assert (code, out, err) == (0, "", f"{name} is removed from {file}\n")
    assert tomllib.loads(file.read_text()) == {other: before}
    assert "# Keys of the team" in file.read_text()
    assert ("# Bob's [machine]" in file.read_text()) == (name == "alice") or name == "bob"


@pytest.mark.parametrize("name", ["alice", "bob"])
def test_a_rotated_key_and_its_predecessor_are_valid_until_it_is_retired(run, file, name):
    before = tomllib.loads(TEXT)
    code, out, err = run(name, "--rotate", "--file", file)
    assert (code, err) == (0, f"the new key of {name}, which is not stored, is on stdout\n")
    drawn = out.removesuffix("\n")
    assert DRAWN.fullmatch(drawn)
    digest = hashlib.sha256(drawn.encode()).hexdigest()
    old = before[name]["sha256"]
    both = {**before[name], "sha256": digest, "previous_sha256": old}
    assert tomllib.loads(file.read_text()) == {**before, name: both}
    assert key_file.read(file)[name].hashes == (digest, old)
    assert "its previous key is valid, too" in run("--list", "--file", file)[1]
    code, out, err = run(name, "--rotate", "--file", file)
    assert (code, out, f"{name} has a previous key" in err, DRAWN.search(err)) == (2, "", True, None)
    assert run(name, "--retire", "--file", file) == (0, "", f"the previous key of {name} is removed from {file}\n")
    assert tomllib.loads(file.read_text()) == {**before, name: {**before[name], "sha256": digest}}
    for comment in ("# Keys of the team", "# since May", "# [not a header]", "# Bob's [machine]", "# the end"):
        assert comment in file.read_text()
    assert f"{name} has no previous key" in run(name, "--retire", "--file", file)[2]


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (TEXT, ["dave", "--rotate"], "has no key dave; it has alice, bob"),
        (TEXT, ["alice", "--rotate", "--revoke"], "--revoke: is not taken with --rotate"),
        (TEXT, ["--list", "--retire"], "is not taken with --retire"),
        (
            f'alice = {{sha256 = "{"a" * 64}", rights = ["info"]}}\n',
            ["alice", "--rotate"],
            "is not in lines of its own: change it in an editor",
        ),
        (TEXT, ["dave", "--revoke"], "has no key dave; it has alice, bob"),
        (f'[alice]\nsha256 = "{"a" * 64}"\nrights = ["info"]\n', ["alice", "--revoke"], "alice is the only key in"),
        (
            "".join(f'{name} = {{sha256 = "{"a" * 64}", rights = ["info"]}}\n' for name in ("alice", "bob")),
            ["alice", "--revoke"],
            "is not in lines of its own: remove it in an editor",
        ),
        ("[alice]\nsha256 = 3\n", ["bob"], "keys.toml: alice.sha256"),
        ("= 3", ["bob"], "keys.toml is not TOML"),
        (TEXT, ["alice", "--list"], "--list: shows all keys"),
        ("", ["--list"], "contains no keys"),
    ],
)
def test_what_cannot_be_done_changes_nothing(run, file, text, arguments, message):
    file.write_text(text)
    code, out, err = run(*arguments, "--file", file)
    assert (code, out, message in err) == (2, "", True), err
    assert file.read_text() == text


def test_a_folder_that_is_not_there(run, tmp_path):
    code, out, err = run("alice", "--file", tmp_path / "none" / "keys.toml")
    assert (code, out, DRAWN.search(err)) == (2, "", None)
    assert "cannot be written" in err
    for option in ("--list", "--revoke", "--rotate", "--retire"):
        assert f"{option}: needs the key file\n  hint: name it with --file" in run(option)[2]


def test_the_list_has_no_key_and_no_hash(run, file):
    code, out, err = run("--list", "--file", file)
    assert (code, err) == (0, "")
    assert out == "alice  attention+info  no limits\nbob  metrics  concurrent 3\n"


def test_a_write_that_fails_leaves_the_file(run, file, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(key_edits.os, "fsync", full)
    code, out, err = run("carol", "--file", file)
    assert (code, out, DRAWN.search(err)) == (2, "", None)
    assert "cannot be written: No space left on device" in err
    assert (file.read_text(), [each.name for each in file.parent.iterdir()]) == (TEXT, ["keys.toml"])


def test_keys_appended_by_the_shell(tmp_path):
    """A second `flashpoint key alice >> keys.toml` is refused, and the file stays valid."""
    path = tmp_path / "keys.toml"

    def append(name):
        with path.open("a") as stdout:
            return subprocess.run(
                [FLASHPOINT, "key", name], stdout=stdout, stderr=subprocess.PIPE, text=True, check=False
            )

    assert append("alice").returncode == 0
    path.write_text(path.read_text() + "# no end of line")
    assert append("bob").returncode == 0
    before = path.read_text()
    again = append("alice")
    assert (again.returncode, DRAWN.search(again.stderr)) == (2, None)
    assert "the file has a key alice already" in again.stderr
    assert path.read_text() == before
    assert set(key_file.read(path)) == {"alice", "bob"}


def test_the_command_draws_a_key_for_the_file(tmp_path, capsys):
    assert (
        cli.main(["key", "alice", "--rights", "attention+info", "--concurrent", "3", "--flops-per-second", "1e12"]) == 0
    )
    out, err = capsys.readouterr()
    path = tmp_path / "keys.toml"
    path.write_text(out)
    key = err.split()[-1]
    assert key not in out
    caller = Keyring(Settings(api_keys_file=path)).find({"authorization": f"Bearer {key}"})
    assert (caller.name, caller.rights) == ("alice", {"attention", "info"})
    assert key_file.read(path)["alice"].model_dump(exclude={"sha256", "rights"}, exclude_none=True) == {
        "concurrent": 3, "flops_per_second": 1e12,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "why"),
    [(["a/b"], "NAME: "), (["alice", "--rights", "all"], "'all'"), (["alice", "--bytes-per-second", "0"], "above 0")],
)
def test_the_command_refuses_what_the_file_would(arguments, why, capsys):
    assert cli.main(["key", *arguments]) == 2
    assert why in capsys.readouterr().err
