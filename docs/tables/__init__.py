"""The tables of the documentation, by the names that stand in its marks: each a function that makes its markdown."""

from __future__ import annotations

from functools import partial

from . import calls, code, decoding, judging, kernels, metrics, service, settings, trust  # they register their tables
from .markdown import TABLES, targets_by_machine

__all__ = ["TABLES", "calls", "code", "decoding", "judging", "kernels", "metrics", "service", "settings", "trust"]

for what in ("beside", "cached-decode", "fairness", "options", "serving", "throughput"):
    TABLES[f"{what}-targets"] = partial(targets_by_machine, what)
