"""Draw benchmarks. This runs in a process beside the HTTP process, because matplotlib takes a second to import."""

from __future__ import annotations

from flashpoint.benchmark_schema import BenchmarkJob, PlotKind, PlotTheme

MEDIA_TYPES = {"svg": "image/svg+xml", "png": "image/png"}


def draw(job: str, kind: PlotKind, format: str, theme: PlotTheme) -> bytes:
    """Return a picture of a BenchmarkJob in JSON. Raises ValueError if it has no row to show."""
    from flashpoint.plots import plot_benchmark

    return plot_benchmark(BenchmarkJob.model_validate_json(job), kind, "png" if format == "png" else "svg", theme)
