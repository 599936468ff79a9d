"""Add keys to a key file and remove them: atomically, one writer at a time, and with the comments of the file."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flashpoint_server.config.key_file import parse, text_of

MODE = 0o600  # of a new file: it has no keys, but their hashes and rights
_HEADER = re.compile(r"\s*\[")
_LOOSE = re.compile(r"\s*(#.*)?")  # a blank line, or a comment


def add(path: Path, name: str, entry: str) -> None:
    """Append the table of a key; make the file if there is none.

    Raises ValueError if the file has this name, is not valid, or cannot be written.
    """
    with _alone(path) as real:
        before = text_of(real) if real.exists() else ""
        if name in parse(before, path):
            raise ValueError(f"{path} has a key {name} already: use another name, or remove it first with --revoke")
        joint = "" if not before else "\n" if before.endswith("\n") else "\n\n"
        after = f"{before}{joint}{entry.rstrip()}\n"
        parse(after, path)
        _replace(real, after)


def remove(path: Path, name: str) -> None:
    """Remove the table of a key. Raises ValueError, as `add` does, if the file has no such key, or no other."""
    with _alone(path) as real:
        before = text_of(real)
        entries = parse(before, path)
        if name not in entries:
            raise ValueError(f"{path} has no key {name}; it has {', '.join(sorted(entries)) or 'none'}")
        if len(entries) == 1:
            raise ValueError(f"{name} is the only key in {path}: add another first, because a server needs one")
        after = _without(before, name)
        tables = tomllib.loads(before)
        del tables[name]
        try:
            right = tomllib.loads(after) == tables
        except tomllib.TOMLDecodeError:
            right = False
        if not right:
            raise ValueError(f"the table of {name} in {path} is not in lines of its own: remove it in an editor")
        _replace(real, after)


def _without(text: str, name: str) -> str:
    """Return the text without the lines of a table. Comments above the next table stay."""
    lines = text.splitlines(keepends=True)
    header = re.compile(rf"""\s*\[\s*(["']?){re.escape(name)}\1\s*\]""")
    first = next((n for n, line in enumerate(lines) if header.match(line)), len(lines))
    end = next((n for n in range(first + 1, len(lines)) if _HEADER.match(lines[n])), len(lines))
    while end > first + 1 and end < len(lines) and _LOOSE.fullmatch(lines[end - 1].rstrip("\r\n")):
        end -= 1
    return "".join(lines[:first] + lines[end:])


@contextmanager
def _alone(path: Path) -> Iterator[Path]:
    """Hold the lock of the file's folder, and yield the file behind links. Other writers wait."""
    real = Path(os.path.realpath(path))
    try:
        folder = os.open(real.parent, os.O_RDONLY)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {real.parent}: {error.strerror}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield real
    finally:
        os.close(folder)


def _replace(path: Path, text: str) -> None:
    """Replace the file at once: a reader sees the old one or the new one. Its permissions and owner stay."""
    temporary = None
    try:
        found = path.stat() if path.exists() else None
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with open(descriptor, "w", encoding="utf-8", newline="") as file:
            os.fchmod(descriptor, MODE if found is None else found.st_mode & 0o777)
            if found is not None and (found.st_uid, found.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(descriptor, found.st_uid, found.st_gid)
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
        raise ValueError(f"{path} cannot be written: {error.strerror}") from None
