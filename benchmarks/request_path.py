"""Record the way of warm calls through the code: `python benchmarks/request_path.py`, half a minute.

For each mode (a call of one kind) and each process it counts the files that a warm call passes, the calls of functions
in them (a resumed coroutine counts as a call), and the runs: how often the file changes from one call to the next. It
records the fewest of five calls, because a body may arrive in many pieces. Logging is left out, because its thread
works at any time.

For `POST /attention` it also lists every class of the server whose objects such a call makes or passes on, and how long
these objects live: for a call, for a connection, for a plan (all calls that mean the same), or as long as the process.
docs/architecture.md has the table, and tests/benchmarks/test_request_path.py compares it with the code.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from subprocess import run as run_program
from typing import Any, NamedTuple

import numpy as np
from forms import SAFETENSORS
from runner import Args, run
from serving import Child, Connection, family, service, until

import flashpoint

SMALL = (1, 8, 128, 64)
CALLS = 5  # of each mode, of which the one with the fewest calls of functions counts
KEYS = 1024  # of the cache over which a token is decoded
SETTLE_SECONDS = 0.5  # after an answer, until both processes have finished with the call
NOT_COUNTED = ("observability/lines.py", "cli/serving.py")
WINDOWS = "first", "again", "connection", "shape", "third"
TRACED = Path(__file__).resolve().parent / "traced"
# A child that has imported the library times nothing: it only writes the trace of its third call.
LIBRARY = """
import pathlib, sys, torch
from flashpoint_kernels import attention
torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 8, 128, 64).unbind()
sinks = torch.randn(8)
for call in range(3):
    if call == 2:
        import sitecustomize
        sitecustomize.begin()
        pathlib.Path(sys.argv[1], "on").write_text(sys.argv[2])
    attention(q, k, v, sinks=sinks)
"""


class Seen(NamedTuple):
    """An object in one window: the process, its class, and its number; −1 if it was being made.

    `holder` is the class of an object that has it as an attribute; "" if a function has it itself.
    """

    process: str
    module: str
    name: str
    number: int
    holder: str


class Trace:
    """The folder into which the traced processes write."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def begin(self, child: Child) -> None:
        """Let the processes of a server trace."""
        processes = family(child).values()
        for each in processes:
            each.send_signal(signal.SIGUSR2)
        until(lambda: all(Path(self.folder, f"{each.pid}.begun").exists() for each in processes), child)

    @contextmanager
    def window(self, name: str) -> Iterator[None]:
        """Trace what happens in the `with` block."""
        on = self.folder / "on"
        on.with_suffix(".new").write_text(name)
        on.with_suffix(".new").rename(on)
        try:
            yield
            time.sleep(SETTLE_SECONDS)
        finally:
            on.unlink()

    def _lines(self, window: str) -> Iterator[tuple[str, list[str]]]:
        """Yield the fields of each line of a window, with the number of the process."""
        for path in sorted(self.folder.glob("*.txt")):
            for line in path.read_text().splitlines():
                first, *fields = line.split("\t")
                if first == window:
                    yield path.stem, fields

    def counts(self, window: str) -> dict[str, dict[str, int]]:
        """Return files, calls and runs of each process that took part."""
        ways: dict[str, list[str]] = {}
        for process, fields in self._lines(window):
            if fields[0] != "@" and not fields[0].endswith(NOT_COUNTED):
                ways.setdefault(process, []).append(fields[0])
        return {
            _role(way): {
                "files": len(set(way)),
                "calls": len(way),
                "runs": 1 + sum(one != other for one, other in pairwise(way)),
            }
            for way in ways.values()
        }

    def objects(self, window: str) -> set[Seen]:
        return {
            Seen(process, fields[1], fields[2], int(fields[3]), fields[4])
            for process, fields in self._lines(window)
            if fields[0] == "@"
        }


def _role(way: Iterable[str]) -> str:
    """Return which process passes through these files."""
    files = set(way)
    if any(name.startswith("flashpoint_server/engine/loop") for name in files):
        return "engine"
    return "HTTP" if any(name.startswith("flashpoint_server/http/") for name in files) else "library"


def small(port: int, shape: tuple[int, ...] = SMALL) -> Callable[[], Any]:
    """Return a function that makes the same small call over one connection."""
    message = SAFETENSORS.whole(dict.fromkeys("qkv", np.random.default_rng(0).random(shape, np.float32)))
    connection = Connection(port)
    return lambda: connection.post("/attention", *message)


