"""`flashpoint reproduce`."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flashpoint.benchmark_schema import BenchmarkJob, BenchmarkRequest, BenchmarkRow, PlotTheme
from flashpoint.commands.app import RIGHT, WRONG, examples
from flashpoint.commands.running import OUTPUT, WORDS, Json, check_file, console, local, write_json
from flashpoint.errors import invalid

THEMES: tuple[PlotTheme, ...] = ("light", "dark")
EXAMPLES = """
  flashpoint reproduce
  flashpoint reproduce --only precision,speed,memory
  flashpoint reproduce --json reproduced.json --plots pictures
"""
_STYLES = {"PASS": "green", "FAIL": "bold red"}
Event = dict[str, Any]


@examples(EXAMPLES)
def reproduce(
    only: Annotated[Any, typer.Option(help="Measure these claims alone.", **WORDS)] = None,
    json: Json = None,
    plots: Annotated[
        Path | None,
        typer.Option(metavar="DIR", rich_help_panel=OUTPUT, help="Draw the timings. Needs matplotlib."),
    ] = None,
) -> int:
    """Measure on this machine what papers and projects claim: claim, measured, verdict, and how it was measured.

    A claim that this machine cannot show says what it needs.
    """
    check_file("--json", json)
    if plots is not None and not plots.is_dir():
        raise invalid("--plots", f"{plots} is no folder")
    try:
        events = local("reproduce", served=False)(only or ())
    except ValueError as error:
        raise invalid("--only", str(error)) from None
    found = _watched(events)
    write_json(json, found)
    show = console(json)
    show.print(_table(found["claims"]))
    if plots is not None and found["rows"]:
        _draw(found, plots, show)
    return WRONG if any(claim["verdict"] == "FAIL" for claim in found["claims"]) else RIGHT


def _watched(events: Iterator[Event]) -> dict[str, Any]:
    """Collect the results until the events end. Ctrl-C ends early, and keeps the results so far."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found: dict[str, Any] = {"environment": {"date": now}, "claims": [], "rows": []}
    with _progress() as show:
        try:
            for event in events:
                show(event)
                if event["type"] == "environment":
                    found["environment"] |= event["environment"]
                elif event["type"] == "row":
                    found["rows"].append(event["row"])
                elif event["type"] == "verdict":
                    found["claims"].append({name: value for name, value in event.items() if name != "type"})
        except KeyboardInterrupt:
            print("flashpoint reproduce: ended early", file=sys.stderr)
    return found


@contextmanager
def _progress() -> Iterator[Callable[[Event], None]]:
    """Yield a function that shows progress on stderr: a bar in a terminal, otherwise one line for each claim."""
    seen = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=seen, transient=True, disable=not seen.is_terminal) as bar:
        task = bar.add_task("starting", total=None)
        name = ""

        def show(event: Event) -> None:
            nonlocal name
            if event["type"] == "claim":
                name = event["name"]
                bar.update(task, completed=event["number"] - 1, total=event["total"], description=name)
                if not seen.is_terminal:
                    print(f"{event['number']}/{event['total']} {name}", file=sys.stderr)
            elif event["type"] == "progress":
                bar.update(task, description=f"{name}: {event['what']}")

        yield show


def _table(claims: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, show_lines=True)
    for name in ("", "claim", "measured", "verdict", "how"):
        table.add_column(name, overflow="fold", no_wrap=name == "verdict")
    for claim in claims:
        verdict = claim["verdict"]
        shown = f"[{_STYLES.get(verdict, 'yellow')}]{verdict}[/]"
        table.add_row(claim["name"], claim["claim"], claim["measured"], shown, claim["how"])
    return table


def _draw(found: dict[str, Any], folder: Path, show: Console) -> None:
    """Write one figure of each kind for light pages, and one for dark pages."""
    from flashpoint.plots import KINDS, plot_benchmark

    rows = tuple(BenchmarkRow.model_validate(row) for row in found["rows"])
    made = datetime.datetime.fromisoformat(found["environment"]["date"])
    job = BenchmarkJob(
        id="local", created=made, request=BenchmarkRequest(preset="papers"), device=rows[0].device, rows=rows,
        environment=found["environment"],
    )  # fmt: skip
    for kind in KINDS:
        for theme in THEMES:
            path = folder / f"{kind}{'' if theme == 'light' else '-dark'}.svg"
            try:
                path.write_bytes(plot_benchmark(job, kind, "svg", theme))
            except ValueError as error:
                print(f"flashpoint reproduce: no picture of {kind}: {error}", file=sys.stderr)
                break
            show.print(f"wrote {path}")
