"""Tables that are made from the code: options, errors, commands, features and algorithms."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any
from unittest import mock

from flashpoint.commands.app import load
from flashpoint.commands.registry import COMMANDS
from flashpoint.commands.terminal import help_page
from flashpoint_contract.caches import CACHE_OPTIONS, CacheOption
from flashpoint_contract.options import BACKENDS, LAYOUTS
from flashpoint_contract.saved import SAVED_OPTIONS
from flashpoint_contract.schemas.options import AttentionOptions
from flashpoint_contract.tensors import FLOATS, INPUT_TENSORS, TENSORS, Tensor
from flashpoint_kernels import nano as smallest
from flashpoint_kernels.dispatching.support import SUPPORT, said
from flashpoint_kernels.timing.case import ALGORITHMS
from flashpoint_kernels.timing.device import SHEETS
from flashpoint_server.oip.grpc.server import STATUSES
from flashpoint_server.page.errors import ERRORS
from flashpoint_server.refusal import STATUS, Refusal

from .markdown import ROOT, named, table


@named
def nano() -> str:
    """Return the source of the smallest kernel as a block of code.

    The space before `python` marks it as a block that the tests of the documentation do not run.
    """
    return f"\n``` python\n{smallest.source()}\n```\n\n"


@named
def errors() -> str:
    """Return every error code of the server, in the order of the statuses."""
    rows = []
    for code, status in STATUS.items():
        wait = Refusal(code, "").headers.get("Retry-After")
        rows.append((status, f"`{code}`", *ERRORS[code], f"{wait} s" if wait else "", f"`{STATUSES[code]}`"))
    return table(["status", "code", "when", "what to do", "`Retry-After`", "gRPC"], rows)


@named
def tensors() -> str:
    """Return every tensor of a call over HTTP, with its shapes, dtypes, and the calls that take it."""
    shown = (TENSORS[name] for name in INPUT_TENSORS if not {"json", "safetensors"} <= TENSORS[name].refused.keys())
    return table(
        ["tensor", "meaning", "dtype", "taken by"], [(f"`{row.name}`", row.text, *_taken(row)) for row in shown]
    )


def _taken(row: Tensor) -> tuple[str, str]:
    """Return the dtypes of a tensor, and the calls that take it."""
    floats = set(FLOATS) <= set(row.dtypes)
    dtypes = ", ".join([*(dtype for dtype in row.dtypes if not floats or dtype not in FLOATS), *["any float"] * floats])
    if row.like_q:
        dtypes = ", ".join(FLOATS) if row.name == "q" else " or ".join(["q's", *row.quantized])
    calls = "gradient calls" if row.direction == "backward" else "forward calls" if row.forward_only else "all calls"
    calls = f"{calls}, required" if row.required else calls
    if row.layouts != LAYOUTS:
        calls += f"; layout {', '.join(f'`{layout}`' for layout in row.layouts)}"
    return dtypes, f"{calls}; not in JSON" if "json" in row.refused else calls


@named
def options() -> str:
    def values(schema: dict[str, Any]) -> str:
        variants = [part for part in schema.get("anyOf", [schema]) if part.get("type") != "null"]
        of = variants[0].get("items", variants[0])
        words = ", ".join(f"`{word}`" for word in of["enum"]) if "enum" in of else str(variants[0]["type"])
        return f"list of {words}" if variants[0] is not of else words

    properties = AttentionOptions.model_json_schema()["properties"]
    rows = []
    for name, schema in properties.items():
        default = schema.get("default")
        rows.append((f"`{name}`", values(schema), f"`{json.dumps(default)}`", schema["description"]))
    return table(["option", "values", "default", "meaning"], rows)


@named
def cache_options() -> str:
    """Return the options of a call over caches."""
    return _of_held(CACHE_OPTIONS.values())


@named
def saved_options() -> str:
    """Return the options of a call that saves a forward, and of one that uses it."""
    return _of_held(SAVED_OPTIONS.values())


def _of_held(options: Iterable[CacheOption]) -> str:
    rows = [(f"`{row.name}`", f"`{json.dumps(row.default)}`", row.text) for row in options]
    return table(["option", "default", "meaning"], rows)


@named
def commands() -> str:
    """Return a table of the commands, and the help of each.

    For commands that take the server's settings, the help has no options: `docs/tables/settings.py` has their table.
    """
    rows = [(f"[`{name}`](#flashpoint-{name})", command.about) for name, command in COMMANDS.items()]
    parts = ["\n" + table(["command", "does"], rows)]
    for name in COMMANDS:
        command = load(name)
        context = command.make_context(f"flashpoint {name}", [], resilient_parsing=True)
        if name in ("serve", "config"):
            text = " ".join((command.help or "").split())
        else:
            with mock.patch.dict(os.environ, {"COLUMNS": "100", "NO_COLOR": "1"}):
                text = f"```\n{help_page.page(command, context)}\n```"
        parts.append(f"\n### flashpoint {name}\n\n{text}\n")
    return "".join(parts)


@named
def support() -> str:
    """Return a table of the features of each backend. Features of all backends are first."""
    columns = {name: SUPPORT[name] for name in BACKENDS if name in SUPPORT}
    rows = []
    for feature in set().union(*columns.values()):
        field, what = said(feature)
        name = f"`{field}`" if field == what else f"`{field}`: {what}"
        rows.append((name, *("yes" if feature in own else "–" for own in columns.values())))
    return table(["", *columns], sorted(rows, key=lambda row: (row.count("–"), row)))


@named
def extremes() -> str:
    """Return the tested answers of each backend for inputs at the edges of floating point."""
    sys.path.append(str(ROOT))
    from tests.support.kernels.extremes import ANSWERS, CASES, HALF, WORDS

    merged: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for case in CASES.values():
        value = case.value + (" (float16, bfloat16)" if case.dtypes == HALF else "")
        if value in ("+∞", "−∞"):  # +∞ and −∞ share a row if their answers are the same
            other = CASES[f"{'−∞' if value == '+∞' else '+∞'} in {case.place}"]
            if other.answers == case.answers:
                if value == "−∞":
                    continue
                value = "±∞"
        merged.setdefault((value, case.answers), []).append(f"`{case.place}`")
    rows = []
    for (value, answers), places in merged.items():
        words = [WORDS[word] for word in answers]
        rows.append((value, " or ".join(places), *words))
    return table(["", "in", *(f"`{name}`" for name in ANSWERS)], rows)


@named
def algorithms() -> str:
    """Return, for each algorithm, its numbers of matrix products, FLOPs and passes, and the tensors that it moves."""
    rows = []
    for name, a in ALGORITHMS.items():
        flops = f"{2 * (a.d_products + a.dv_products)}·P·D"
        pairs = "seen" if a.skips_hidden else "all"
        causal = f", causal {a.matrix_passes + a.causal_passes}" if a.causal_passes else ""
        moves = " ".join(tensor if times == 1 else f"{times}·{tensor}" for tensor, times in Counter(a.tensors).items())
        products = (a.d_products, a.dv_products, flops, pairs)
        rows.append((f"`{name}`", a.does, *products, f"{a.matrix_passes}{causal}", moves))
    counts = ("products over D", "over Dv", "FLOPs, D = Dv", "pairs", "passes over Sq × Sk", "moves")
    return table(["", "does", *counts], rows)


@named
def data_sheets() -> str:
    head = ["GPU", "16-bit TFLOP/s, dense", "float32 TFLOP/s", "GB/s", "source"]
    return table(head, [(name, *sheet) for name, sheet in SHEETS.items()])
