"""Results of the clients: models of `flashpoint_contract.schemas`, with tables and pictures for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib import import_module

from flashpoint_contract.schemas import benchmark, verify


class Picture(bytes):
    """An SVG file, which a notebook displays as a picture."""

    def _repr_svg_(self) -> str:
        return self.decode()


class VerifyReport(verify.VerifyReport):
    """The errors of a backend, or of the caller's own answers, against float64, and the verdict `ok`."""

    def plot(self) -> Picture:
        """Draw the errors of each tensor beside its bound: an SVG, which a notebook shows. Needs matplotlib."""
        return _picture("plot_verification", self)

    def _repr_html_(self) -> str:
        verdict = "PASS" if self.ok else "FAIL"
        heads = ("", "max error", "bound", "torch's own", "RMS", "worst at")
        rows = [
            (t.name if t.ok else f"{t.name} ✗", t.max_abs, t.bound, t.torch.max_abs, t.rms, t.worst_index)
            for t in self.tensors
        ]
        return _table(f"{verdict} · {self.backend} · {self.dtype} · {self.device}", heads, rows)


class BenchmarkJob(benchmark.BenchmarkJob):
    """The state of a benchmark, its request, and the rows that are finished."""

    def plot(self, kind: benchmark.PlotKind = "time") -> Picture:
        """Draw the finished rows: an SVG, which a notebook shows. Needs matplotlib.

        Args:
            kind: `time` (ms), `tflops`, `speedup` (over naive attention), `memory` (peak bytes) or `roofline`.

        Raises:
            ValueError: no row has the figures of this picture.
            ModuleNotFoundError: matplotlib is not installed.
        """
        return _picture("plot_benchmark", self, kind)

    def _repr_html_(self) -> str:
        heads = ("direction", "dtype", "causal", "B", "H", "N", "D", "backend", "ms", "TFLOP/s", "× naive", "")
        rows = [
            (r.direction, r.dtype, r.causal, r.batch, r.q_heads, r.q_len, r.head_dim, r.backend, r.ms, r.tflops,
             r.speedup_over_naive, r.skipped or ", ".join(word for word in ("noisy", "busy") if getattr(r, word)))
            for r in self.rows
        ]  # fmt: skip
        return _table(f"{self.state}, {self.done} of {self.total} cases · {self.device or ''}", heads, rows)


def _picture(draw: str, *arguments: object) -> Picture:
    """Return the SVG that `draw` of `flashpoint.plots` makes. Raises ModuleNotFoundError if matplotlib is missing."""
    try:
        return Picture(getattr(import_module("flashpoint.plots"), draw)(*arguments))
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        what = "a picture needs matplotlib: pip install '.[plot]' in a checkout"
        raise ModuleNotFoundError(what, name=error.name) from error


def _table(title: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(_text(value))}</td>" for value in row) + "</tr>" for row in rows)
    return f"<p>{escape(title)}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
