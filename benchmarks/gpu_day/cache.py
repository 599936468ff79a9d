"""Pack Triton's compile cache into a few files that can move from one machine to another.

An entry is a folder of Triton's cache: a binary, its metadata and its intermediate representations. A launch does not
read the files with a suffix in `_DROPPED`, so they are not packed. A group file of Triton lists the absolute paths of
the other files; unpacking rewrites these paths, because the next machine may use another folder. If a part is damaged,
the rest of it is not unpacked, and Triton compiles those kernels again.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

MANAGER = "benchmarks.gpu_day.counted:Counted"  # for TRITON_CACHE_MANAGER
NOTES = "FLASHPOINT_KERNEL_NOTES"  # the variable that names the file of the kernels that MANAGER has seen
_DROPPED = (".ttir", ".llir", ".source", ".ttadapter")
_GROUP = "__grp__"
_PART = "part-{}.tar.gz"
_PART_BYTES = 15 << 20  # largest size of a part in bytes
_MIB = 1 << 20


def pack(cache: Path, folder: Path, limit_mib: int) -> tuple[int, int]:
    """Write the entries of `cache` into parts in `folder`, and return (entries packed, entries left out).

    The newest entries come first; entries beyond `limit_mib` are left out. Each part can be unpacked without the
    others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    entries = sorted(_entries(cache), key=_compiled_at, reverse=True)
    parts: list[list[bytes]] = [[]]
    total = size = packed = 0
    for entry in entries:
        data = _compressed(entry)
        if total + len(data) > limit_mib * _MIB:
            break
        if size + len(data) > _PART_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(data)
        total, size, packed = total + len(data), size + len(data), packed + 1
    written = [folder / _PART.format(n) for n, part in enumerate(parts) if part]
    for path, part in zip(written, parts, strict=False):
        unfinished = path.with_suffix(".new")
        unfinished.write_bytes(b"".join(part))
        unfinished.replace(path)
    for old in set(folder.glob(_PART.format("*"))) - set(written):
        old.unlink()
    return packed, len(entries) - packed


def unpack(folder: Path, cache: Path) -> int:
    """Unpack from the parts in `folder` the entries that `cache` lacks, and return their number."""
    cache.mkdir(parents=True, exist_ok=True)
    known = {entry.name for entry in _entries(cache)}
    new = set()
    for part in sorted(folder.glob(_PART.format("*"))):
        for name, at, data in _files(part):
            key = name.partition("/")[0]
            if key in known:
                continue
            path = cache / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(_moved(data, path.parent) if path.name.startswith(_GROUP) else data)
            os.utime(path, (at, at))  # keeps the age, because a later `pack` leaves out the oldest entries first
            new.add(key)
    return len(new)


def counts(file: Path) -> dict[str, dict[str, int]]:
    """Return how many variants of each kernel were compiled, and how many came only from the cache."""
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    compiled = {(line["kernel"], line["key"]) for line in lines if line["compiled"]}
    found = {(line["kernel"], line["key"]) for line in lines} - compiled
    return {
        name: dict(sorted(Counter(kernel for kernel, _ in of).items()))
        for name, of in (("compiled", compiled), ("from_cache", found))
    }


def _entries(cache: Path) -> list[Path]:
    """Return the folders of compiled kernels. Other folders, such as those of Triton's launchers, lack a group file."""
    return [entry for entry in cache.iterdir() if any(entry.glob(_GROUP + "*"))] if cache.exists() else []


def _compiled_at(entry: Path) -> float:
    return max(path.stat().st_mtime for path in entry.glob(_GROUP + "*"))


def _compressed(entry: Path) -> bytes:
    """Return one entry as a tar archive in a gzip member. A part is several such members, concatenated."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in sorted(entry.iterdir()):
            if path.is_file() and path.suffix not in _DROPPED:
                tar.add(path, f"{entry.name}/{path.name}")
    return gzip.compress(buffer.getvalue(), compresslevel=6, mtime=0)


def _files(part: Path) -> Iterator[tuple[str, float, bytes]]:
    """Yield (KEY/NAME, time of change, bytes) of a part's readable files; skip names that point outside the cache."""
    try:
        with gzip.open(part) as plain, tarfile.open(fileobj=plain, mode="r|", ignore_zeros=True) as tar:
            for member in tar:
                file = tar.extractfile(member) if member.isfile() else None
                if file is not None and member.name.count("/") == 1 and ".." not in member.name.split("/"):
                    yield member.name, member.mtime, file.read()
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        print(f"{part}: {error}; missing kernels are compiled again")


def _moved(group: bytes, folder: Path) -> bytes:
    """Return a group file whose paths are rewritten to `folder`."""
    document = json.loads(group)
    document["child_paths"] = {name: str(folder / name) for name in document["child_paths"]}
    return json.dumps(document).encode()
