"""The tables of the documentation: `TABLES` maps the name in a page's mark to a function that returns Markdown."""

from __future__ import annotations

from functools import partial

from . import calls, code, decoding, judging, kernels, metrics, path, service, settings, trust  # they register tables
from .markdown import TABLES, targets_by_machine

__all__ = [
    "TABLES",
    "calls",
    "code",
    "decoding",
    "judging",
    "kernels",
    "metrics",
    "path",
    "service",
    "settings",
    "trust",
]

for what in ("beside", "cached-decode", "fairness", "options", "serving", "throughput"):
    TABLES[f"{what}-targets"] = partial(targets_by_machine, what)
