"""Write the results for people and programs: a page, a plot, a table, JSON, and locust's own reports."""

from __future__ import annotations

import argparse
import csv
import html
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from scenarios import Report, Verdict

from benchmarks import figures, record
from benchmarks.record import ROOT
from flashpoint.plots import style

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:72em;margin:2em auto;padding:0 1em}
table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .7em;border-bottom:1px solid #ccc;text-align:left}
.no{color:#b00020;font-weight:600}svg{max-width:100%;height:auto}"""


def environment() -> dict[str, Any]:
    return record.environment("flashpoint", "torch", "uvicorn", "locust")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every load test."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=ROOT / "loadtests" / "out", help="default: %(default)s")
    made.add_argument("--record", action="store_true", help="keep the result in benchmarks/results and docs/images")
    return made


def parsed(made: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line, and make the folder of the results."""
    args = made.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def finish(
    args: argparse.Namespace, what: str, result: dict[str, Any], verdicts: Sequence[Verdict],
    draw: Callable[[dict[str, Any]], Figure],
) -> int:  # fmt: skip
    """Write WHAT.json and WHAT.svg, print the verdicts, and return the exit code."""
    result["verdicts"] = [asdict(verdict) for verdict in verdicts]
    (args.out / f"{what}.json").write_text(record.text(result))
    (args.out / f"{what}.svg").write_bytes(style.saved(lambda: draw(result), "svg"))
    return conclude(args, what, result["environment"], verdicts, result=f"{what}.json", picture=f"{what}.svg")


def conclude(
    args: argparse.Namespace, what: str, env: dict[str, Any], verdicts: Sequence[Verdict], *, result: str, picture: str
) -> int:
    """Print the verdicts, and return the exit code.

    With --record, copy `result` to benchmarks/results and `picture` to docs/images, both named after the device.
    """
    for verdict in verdicts:
        print(f"{'yes' if verdict.met else 'NO '}  {verdict.question}  {verdict.found} ({verdict.wanted})")
    if not all(verdict.met for verdict in verdicts):
        print(advice(env["load_average"][0], env["cores"]))
    if args.record:
        name = f"{what}-{record.file_name(env['device'])}"
        shutil.copy(args.out / result, ROOT / "benchmarks" / "results" / f"{name}.json")
        shutil.copy(args.out / picture, ROOT / "docs" / "images" / f"{name}.svg")
    return 0 if all(verdict.met for verdict in verdicts) else 1


def advice(load: float, cores: int) -> str:
    """Return what to do about a NO: `load` is the load average before the test."""
    found = f"load average before the test: {load:.1f} on {cores} cores"
    if load > cores / 2:
        return f"{found}. Other programs were busy: end them, and run the test again before you look for a fault."
    return f"{found}, idle enough: report.html, the steps' `why` and server.log in the folder say what happened."


def write(report: Report, env: dict[str, Any], folder: Path) -> None:
    """Write report.html, latency.svg, steps.csv, result.json, and locust's page of each scenario."""
    result = {
        "environment": env,
        "capacity": round(report.capacity, 1),
        "verdicts": [asdict(verdict) for verdict in report.verdicts],
        "steps": [step.row() for step in report.steps],
    }
    (folder / "result.json").write_text(record.text(result))
    with (folder / "steps.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(result["steps"][0]))
        writer.writeheader()
        writer.writerows(result["steps"])
    for scenario, page in report.pages.items():
        (folder / f"{scenario}.html").write_text(page)
    curve = any(step.scenario == "saturation" for step in report.steps)
    if curve:
        (folder / "latency.svg").write_bytes(style.saved(lambda: figures.latency(result), "svg"))
    picture = (folder / "latency.svg").read_text().partition("<svg")[2] if curve else ""
    (folder / "report.html").write_text(_page(result, list(report.pages), picture))


def _page(result: dict[str, Any], scenarios: Iterable[str], picture: str) -> str:
    env = result["environment"]
    verdicts = [
        (v["question"], v["found"], v["wanted"], "yes" if v["met"] else '<span class="no">no</span>')
        for v in ({k: html.escape(str(x)) if k != "met" else x for k, x in row.items()} for row in result["verdicts"])
    ]
    steps = [[html.escape("" if x is None else str(x)) for x in row.values()] for row in result["steps"]]
    links = ", ".join(f'<a href="{name}.html">{name}</a>' for name in scenarios)
    where = f"{html.escape(env['device'])}, {env['cores']} cores, load average {env['load_average'][0]:.2f} before"
    what = f"torch {env['torch']}, {env['date']}, commit {env['commit'][:10]}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Load test of Flashpoint</title>'
        f"<style>{STYLE}</style><h1>Load test of Flashpoint</h1>"
        f"<p>{where}; {what}. Capacity: {result['capacity']} calls a second.</p>"
        + _table(("question", "found", "wanted", "met"), verdicts)
        + (f"<svg{picture}" if picture else "")
        + _table(list(result["steps"][0]), steps)
        + f"<p>locust's own reports: {links}. The same in "
        + '<a href="steps.csv">CSV</a> and <a href="result.json">JSON</a>.</p></html>'
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{name}</th>' for name in head)}</tr>{lines}</table>"
