"""`make chaos`: faults from a seed, until there were so many; each round is a line of JSON, as soon as it is over.

Exits with 0 where nothing went wrong that may not, 1 where something did.
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
    parser.add_argument("--faults", type=int, default=200, help="in all; default: %(default)s")
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
    parser.add_argument("--out", type=Path, help="a file to which each round is appended, a line of JSON each")
    asked = parser.parse_args()
    chaos = Chaos(Service(asked.workers, contained=can_contain()), asked.seed)
    several = {names[name]: FAULTS[names[name]] for name in asked.only}
    done, number, violations = 0, 0, 0

    def keep(document: dict[str, Any]) -> None:
        if asked.out is not None:
            with asked.out.open("a") as file:
                file.write(json.dumps(document) + "\n")

    keep({"environment": environment("torch"), "seed": asked.seed, "workers": asked.workers, "settings": SETTINGS})
    try:
        while done < asked.faults:
            found = chaos.round(chaos.drawn(several)[: asked.faults - done])
            done, number = done + len(found.faults), number + 1
            violations += len(found.violations)
            keep(row(number, found))
            said = ", ".join(f"{name} ({did})" for name, did, _, _ in found.faults)
            print(f"{done:5} {found.recovery or 0:5.1f} s  {said}", *found.violations, sep="\n    ! ", flush=True)
    finally:
        code = chaos.stop()
    return 0 if not violations and code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
