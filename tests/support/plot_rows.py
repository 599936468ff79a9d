"""Benchmark rows for tests that draw pictures."""

import itertools

from flashpoint import BenchmarkJob
from tests.support.verify_answers import ROW

PEAKS = {
    "float32": {"tflops": 0.5, "gb_per_s": 50.0, "sheet_tflops": 0.75, "sheet_gb_per_s": 60.0, "sheet": "its maker"},
    "float16": {"tflops": 0.9, "gb_per_s": 50.0, "sheet_tflops": None, "sheet_gb_per_s": None, "sheet": None},
}
FASTER = {"naive": 1, "tiled": 2, "sdpa_flash": 4, "its_own": 3}


def row(backend, n, direction="forward", **more):
    ms = n * n / 1e4 / FASTER[backend]
    return ROW | {
        "backend": backend, "direction": direction, "q_len": n, "kv_len": n, "ms": ms, "ms_p20": ms * 0.97,
        "ms_p80": ms * 1.1, "repeats": 9, "tflops": 0.05 * FASTER[backend], "tflops_standard": 0.05,
        "arithmetic_intensity": 8.0 + n / 1e4 if backend == "naive" else 1.0 * n,
        "roofline_percent": 20.0, "peak_bytes": n * (n if backend == "naive" else 64),
        "speedup_over_naive": float(FASTER[backend]), **more,
    }  # fmt: skip


def job(rows, **environment):
    about = {"id": "j", "created": "2026-01-01T00:00:00Z", "request": {"preset": "papers"}}
    device = "Chip & Co, whose name is as long as the names of some processors are, 2 cores at 3.4 GHz"
    return BenchmarkJob.model_validate(
        {**about, "device": device, "rows": rows, "environment": {"peaks": PEAKS, **environment}}
    )


# Three families (rows that differ only in length and backend) with one length, which are drawn as bars, and five with
# several lengths, which are drawn as lines.
ROWS = [
    *(row(b, n, d) for b, n, d in itertools.product(FASTER, (128, 256, 384, 12 * 1024), ("forward", "backward"))),
    *(row(b, 512, d, head_dim=32, value_dim=32) for b, d in itertools.product(FASTER, ("forward", "backward"))),
    row("naive", 2048, causal=True, dtype="float16"),
    row("tiled", 2048, causal=True, dtype="float16", ms_p80=900.0, roofline_percent=407.0, tflops=3.0),
    *(row(b, n, q_len=1) for b in ("naive", "tiled") for n in (1024, 4096)),
    *(row("tiled", n, head_dim=128, batch=b) for n in (1024, 2048) for b in (1, 4)),
]  # fmt: skip
SKIPPED = ROW | {"backend": "flex", "head_dim": 256, "skipped": "no compiler"}


def titles(figure):
    return [ax.get_title(loc="left") for ax in figure.axes]
