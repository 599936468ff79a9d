"""Time the overhead of Ray Serve per call, by the size of the body: `python benchmarks/ray_overhead.py`.

The same messages go to `flashpoint serve`, to the same application on plain uvicorn, and to a replica of it on Ray
Serve, behind Ray's own proxy and behind HAProxy. All four servers run at the same time with the same malloc settings.
Only one of them gets a call at a time, over a persistent connection. Almost nothing is computed: a message brings many
keys and values and attends to one ("in"), or gets a large answer with one computed row ("out"). Each round times every
server, in alternating order. The medians go to benchmarks/results/ray-<device>.json. Takes about three minutes.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from forms import SAFETENSORS
from runner import MALLOC, ROOT, SERVICE, Args, in_turn, medians, option, run
from serving import MIB, Connection, exchanges, process, ready, service, until

sys.path.append(str(ROOT))  # for tests.support, whose functions start Ray
from tests.support.ray_cluster import deploy, free_port

os.environ.pop("TRITON_INTERPRET", None)  # the tests set this variable; this benchmark interprets no kernel

KIB = 1 << 10
SIZES = {"16 KiB": 16 * KIB, "1 MiB": MIB, "16 MiB": 16 * MIB, "64 MiB": 64 * MIB}
WAYS = ("flashpoint serve", "uvicorn", "Ray's proxy", "HAProxy")

PLAIN = """
import sys, uvicorn
from flashpoint_server.observability import logs
from flashpoint_server.app import create_app
from flashpoint_server.config.settings import Settings
logs.configure("json", "info")
uvicorn.run(create_app(Settings(device="cpu")), port=int(sys.argv[1]), access_log=False, log_config=None)
"""


@contextlib.contextmanager
def plain_uvicorn() -> Iterator[int]:
    """Run the application on uvicorn with default settings, and yield the port."""
    port = free_port()
    with process([sys.executable, "-c", PLAIN, str(port)], stderr=subprocess.DEVNULL) as child:
        until(lambda: ready(port), child)
        yield port


def measure(args: Args) -> dict[str, Any]:
    milliseconds: dict[str, dict[str, float]] = {}
    with contextlib.ExitStack() as inside:
        ports = [
            inside.enter_context(service())[1],
            inside.enter_context(plain_uvicorn()),
            *(inside.enter_context(deploy(haproxy=h, environment=MALLOC)).port for h in (False, True)),
        ]
        opened = [inside.enter_context(contextlib.closing(Connection(port))) for port in ports]
        for direction in ("in", "out"):
            for size, nbytes in SIZES.items():
                calls = args.calls if nbytes <= MIB else max(1, args.calls // 10)
                message = SAFETENSORS.whole(exchanges(nbytes)[direction])
                ways = {
                    way: lambda at=connection, sent=message: at.post("/attention", *sent).whole * 1e3
                    for way, connection in zip(WAYS, opened, strict=True)
                }
                rounds = list(in_turn(ways, args.rounds * calls, warm=calls))
                milliseconds[f"{direction}, {size}"] = medians(rounds, digits=2)
    return {"rounds": args.rounds, "calls": args.calls, "median_milliseconds": milliseconds}


if __name__ == "__main__":
    calls = option(20, "calls of a round up to 1 MiB; a tenth of that above")
    run(measure, "ray", packages=(*SERVICE, "ray"), rounds=option(9), calls=calls)
