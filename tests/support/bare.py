"""Make a virtual environment with only the packages of a new GPU machine (THERE), as links to installed packages."""

from __future__ import annotations

import venv
from importlib import metadata
from pathlib import Path

from benchmarks.gpu_serve import THERE, needed


def make(folder: Path, wanted: tuple[str, ...] = THERE) -> Path:
    """Make a virtual environment in `folder` with the packages `wanted` and their dependencies; return its Python."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in needed(wanted, "3.12"):
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            link, target = site / top, Path(str(distribution.locate_file(top)))
            if not link.exists() and target.exists():
                link.symlink_to(target)
    return folder / "bin" / "python"
