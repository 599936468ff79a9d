"""`Watch` detects that a file was rewritten, replaced, removed, or changed by another target of a symbolic link."""

import os

import pytest

from flashpoint_server.config.watch import Watch


@pytest.fixture
def changes():
    return []


def test_a_file_that_is_another_is_noticed_once(tmp_path, changes):
    path = tmp_path / "keys.toml"
    path.write_text("one")
    watch = Watch([path, None], lambda: changes.append(path.exists() and path.read_text()))
    watch.look()
    assert changes == []
    path.write_text("second")
    watch.look()
    watch.look()
    assert changes == ["second"]
    (tmp_path / "new").write_text("thirds")  # of the same size as the old text
    os.replace(tmp_path / "new", path)
    watch.look()
    path.unlink()
    watch.look()
    watch.look()
    path.write_text("fourth")
    watch.look()
    assert changes == ["second", "thirds", False, "fourth"]


def test_a_secret_of_kubernetes_is_noticed(tmp_path, changes):
    """The files of a mounted Kubernetes secret are links through the link `..data`. `Watch` detects its replacement."""
    for version in ("one", "two"):
        (tmp_path / f"..{version}").mkdir()
        (tmp_path / f"..{version}" / "keys.toml").write_text(version)
    (tmp_path / "..data").symlink_to("..one")
    (tmp_path / "keys.toml").symlink_to("..data/keys.toml")
    watch = Watch([tmp_path / "keys.toml"], lambda: changes.append((tmp_path / "keys.toml").read_text()))
    (tmp_path / "..new").symlink_to("..two")
    os.replace(tmp_path / "..new", tmp_path / "..data")
    watch.look()
    assert changes == ["two"]
