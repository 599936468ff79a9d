"""Plot benchmarks. This runs in the process of formats/codec_process.py, as the import of matplotlib takes a second."""

from __future__ import annotations

from importlib.metadata import entry_points

from flashpoint_contract.schemas.benchmark import BenchmarkJob, PlotKind, PlotTheme

MEDIA_TYPES = {"svg": "image/svg+xml", "png": "image/png"}


def draw(job: str, kind: PlotKind, format: str, theme: PlotTheme) -> bytes:
    """Return the plot of the BenchmarkJob that `job` contains as JSON. Raises ValueError if it has no row to show."""
    (registered,) = entry_points(group="flashpoint.pictures", name="benchmark")
    picture: bytes = registered.load()(BenchmarkJob.model_validate_json(job), kind, format, theme)
    return picture
