"""The service during fault injection: `flashpoint serve` on a fixed port, its processes by role, their resources."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from email.message import Message
from pathlib import Path

import psutil

from chaos import clock, keys
from tests.support.servers import ServerProcess

START = 300.0  # timeout in seconds to become ready: an engine needs 5 s of a core, on a possibly busy machine
POLL = 0.1  # seconds between two checks
SOCKET = 30.0  # timeout in seconds of requests for health, metrics and lists of caches
MIB = 1 << 20
SEGMENT = "flashpoint-staging"

SETTINGS = {
    "body_timeout": 3, "staging_bytes": 128 * MIB, "queue_limit": 64, "hang_timeout": 10, "shutdown_timeout": 60,
    "cache_bytes": 12 * MIB,
}  # fmt: skip


@dataclass(frozen=True)
class Life:
    """One run of an engine process. Its caches are lost when it ends.

    `starts` is the number of starts of the service so far. A start makes the ids of all earlier caches unknown.
    """

    starts: int
    engine: psutil.Process | None

    @property
    def over(self) -> bool:
        """Return whether the engine is gone."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return self.engine is None or self.engine.status() == psutil.STATUS_ZOMBIE or not self.engine.is_running()
        return True


@dataclass(frozen=True)
class Held:
    """The resources of a process. `private` and `shared` are in bytes; `shared` is mapped staging memory."""

    private: int
    shared: int
    descriptors: int
    threads: int


class Service:
    """Runs the service. A fault that ends it starts it again on its port. `contained`: $TMPDIR, /dev/shm have 1 MiB."""

    def __init__(self, workers: int, *, contained: bool, program: tuple[str, ...] = (), environment=()) -> None:
        self.workers = workers
        self.contained = contained
        self.clock = clock.Clock.build()
        self._program = program or ("-m", "chaos.contained" if contained else "flashpoint_server.cli.serve")
        self._environment = dict(environment)
        self.port = 0
        self.server: ServerProcess | None = None
        self.starts = 0
        self.keys = keys.write()
        self.temporary = Path(tempfile.mkdtemp(prefix="chaos-tmp-")) / "tmp"  # the service's $TMPDIR
        self._collector = socket.create_server(("127.0.0.1", 0))  # a collector of traces that never answers
        self._life = Life(0, None)

    def start(self) -> None:
        self.starts += 1
        variables = {k: v for k, v in os.environ.items() if not k.startswith("FLASHPOINT_")}
        variables["TMPDIR"] = str(self.temporary)
        if not self.contained:
            self.temporary.mkdir(exist_ok=True)
        variables |= {**self._environment, **(self.clock.environment if self.clock else {})}
        flags = {"port": self.port, "device": "cpu", "workers": self.workers, **SETTINGS}
        flags["api_keys_file"] = self.keys
        flags["otlp_endpoint"] = f"http://127.0.0.1:{self._collector.getsockname()[1]}/v1/traces"
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
        self.server = ServerProcess([sys.executable, *self._program, *flags], variables)
        self.port = self.server.port

    @property
    def pid(self) -> int:
        assert self.server is not None
        return self.server.pid

    def ready(self) -> bool:
        """Return whether /health/ready answers 200; return False if no answer comes."""
        return self._get("/health/ready")[0] == 200

    def date(self) -> str | None:
        """Return the Date header of an answer, which shows the service's wall clock; None if no answer comes."""
        return self._get("/health/live")[1].get("date")

    def samples(self) -> dict[str, float]:
        """Return the samples of /metrics, by name and labels; empty if no answer comes."""
        text = self._get("/metrics", keys.LOAD)[2].decode()
        return {name: float(value) for name, value in re.findall(r"^([^#\s]+) (\S+)$", text, re.MULTILINE)}

    def caches(self, owner: str) -> list[dict] | None:
        """Return the caches of the key called `owner`; None unless the service answers 200."""
        status, _, body = self._get("/caches", owner)
        return json.loads(body)["caches"] if status == 200 else None

    def _get(self, path: str, owner: str | None = None) -> tuple[int, Message, bytes]:
        """Return the status, headers and body of an answer; (0, no headers, no body) if no answer comes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SOCKET)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", path, headers=keys.bearer(owner) if owner else {})
            response = connection.getresponse()
            return response.status, response.headers, response.read()
        return 0, Message(), b""

    def wait_ready(self, bound: float = START) -> float | None:
        """Return the seconds until the service is ready and its HTTP and engine processes run; None after `bound` s."""
        began = time.monotonic()
        while (passed := time.monotonic() - began) < bound:
            if self.ready() and self.whole():
                return passed
            time.sleep(POLL)
        return None

    # Processes

    def roles(self) -> dict[str, list[psutil.Process]]:
        """Return the processes by role: main, http, engine, and codec, which reads and writes JSON.

        With several workers, main is the supervisor. With one worker, it is also the HTTP process.
        """
        by_role: dict[str, list[psutil.Process]] = {"main": [], "http": [], "engine": [], "codec": []}
        with contextlib.suppress(psutil.NoSuchProcess):
            main = psutil.Process(self.pid)
            by_role["main"] = [main]
            if self.workers == 1:
                by_role["http"] = [main]
            for process in main.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.status() != psutil.STATUS_ZOMBIE and (role := role_of(process.cmdline())):
                        by_role[role].append(process)
        return by_role

    def whole(self) -> bool:
        roles = self.roles()
        return len(roles["http"]) == self.workers and len(roles["engine"]) == 1

    def life(self) -> Life:
        """Return the `Life` of the current engine."""
        if self._life.starts != self.starts or self._life.over:
            engines = self.roles()["engine"]
            self._life = Life(self.starts, engines[0] if engines else None)
        return self._life

    def held(self) -> dict[str, Held]:
        """Return, by role, the largest use of each resource by a process. TCP connections are not in `descriptors`."""
        return {role: most([held(p) for p in processes]) for role, processes in self.roles().items() if processes}

    # End the service

    def discard(self) -> None:
        """Remove the temporary files of the service."""
        self._collector.close()
        for folder in (self.keys.parent, self.temporary.parent):
            shutil.rmtree(folder)
        if self.clock:
            self.clock.discard()

    def terminate(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal; return the exit code when every process is gone, or -1 if one stays."""
        family = [p for processes in self.roles().values() for p in processes]
        assert self.server is not None
        self.server.process.send_signal(number)
        try:
            code = self.server.wait_exit()
        except Exception:
            self.server.process.kill()
            self.server.process.wait()
            return -1
        _, alive = psutil.wait_procs(family, timeout=START)
        return code if not alive else -1


def role_of(command: list[str]) -> str | None:
    """Return a process's role from its command line; None for others, such as helpers of multiprocessing."""
    text = " ".join(command)
    words = {"flashpoint_server.cli.worker": "http", "engine.process": "engine", "faulty.engine": "engine"}
    words["codec_process"] = "codec"
    return next((role for word, role in words.items() if word in text), None)


def held(process: psutil.Process) -> Held:
    info = process.memory_info()
    maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    shared = sum(_size(line) for line in maps if SEGMENT in line)
    connections = len(process.net_connections("tcp"))
    return Held(info.rss - info.shared, shared, process.num_fds() - connections, process.num_threads())


def most(processes: list[Held]) -> Held:
    return Held(*(max(values) for values in zip(*(vars(each).values() for each in processes), strict=True)))


def _size(line: str) -> int:
    start, _, end = line.split()[0].partition("-")
    return int(end, 16) - int(start, 16)
