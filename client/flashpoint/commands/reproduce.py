"""`flashpoint reproduce`."""

from __future__ import annotations

import datetime
import math
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from flashpoint.commands import running
from flashpoint.commands.app import RIGHT, WRONG, examples
from flashpoint.commands.completion import of_kernels
from flashpoint.commands.running import Json, of_output, words
from flashpoint.commands.terminal.tables import machine
from flashpoint.errors import invalid
from flashpoint_contract.schemas.benchmark import BenchmarkJob, BenchmarkRequest, BenchmarkRow, PlotTheme

THEMES: tuple[PlotTheme, ...] = ("light", "dark")
EXAMPLES = """
  flashpoint reproduce
  flashpoint reproduce --only precision,speed,memory
  flashpoint reproduce --json reproduced.json --plots pictures
"""
_STYLES = {"PASS": "green", "FAIL": "bold red"}


@examples(EXAMPLES)
def reproduce(
    only: Annotated[
        Any, typer.Option(help="Measure these claims alone.", **words(of_kernels("reproduction", "NAMES")))
    ] = None,
    json: Json = None,
    plots: Annotated[
        Path | None, of_output("Draw the timings into this folder. Needs matplotlib.", metavar="DIR")
    ] = None,
) -> int:
    """Measure on this machine what papers and projects claim: claim, measured, verdict, and how it was measured.

    For a claim that this machine cannot test, the output says what is needed.
    """
    running.check_file("--json", json)
    if plots is not None:
        running.check_matplotlib("--plots")
        running.make_folder("--plots", plots)
    try:
        events = running.local("reproduce", served=False)(only or ())
    except ValueError as error:
        raise invalid("--only", str(error)) from None
    show = running.console(json)
    with running.terminable():
        results, ended = _watched(events, show)
    running.write_json(json, results)
    if plots is not None and results["rows"]:
        _draw(results, plots, show)
    if ended is not None:
        return ended
    return WRONG if any(claim["verdict"] == "FAIL" for claim in results["claims"]) else RIGHT


def _watched(events: Iterator[dict[str, Any]], show: Console) -> tuple[dict[str, Any], int | None]:
    """Print each claim as soon as its verdict is known, and progress on stderr.

    Returns the results so far, and the exit code if Ctrl-C or SIGTERM ended the events early.
    """
    ended = None
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    results: dict[str, Any] = {"environment": {"date": now}, "claims": [], "rows": []}
    with running.progress_bar() as (update, is_terminal):

        def tell(line: str) -> None:
            if not is_terminal:
                print(line, file=sys.stderr, flush=True)

        name = ""
        try:
            for event in events:
                if event["type"] == "claim":
                    name = event["name"]
                    if event["number"] == 1:
                        update.print_above(show, Text(_duration(event), "dim"))
                    update(completed=event["number"] - 1, total=event["total"], description=name)
                    tell(f"{event['number']}/{event['total']} {name}")
                elif event["type"] == "progress":
                    update(description=f"{name}: {event['what']}")
                    tell(f"  {event['what']}")
                elif event["type"] == "environment":
                    results["environment"] |= event["environment"]
                    if not results["claims"]:
                        update.print_above(show, Text(machine(results["environment"]), "dim"))
                elif event["type"] == "row":
                    results["rows"].append(event["row"])
                elif event["type"] == "verdict":
                    claim = {name: value for name, value in event.items() if name != "type"}
                    results["claims"].append(claim)
                    update.print_above(show, *_lines(claim, show.width))
        except KeyboardInterrupt as end:
            ended = running.code_of(end)  # the exception itself would keep connections alive
            print("flashpoint reproduce: ended early", file=sys.stderr)
    return results, ended


def _duration(event: dict[str, Any]) -> str:
    """Return how long all claims take."""
    usual, most = (math.ceil(event[name] / 60) for name in ("seconds_left", "most_seconds_left"))
    claims = f"{event['total']} claim{'s'[: event['total'] > 1]}"
    return f"{claims}: about {usual} min on two idle cores, at most {most} min"


def _lines(claim: dict[str, Any], width: int) -> Iterator[Text]:
    """Yield the lines of a claim: its name and verdict, and the explanations below it, wrapped between words."""
    verdict = claim["verdict"]
    yield Text.assemble((claim["name"], "bold"), "  ", (verdict, _STYLES.get(verdict, "yellow")))
    for name in ("claim", "measured", "how"):
        first, rest = f"  {name:<10}", " " * 12
        lines = textwrap.wrap(claim[name], width - 1, initial_indent=first, subsequent_indent=rest,
                              break_long_words=False, break_on_hyphens=False)  # fmt: skip
        yield from map(Text, lines)
    yield Text()


def _draw(results: dict[str, Any], folder: Path, show: Console) -> None:
    """Write each kind of figure twice: for light and for dark pages."""
    from flashpoint.plots import KINDS, plot_benchmark

    rows = tuple(BenchmarkRow.model_validate(row) for row in results["rows"])
    made = datetime.datetime.fromisoformat(results["environment"]["date"])
    job = BenchmarkJob(
        id="local", created=made, request=BenchmarkRequest(preset="papers"), device=rows[0].device, rows=rows,
        environment=results["environment"],
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
