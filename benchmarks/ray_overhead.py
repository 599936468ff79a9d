"""Time what Ray Serve costs a call, by the size of its body: `python benchmarks/ray_overhead.py`.

The same messages go to `flashpoint serve`, to the same application on plain uvicorn, and to a replica of it on Ray
Serve, behind Ray's own proxy and behind HAProxy; all four are there at a time, with the same malloc settings, and only
one is asked at a time, over one kept connection. A message brings keys and values of which one key is attended to
("in"), or asks for an answer of which one row is computed ("out"), so that next to nothing is computed. Each round
times every way in turning order; the medians go to benchmarks/results/ray-<device>.json. Takes about three minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from runner import MALLOC, ROOT, SERVICE, Measured, Option, run
from serving import MIB, Connection, message, process, ready, service, until

sys.path.append(str(ROOT))  # Ray is started as the tests do
from tests.support.ray_cluster import deploy, free_port

os.environ.pop("TRITON_INTERPRET", None)  # which the tests set: nothing is to be interpreted here

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


def messages() -> dict[tuple[str, str], bytes]:
    """By direction and size."""
    found = {}
    one = np.array([1], np.int64)
    for name, size in SIZES.items():
        k = np.zeros((1, 1, size // 2 // 256, 64), np.float32)  # half of it is v
        found["in", name] = message({"q": k[:, :, :1], "kv_lengths": one, "k": k, "v": k})
        q = np.zeros((1, 1, size // 1024, 1), np.float32)  # 256 float32 of o for each
        found["out", name] = message(
            {"q": q, "k": q[:, :, :1], "v": np.ones((1, 1, 1, 256), np.float32), "q_lengths": one}
        )
    return found


@contextlib.contextmanager
def plain_uvicorn() -> Iterator[int]:
    """The port of the application on uvicorn as it comes."""
    port = free_port()
    with process([sys.executable, "-c", PLAIN, str(port)], stderr=subprocess.DEVNULL) as child:

        def there() -> bool:
            with contextlib.suppress(OSError):
                return ready(port)
            return False

        until(there, child)
        yield port


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    measured = Measured()
    with contextlib.ExitStack() as inside:
        ports = [
            inside.enter_context(service())[1],
            inside.enter_context(plain_uvicorn()),
            *(inside.enter_context(deploy(haproxy=h, environment=MALLOC)).port for h in (False, True)),
        ]
        opened = [inside.enter_context(contextlib.closing(Connection(port))) for port in ports]
        connections = dict(zip(WAYS, opened, strict=True))
        for counts in range(asked.rounds + 1):  # the first does not count
            for (direction, size), body in messages().items():
                for way in WAYS if counts % 2 else reversed(WAYS):
                    for _ in range(asked.calls if SIZES[size] <= MIB else max(1, asked.calls // 10)):
                        seconds = connections[way].post("/attention", body).whole
                        if counts:
                            measured.add(f"{direction}, {size}, {way}", seconds)
    medians = {
        f"{direction}, {size}": {w: round(measured.median(f"{direction}, {size}, {w}") * 1e3, 2) for w in WAYS}
        for direction in ("in", "out")
        for size in SIZES
    }
    for what, ways in medians.items():
        print(f"{what:<12}", *(f"{way} {ms:>8}" for way, ms in ways.items()))
    return {"rounds": asked.rounds, "calls": asked.calls, "median_milliseconds": medians}


if __name__ == "__main__":
    calls = Option(20, "of a round, up to 1 MiB; a tenth of it above")
    run(measure, "ray", packages=(*SERVICE, "ray"), rounds=Option(9), calls=calls)
