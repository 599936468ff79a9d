"""Plot benchmarks. This runs in the process of formats/codec_process.py, as the import of matplotlib takes a second."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any

from flashpoint_contract.schemas.benchmark import BenchmarkJob, PlotKind, PlotTheme

MEDIA_TYPES = {"svg": "image/svg+xml", "png": "image/png"}
_NO_FOLDER = "/dev/null/matplotlib"  # cannot exist


def draw(job: str, kind: PlotKind, format: str, theme: PlotTheme) -> bytes:
    """Return the plot of the BenchmarkJob that `job` contains as JSON. Raises ValueError if it has no row to show."""
    (registered,) = entry_points(group="flashpoint.pictures", name="benchmark")
    with _folder_optional():
        plot = registered.load()
    picture: bytes = plot(BenchmarkJob.model_validate_json(job), kind, format, theme)
    return picture


@contextmanager
def _folder_optional() -> Iterator[None]:
    """Let matplotlib be imported where no folder is writable. It stores a list of fonts there, and can do without."""
    make = tempfile.mkdtemp
    failed = False

    def make_or_none(*args: Any, **options: Any) -> str:
        nonlocal failed
        try:
            return str(make(*args, **options))
        except OSError:
            failed = True
            return _NO_FOLDER

    tempfile.mkdtemp = make_or_none  # type: ignore[assignment]
    try:
        yield
    finally:
        tempfile.mkdtemp = make
        if failed:
            atexit.unregister(shutil.rmtree)  # matplotlib would delete its folder at the end of the process
