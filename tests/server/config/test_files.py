"""The last good content of key and certificate files stays, whatever becomes of the files; a pipe is read once."""

import os
import subprocess
import sys
import threading

import pytest

from flashpoint_server.config import content
from flashpoint_server.config.files import Files, HandedFiles, Shared
from flashpoint_server.config.settings import GivenSettings, Settings

KEYS = '[alice]\nsha256 = "{}"\nrights = ["info"]\n'


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(KEYS.format("0" * 64))
    return path


def gone(path):
    path.unlink()


def fifo(path):
    path.unlink()
    os.mkfifo(path)


def folder(path):
    path.unlink()
    path.mkdir()


def large(path):
    path.write_bytes(b"#" * (content.LARGEST + 1))


def doubled(path):
    path.write_text(KEYS.format("1" * 64) + KEYS.replace("alice", "bob").format("1" * 64))


@pytest.mark.parametrize("harm", [gone, fifo, folder, large, doubled, lambda path: path.write_text("[alice")])
def test_a_file_that_is_harmed_later_is_refused_and_the_last_content_stays(path, harm):
    files = Files(Settings(api_keys_file=path))
    before = files.contents
    shared = Shared(before)
    harm(path)
    with pytest.raises(ValueError, match="keys"):
        files.refresh_keys()
    assert files.contents == before
    later = HandedFiles(GivenSettings(api_keys_file=path), shared.fd)  # as a worker that starts now
    assert later.contents == before


def test_a_pipe_is_read_once(path):
    code = """
import sys
from flashpoint_server.access.keys import Keyring
from flashpoint_server.config.files import Files
from flashpoint_server.config.settings import Settings
settings = Settings(api_keys_file=sys.argv[1])
files = Files(settings)
print(Keyring(settings, files=files).names, files.refresh_keys(), Keyring(settings).names)
"""
    command = ["bash", "-c", f'{sys.executable} -c "$0" <(sleep 0.2; cat {path})', code]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.stdout == "['alice'] True ['alice']\n", ran.stderr


def test_a_reader_beside_a_writer_gets_one_content_or_the_other(path):
    settings = Settings(api_keys_file=path)
    shared = Shared(Files(settings).contents)
    handed = HandedFiles(settings, shared.fd)
    kinds = [handed.contents._replace(keys=letter * size) for letter, size in ((b"a", 100_000), (b"b", 3))]
    end = threading.Event()

    def write():
        while not end.is_set():
            for kind in kinds:
                shared.write(kind)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(300):
            handed.refresh_keys()
            assert handed.contents in kinds or handed.contents.keys.startswith(b"[alice]")
    finally:
        end.set()
        writer.join()
