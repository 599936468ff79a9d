"""Keys in a file: TOML, a table for each key under its name, with its hash, its rights and its limits.

    [alice]
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    rights = ["attention", "info"]
    requests_per_second = 50

SHA-256 without salt or rounds is enough for keys that nobody chose: `flashpoint key` draws 256 bits.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Right = Literal["attention", "verify", "benchmark", "info", "metrics", "admin"]
RIGHTS: tuple[Right, ...] = get_args(Right)

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")  # goes into logs, labels of metrics and file names as it is


class KeyEntry(BaseModel):
    """One key. A limit that is not there is none."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """of the key, in hexadecimal"""
    rights: Annotated[frozenset[Right], Field(min_length=1)]
    """what it may do"""
    requests_per_second: Rate | None = None
    """calls of any kind"""
    bytes_per_second: Rate | None = None
    """bytes of tensors in and out; of a JSON body, of its text"""
    flops_per_second: Rate | None = None
    """floating-point operations of attention, gradients and verifications"""
    compute_seconds_per_second: Rate | None = None
    """predicted seconds of one core, or of the GPU, that attention, gradients and verifications take"""
    concurrent: Annotated[int, Field(ge=1, strict=True)] | None = None
    """requests for compute inside at once"""
    cache_bytes: Annotated[int, Field(ge=0, strict=True)] | None = None
    """bytes of caches and saved forwards that it may hold at each engine; memory that forks share counts for each"""


def check_name(name: str) -> str:
    """Raises ValueError for what cannot be a key's name."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"the name of a key must be letters, digits, - and _, at most 64, not {name[:80]!r}")
    return name


def read(path: Path) -> dict[str, KeyEntry]:
    """The keys of a file, by name. Raises ValueError, which says what is wrong with it and repeats no value of it."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # TOML's, or UTF-8's, which would show the bytes
        where = error if isinstance(error, tomllib.TOMLDecodeError) else "not UTF-8"
        raise ValueError(f"{path} is not TOML: {where}") from None
    entries = {}
    for name, table in tables.items():
        try:
            entries[check_name(name)] = KeyEntry.model_validate(table)
        except ValidationError as error:
            first = error.errors(include_input=False, include_context=False)[0]
            field = ".".join(map(str, (name, *first["loc"])))
            raise ValueError(f"{path}: {field}: {first['msg']}") from None
    if not entries:
        raise ValueError(f"{path} names no key, and a server without keys is open to all")
    return entries
