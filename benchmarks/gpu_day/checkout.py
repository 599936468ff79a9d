"""Find the packages of this checkout, and hash the sources that a measured row depends on."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def packages(root: Path = ROOT) -> list[str]:
    """Return the folders with a package of this project, for sys.path, so that nothing needs to be installed."""
    return sorted({str(path.parents[1]) for path in root.glob("*/flashpoint*/__init__.py")})


def python_path(*more: str) -> str:
    """Return PYTHONPATH for a child process: the checkout, its packages, `more`, and the variable's current value."""
    before = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(ROOT), *packages(), *more, *([before] if before else [])])


def pretend_installed(folder: Path, version: str) -> str:
    """Write package metadata with `version` into `folder`, and return the folder.

    With this folder on sys.path, our code finds its version as if it were installed.
    """
    metadata = folder / "flashpoint-0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: flashpoint\nVersion: {version}\n")
    return str(folder)


def sources(*folders: str, root: Path = ROOT) -> str:
    """Return one SHA-256 (16 digits) of all Python files in `folders`, whether committed or not."""
    files = sorted(path for folder in folders for path in (root / folder).rglob("*.py"))
    each = [f"{path.relative_to(root)} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files]
    return hashlib.sha256("\n".join(each).encode()).hexdigest()[:16]
