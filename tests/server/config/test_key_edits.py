"""A key file is edited atomically, by one writer at a time, and keeps its comments."""

import subprocess
import sys

import pytest

from flashpoint_server.config import key_edits, key_file

DIGESTS = ["a" * 64, "b" * 64, "c" * 64]


def table(name, digest):
    return f'[{name}] # a comment\nsha256 = "{digest}"\nrights = ["info"]\n'


def test_a_key_is_added_rotated_retired_and_removed(tmp_path):
    path = tmp_path / "keys.toml"
    key_edits.add(path, "alice", table("alice", DIGESTS[0]))
    key_edits.add(path, "bob", table("bob", DIGESTS[1]))
    key_edits.rotate(path, "alice", DIGESTS[2])
    assert key_file.read(path)["alice"].hashes == (DIGESTS[2], DIGESTS[0])
    key_edits.retire(path, "alice")
    assert path.read_text() == f"{table('alice', DIGESTS[2])}\n{table('bob', DIGESTS[1])}"
    key_edits.remove(path, "alice")
    assert set(key_file.read(path)) == {"bob"}


def test_a_change_that_is_not_possible_leaves_the_file(tmp_path):
    path = tmp_path / "keys.toml"
    key_edits.add(path, "alice", table("alice", DIGESTS[0]))
    for change, message in (
        (lambda: key_edits.add(path, "alice", table("alice", DIGESTS[1])), "has a key alice already"),
        (lambda: key_edits.add(path, "bob", "[bob]\n"), "bob.sha256"),
        (lambda: key_edits.remove(path, "alice"), "is the only key"),
        (lambda: key_edits.remove(path, "bob"), "has no key bob; it has alice"),
        (lambda: key_edits.retire(path, "alice"), "has no previous key"),
    ):
        with pytest.raises(ValueError, match=message):
            change()
        assert path.read_text() == table("alice", DIGESTS[0])
        assert [each.name for each in tmp_path.iterdir()] == ["keys.toml"]


def test_writers_at_the_same_time_lose_nothing(tmp_path):
    path = tmp_path / "keys.toml"
    program = (
        "import sys; from pathlib import Path; from flashpoint_server.config.key_edits import add\n"
        "for n in range(20): add(Path(sys.argv[1]), f'{sys.argv[2]}{n}', "
        "f'[{sys.argv[2]}{n}]\\nsha256 = \"' + 64 * '0' + '\"\\nrights = [\"info\"]\\n')"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, path, name]) for name in "abc"]
    assert [each.wait(300) for each in writers] == [0, 0, 0]
    assert len(key_file.read(path)) == 60
