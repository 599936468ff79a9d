"""Add, rotate and remove keys of a key file: atomically, by one writer at a time. The file's comments are preserved."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flashpoint_server.config.key_file import KeyEntry, parse, text_of

MODE = 0o600  # permissions of a new file, which contains hashes and rights of keys
_HEADER = re.compile(r"\s*\[")
_LOOSE = re.compile(r"\s*(#.*)?")  # matches a blank line or a comment


def add(path: Path, name: str, entry: str) -> None:
    """Append the table of a key; make the file if there is none.

    Raises ValueError if the file has this name, is not valid, or cannot be written.
    """
    with _alone(path) as real:
        before = text_of(real) if real.exists() else ""
        if name in parse(before, path):
            raise ValueError(f"{path} has a key {name} already: --rotate draws a new key for it, --revoke removes it")
        joint = "" if not before else "\n" if before.endswith("\n") else "\n\n"
        after = f"{before}{joint}{entry.rstrip()}\n"
        parse(after, path)
        _replace(real, after)


def remove(path: Path, name: str) -> None:
    """Remove the table of a key.

    Raises ValueError if the file has no such key or only this key, is not valid, or cannot be written.
    """
    with _table(path, name) as (real, before, _):
        if len(tomllib.loads(before)) == 1:
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


def rotate(path: Path, name: str, digest: str) -> None:
    """Give a key a new hash; the present one becomes `previous_sha256`.

    Raises ValueError if the key has a previous one already, and if the file has no such key, is not valid or cannot be
    written.
    """
    with _table(path, name) as (real, before, entry):
        if entry.previous_sha256 is not None:
            raise ValueError(f"{name} has a previous key in {path}: end it first with --retire")
        line = f'sha256 = "{digest}"\nprevious_sha256 = "{entry.sha256}"'
        after = _changed(before, name, "sha256", line)
        _check(path, name, before, after, {"sha256": digest, "previous_sha256": entry.sha256})
        _replace(real, after)


def retire(path: Path, name: str) -> None:
    """Remove the previous hash of a key.

    Raises ValueError if the key has none, and if the file has no such key, is not valid or cannot be written.
    """
    with _table(path, name) as (real, before, entry):
        if entry.previous_sha256 is None:
            raise ValueError(f"{name} has no previous key in {path}: draw a new one first with --rotate")
        after = _changed(before, name, "previous_sha256", None)
        _check(path, name, before, after, {"previous_sha256": None})
        _replace(real, after)


@contextmanager
def _table(path: Path, name: str) -> Iterator[tuple[Path, str, KeyEntry]]:
    """Hold the file's lock. Yield the file's path with links resolved, its text, and the entry of a key."""
    with _alone(path) as real:
        before = text_of(real)
        entries = parse(before, path)
        if name not in entries:
            raise ValueError(f"{path} has no key {name}; it has {', '.join(sorted(entries)) or 'none'}")
        yield real, before, entries[name]


def _changed(text: str, name: str, field: str, line: str | None) -> str:
    """Return the text with a field's line of a table replaced or removed, including the comment on that line."""
    lines = text.splitlines(keepends=True)
    first, end = _span(lines, name)
    for number in range(first, end):
        if re.match(rf"""\s*(["']?){field}\1\s*=""", lines[number]):
            lines[number] = "" if line is None else f"{line}\n"
    return "".join(lines)


def _check(path: Path, name: str, before: str, after: str, fields: dict[str, str | None]) -> None:
    """Raise ValueError unless `before` and `after` differ exactly in these fields of the table."""
    tables = tomllib.loads(before)
    tables[name] = {field: value for field, value in {**tables[name], **fields}.items() if value is not None}
    try:
        right = tomllib.loads(after) == tables
    except tomllib.TOMLDecodeError:
        right = False
    if not right:
        raise ValueError(f"the table of {name} in {path} is not in lines of its own: change it in an editor")


def _without(text: str, name: str) -> str:
    """Return the text without the lines of a table. Comments above the next table stay."""
    lines = text.splitlines(keepends=True)
    first, end = _span(lines, name)
    while end > first + 1 and end < len(lines) and _LOOSE.fullmatch(lines[end - 1].rstrip("\r\n")):
        end -= 1
    return "".join(lines[:first] + lines[end:])


def _span(lines: list[str], name: str) -> tuple[int, int]:
    """Return the index of a table's first line, and of the next table's first line or the end of `lines`."""
    header = re.compile(rf"""\s*\[\s*(["']?){re.escape(name)}\1\s*\]""")
    first = next((n for n, line in enumerate(lines) if header.match(line)), len(lines))
    return first, next((n for n in range(first + 1, len(lines)) if _HEADER.match(lines[n])), len(lines))


@contextmanager
def _alone(path: Path) -> Iterator[Path]:
    """Hold the lock of the file's folder, so that other writers wait. Yield the file's path with links resolved."""
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
        present = path.stat() if path.exists() else None
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with open(descriptor, "w", encoding="utf-8", newline="") as file:
            os.fchmod(descriptor, MODE if present is None else present.st_mode & 0o777)
            if present is not None and (present.st_uid, present.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(descriptor, present.st_uid, present.st_gid)
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
        raise ValueError(f"{path} cannot be written: {error.strerror}") from None
