"""The file of API keys: TOML with one table for each key. A table has the key's hash, rights and limits.

    [alice]
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    rights = ["attention", "info"]
    requests_per_second = 50

SHA-256 without salt or rounds is enough, because the keys are random: `flashpoint key` draws 256 bits.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from flashpoint_server.config.content import content

Permission = Literal["attention", "verify", "benchmark", "info", "metrics", "admin"]
RIGHTS: tuple[Permission, ...] = get_args(Permission)

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")  # names are used unchanged in logs, metric labels and file names

_NO_HASH = "must be the 64 hexadecimal digits, in lower case, that `flashpoint key` writes"


class KeyEntry(BaseModel):
    """One key, and while it is rotated its predecessor. A missing limit means that there is no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of the key, in hexadecimal"""
    previous_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    """SHA-256 of the key that this one replaces: it is valid, too, until this line is removed"""
    rights: Annotated[frozenset[Permission], Field(min_length=1)]
    """calls that the key may make"""
    requests_per_second: Rate | None = None
    """maximum requests of any kind a second"""
    bytes_per_second: Rate | None = None
    """maximum bytes of input and answer tensors a second; for JSON, bytes of text"""
    flops_per_second: Rate | None = None
    """maximum floating-point operations of attention, gradients and verifications a second"""
    compute_seconds_per_second: Rate | None = None
    """maximum predicted compute seconds a second for attention, gradients and verifications, on one core or the GPU"""
    concurrent: Annotated[int, Field(ge=1, strict=True)] | None = None
    """maximum number of compute requests at the same time"""
    cache_bytes: Annotated[int, Field(ge=0, strict=True)] | None = None
    """maximum bytes of caches and saved forwards in each engine; memory shared by forks counts for each fork"""
    cache_count: Annotated[int, Field(ge=0, strict=True)] | None = None
    """maximum number of caches and saved forwards in each engine"""

    @property
    def hashes(self) -> tuple[str, ...]:
        """The hashes of the valid keys, the newest first."""
        return (self.sha256,) if self.previous_sha256 is None else (self.sha256, self.previous_sha256)

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set."""
        return self.model_dump(exclude={"sha256", "previous_sha256", "rights"}, exclude_none=True)


def check_name(name: str) -> str:
    """Return `name` if it is a valid key name. Raises ValueError if it is not."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"the name of a key must be letters, digits, - and _, at most 64, not {name[:80]!r}")
    return name


def read(path: Path) -> dict[str, KeyEntry]:
    """Return the keys of a file, by name. Raises ValueError; its message has no value from the file."""
    return _some(content(path), path)


def _some(text: bytes, path: Path) -> dict[str, KeyEntry]:
    entries = parse(_decoded(text, path), path)
    if not entries:
        raise ValueError(f"{path} contains no keys; add one: without keys, the server would accept every caller")
    return entries


def entries(fixed: Sequence[SecretStr], text: bytes | None = None, path: Path | None = None) -> dict[str, KeyEntry]:
    """Return all keys of a server, by name: those of `api_keys`, and those in the text of the file `path`.

    Raises ValueError, also if two keys are the same.
    """
    found = {f"key-{n}": _of_setting(key.get_secret_value()) for n, key in enumerate(fixed, 1)}
    if path is not None and text is not None:
        for name, entry in _some(text, path).items():
            if name in found:
                raise ValueError(f"{path}: the key name {name} is already in use outside this file")
            found[name] = entry
    hashes = [one for entry in found.values() for one in entry.hashes]
    if len(set(hashes)) != len(hashes):
        where = "" if path is None else f"{path}: "
        raise ValueError(f"{where}two entries have the same key; remove one of them")
    return found


def _of_setting(text: str) -> KeyEntry:
    """Parse `KEY` (all rights) and `KEY:right+right`."""
    key, _, rights = text.partition(":")
    return KeyEntry(sha256=digest(key).hex(), rights=frozenset(rights.split("+") if rights else RIGHTS))  # type: ignore[arg-type]


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def text_of(path: Path) -> str:
    """Return the text of a key file. Raises ValueError."""
    return _decoded(content(path), path)


def _decoded(text: bytes, path: Path) -> str:
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError:  # the error's own text would show the bytes
        raise ValueError(f"{path} is not TOML: not UTF-8") from None


def parse(text: str, path: Path) -> dict[str, KeyEntry]:
    """Return the keys in the text of the file `path`, by name. The text may have no keys. Raises ValueError."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    entries = {}
    for name, table in tables.items():
        try:
            entries[check_name(name)] = KeyEntry.model_validate(table)
        except ValidationError as error:
            first = error.errors(include_input=False, include_context=False)[0]
            field = ".".join(map(str, (name, *first["loc"])))
            said = _NO_HASH if first["type"] == "string_pattern_mismatch" else first["msg"]
            raise ValueError(f"{path}: {field}: {said}") from None
    return entries