def ways(port: int) -> dict[str, Callable[[], Any]]:
    """Return a function for each mode, which makes one call."""
    rng = np.random.default_rng(0)
    q, k, v, do = rng.random((4, *SMALL), np.float32)
    client = flashpoint.Client(f"http://127.0.0.1:{port}")
    cache = client.cache(kv_heads=8, head_dim=64)
    cache.append(*rng.random((2, 1, 8, KEYS, 64), np.float32))
    one = q[:, :, :1]
    connection = Connection(port)

    def by_json(path: str, **tensors: Any) -> Callable[[], Any]:
        body = json.dumps({**{name: t[0, 0].tolist() for name, t in tensors.items()}, "softcap": 5.0}).encode()
        return lambda: connection.post(path, {"Content-Type": "application/json"}, body)

    return {
        "forward": small(port),
        "forward with softcap": lambda: client.attention(q, k, v, softcap=5.0),
        "forward in JSON": by_json("/attention", q=q, k=k, v=v),
        "gradients in JSON": by_json("/attention/grad", q=q, k=k, v=v, do=do),
        "decode over a cache": lambda: client.attention(one, one, one, caches=[cache]),
    }


def by_library(trace: Trace, mode: str) -> None:
    """Trace a call of the library in a process of its own."""
    run_program([sys.executable, "-P", "-c", LIBRARY, str(trace.folder), mode], check=True)
    (trace.folder / "on").unlink()


def lives(windows: dict[str, set[Seen]]) -> list[dict[str, str]]:
    """Return a row for each class: process, module, name, and how long its objects live at least.

    `windows` has the objects of the first call, of the same call ("again"), of the same call on a new connection, of a
    call of another shape, and of one of a third shape. An object may live as long as the process and be seen first with
    the other shape, but hardly with the third. All shapes have equally large tensors, and so the same slots.
    """
    kinds = {(one.process, one.module, one.name) for seen in windows.values() for one in seen}
    rows = []
    for process, module, name in sorted(kinds):
        ours = {
            window: {one.number for one in seen if (one.process, one.module, one.name) == (process, module, name)}
            for window, seen in windows.items()
        }
        first, again, connection, shape, third = (ours[name] for name in WINDOWS)
        if -1 in again or again - first:
            life = "call"
        elif -1 in connection or connection - again - first:
            life = "connection"
        else:
            life = "plan" if -1 in third or third - shape - connection - again - first else "process"
        rows.append({"process": process, "module": module, "name": name, "life": life})
    return rows


def classes(trace: Trace, port: int) -> list[dict[str, str]]:
    """Return a row for each class whose objects a warm `POST /attention` makes or passes on."""
    call, other, third = small(port), small(port, (2, 8, 64, 64)), small(port, (1, 16, 64, 64))
    for _ in range(3):
        call()
    with trace.window("first"):
        call()
        call()
    with trace.window("again"):
        call()
        call()
    with trace.window("connection"):
        small(port)()
    with trace.window("shape"):
        other()
    with trace.window("third"):
        third()
    found = {window: trace.objects(window) for window in WINDOWS}
    engines = {one.process for one in found["again"] if one.module == "flashpoint_server.engine.loop"}
    for window, seen in found.items():
        found[window] = {one._replace(process="engine" if one.process in engines else "HTTP") for one in seen}
    warm = {(one.module, one.name) for one in found["first"] | found["again"]}
    directly = lives({window: {one for one in seen if not one.holder} for window, seen in found.items()})
    of_calls = {row["name"] for row in directly if row["life"] in ("call", "plan")}
    # the records in attributes of what lives as long as a process, such as its settings, are not of the call
    seen = {window: {one for one in seen if not one.holder or one.holder in of_calls} for window, seen in found.items()}
    return [row for row in lives(seen) if (row["module"], row["name"]) in warm]


def measure(args: Args) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        trace, path = Trace(folder), os.pathsep.join(filter(None, [str(TRACED), os.environ.get("PYTHONPATH")]))
        os.environ.update(TRACE_FOLDER=folder, PYTHONPATH=path)
        with service() as (child, port, _):
            trace.begin(child)
            rows = classes(trace, port)
            counts = {}
            for mode, call in ({} if args.classes else ways(port)).items():
                for _ in range(3):
                    call()
                time.sleep(SETTLE_SECONDS)
                for number in range(CALLS):
                    with trace.window(f"{mode} {number}"):
                        call()
                each = [trace.counts(f"{mode} {number}") for number in range(CALLS)]
                counts[mode] = {
                    role: min((one[role] for one in each if role in one), key=lambda one: one["calls"])
                    for role in each[0]
                }
        if not args.classes:
            by_library(trace, mode := "library call with sinks")
            counts[mode] = trace.counts(mode)
        return {"rows": rows, "counts": counts}


if __name__ == "__main__":
    run(measure, "request-path", classes={"action": "store_true", "help": "list the classes only"})
