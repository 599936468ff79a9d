"""Start and stop the `flashpoint serve` of a load test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
from cases import CASES

import flashpoint

START = 240.0  # seconds until the server must be ready, with a cold import of torch on a busy machine
STOP = 30.0  # seconds from SIGTERM to SIGKILL


class ServerError(Exception):
    """The server did not become ready; the message is its log."""


class Server:
    """A server on a free port, with its defaults, that has answered each request of CASES once. Raises ServerError."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "server.log"
        with self._log.open("w") as stream:
            self._process = subprocess.Popen(
                [Path(sys.executable).parent / "flashpoint", "serve", "--host", "127.0.0.1", "--port", "0"],
                env={**os.environ, "FLASHPOINT_LOG_FORMAT": "json"},
                stderr=stream,
                start_new_session=True,  # Linux divides CPU time among sessions: callers cannot take the server's
            )
        try:
            self.url = self._ready()
            self._warm()
        except BaseException:
            self._process.kill()
            raise

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _warm(self) -> None:
        """Send each request once, so that the load does not measure the cost of first calls."""
        for case in (case for kind in CASES.values() for case in kind):
            answer = httpx.post(self.url + case.path, content=case.body, headers=case.headers, timeout=START)
            answer.raise_for_status()
            case.check(answer.content)

    def memory(self) -> int:
        """Return the resident bytes of all processes; shared memory counts in each."""
        return sum(process.memory_info().rss for process in self.processes())

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the server, the HTTP process first."""
        main = psutil.Process(self._process.pid)
        return [main, *main.children(recursive=True)]

    def stop(self) -> int:
        """Send SIGTERM, and return the exit code."""
        self._process.terminate()
        try:
            return self._process.wait(STOP)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _ready(self) -> str:
        deadline = time.monotonic() + START
        while time.monotonic() < deadline and self._process.poll() is None:
            if (url := self._listening()) is not None:
                with flashpoint.Client(url) as client:
                    if client.ready():
                        return url
            time.sleep(0.05)
        raise ServerError(self._log.read_text())

    def _listening(self) -> str | None:
        return next((str(entry["url"]) for entry in self._entries() if entry["event"] == "listening"), None)

    def read(self) -> set[str]:
        """Return the ids of the requests that the server has begun to read."""
        return {entry["request_id"] for entry in self._entries() if entry["event"] == "request"}

    def _entries(self) -> Iterator[dict[str, Any]]:
        for line in self._log.read_text().splitlines():
            if line.startswith("{") and line.endswith("}"):  # the last line may be incomplete
                yield json.loads(line)
