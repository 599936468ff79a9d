"""`make loadtest`: start a server, run one scenario after another, and write a report to loadtests/out.

Exits with 0 if every condition holds, 1 if not, 2 if the server did not become ready. Takes under four minutes on two
cores; run it on a machine that does nothing else.
"""

from __future__ import annotations

import sys

import locust  # noqa: F401  # first: it replaces the standard library's sockets by gevent's
import report
from scenarios import LOADS, SCENARIOS, Bounds, Report

from server import Server, ServerError


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=[*SCENARIOS], default=[*SCENARIOS], help="default: all of them")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of every step's seconds; default: %(default)s")
    parser.add_argument(
        "--loads", nargs="+", type=float, default=LOADS, help="rates over the capacity; default: %(default)s"
    )
    parser.add_argument("--most-errors", type=float, default=0.0, help="part of the calls; default: %(default)s")
    parser.add_argument("--most-p99-ms", type=float, default=500.0, help="at up to 70%% load; default: %(default)s")
    parser.add_argument("--least-throughput", type=float, default=20.0, help="calls per second; default: %(default)s")
    args = report.parsed(parser)
    bounds = Bounds(
        args.most_errors, args.most_p99_ms, args.least_throughput, loads=tuple(args.loads), scale=args.scale
    )
    env, result = report.environment(), Report()
    try:
        with Server(args.out) as server:
            for name, scenario in SCENARIOS.items():
                if name in ("capacity", *args.only):  # the other scenarios need the capacity
                    print(f"{name}: {(scenario.__doc__ or '').splitlines()[0]}", flush=True)
                    scenario(result, server, bounds)
    except ServerError as error:
        print(f"{error}\nthe server did not get ready")
        return 2
    report.write(result, env, args.out)
    print(f"{args.out}/report.html")
    return report.conclude(args, "load", env, result.verdicts, result="result.json", picture="latency.svg")


if __name__ == "__main__":
    sys.exit(main())
