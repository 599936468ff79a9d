"""`make loadtest`: a server of its own, a question after the other, and a report in loadtests/out.

Exits with 0 when everything is as it must be, 1 when it is not, 2 when the server did not get ready. Takes under four
minutes on two cores; run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import locust  # noqa: F401  # first: it makes the standard library's sockets gevent's
import report
from rich.console import Console
from rich.table import Table
from scenarios import LOADS, SCENARIOS, Bounds, Report

from server import Server, ServerError

HERE = Path(__file__).resolve().parent


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*SCENARIOS], default=[*SCENARIOS], help="default: all of them")
    parser.add_argument("--scale", type=float, default=1.0, help="of every step's seconds; default: %(default)s")
    parser.add_argument(
        "--loads", nargs="+", type=float, default=LOADS, help="parts of the capacity; default: %(default)s"
    )
    parser.add_argument("--most-errors", type=float, default=0.0, help="part of the calls; default: %(default)s")
    parser.add_argument("--most-p99-ms", type=float, default=500.0, help="up to 70%% load; default: %(default)s")
    parser.add_argument("--least-throughput", type=float, default=20.0, help="calls a second; default: %(default)s")
    parser.add_argument("--out", type=Path, default=HERE / "out", help="default: %(default)s")
    parser.add_argument("--record", action="store_true", help="keep the result in benchmarks/results and docs/images")
    return parser.parse_args()


def main() -> int:
    asked = arguments()
    asked.out.mkdir(parents=True, exist_ok=True)
    bounds = Bounds(
        asked.most_errors, asked.most_p99_ms, asked.least_throughput, loads=tuple(asked.loads), scale=asked.scale
    )
    console, made, found = Console(), report.environment(), Report()
    try:
        server = Server(asked.out)
    except ServerError as error:
        console.print(f"{error}\nthe server did not get ready", markup=False)
        return 2
    try:
        server.warm()
        for name in (name for name in SCENARIOS if name in ("capacity", *asked.only)):  # the others are parts of it
            console.print(f"[bold]{name}[/bold]: {(SCENARIOS[name].__doc__ or '').splitlines()[0]}")
            SCENARIOS[name](found, server, bounds)
    finally:
        server.stop()
    report.write(found, made, asked.out)
    table = Table("question", "found", "wanted", "met")
    for verdict in found.verdicts:
        table.add_row(verdict.question, verdict.found, verdict.wanted, "yes" if verdict.met else "[red]no[/red]")
    console.print(table)
    console.print(f"{asked.out}/report.html", soft_wrap=True)
    if asked.record:
        report.keep(asked.out, "load", made, result="result.json", picture="latency.svg")
    return 0 if all(verdict.met for verdict in found.verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
