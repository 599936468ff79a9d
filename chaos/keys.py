"""The API keys of the service during fault injection. A key owns its caches; one key has a small quota."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

LOAD = "load"  # the default key; callers and faults that make caches have other keys
OWNERS = ("alice", "bob")  # keys of callers with caches
SDK = "sdk"  # key of `SdkHolder`, the caller that uses the Python SDK's caches
FILLER, SMALL = "filler", "small"  # keys of the faults that use caches
QUOTA = 300_000  # largest number of bytes of caches that SMALL may hold


def bearer(name: str) -> dict[str, str]:
    """Return the Authorization header with the key called `name`."""
    return {"Authorization": f"Bearer {key_of(name)}"}


def write() -> Path:
    """Write the file of all keys; return its path."""
    tables = []
    for name in (LOAD, *OWNERS, SDK, FILLER, SMALL):
        digest = hashlib.sha256(key_of(name).encode()).hexdigest()
        quota = f"cache_bytes = {QUOTA}\n" if name == SMALL else ""
        tables.append(f'[{name}]\nsha256 = "{digest}"\nrights = ["attention", "info", "metrics"]\n{quota}')
    path = Path(tempfile.mkdtemp(prefix="chaos-keys-")) / "keys.toml"
    path.write_text("\n".join(tables))
    return path


def key_of(name: str) -> str:
    """Return the secret of the key called `name`."""
    return f"chaos-{name}-of-no-value"
