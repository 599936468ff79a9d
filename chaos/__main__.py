"""`make chaos` injects `--faults` faults from a seed; each round appends a line of JSON to `--out`.

Exits with 0 if there was no violation, else with 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.record import environment
from chaos.contained import can_contain
from chaos.run import FAULTS, Chaos, row
from chaos.service import SETTINGS, Service


def main() -> int:
    names = {fault.__name__: fault for fault in FAULTS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200, help="number of faults; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=1, help="HTTP processes; default: %(default)s")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=sorted(names),
        default=sorted(names),
        metavar="FAULT",
        help=f"default: all of {', '.join(sorted(names))}",
    )
    parser.add_argument("--out", type=Path, help="a file to which each round appends a line of JSON")
    args = parser.parse_args()
    chaos = Chaos(Service(args.workers, contained=can_contain()), args.seed)
    faults = {names[name]: FAULTS[names[name]] for name in args.only}
    done, number, violations = 0, 0, 0

    def keep(document: dict[str, Any]) -> None:
        if args.out is not None:
            with args.out.open("a") as file:
                file.write(json.dumps(document) + "\n")

    keep({"environment": environment("torch"), "seed": args.seed, "workers": args.workers, "settings": SETTINGS})
    try:
        while done < args.faults:
            result = chaos.round(chaos.chosen(faults)[: args.faults - done])
            done, number = done + len(result.faults), number + 1
            violations += len(result.violations)
            keep(row(number, result))
            effects = ", ".join(f"{name} ({effect})" for name, effect, _, _ in result.faults)
            print(f"{done:5} {result.recovery or 0:5.1f} s  {effects}", *result.violations, sep="\n    ! ", flush=True)
    finally:
        code = chaos.stop()
    return 0 if not violations and code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
