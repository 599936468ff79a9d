"""A `flashpoint serve` of the load test's own."""

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

START = 240.0  # seconds for the server to be ready, a cold import of torch included, on a machine with much else to do
STOP = 30.0


class ServerError(Exception):
    """It did not get ready; the message is its log."""


class Server:
    """On a free port of this machine, with its defaults, ready once it is made. Raises ServerError."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "server.log"
        with self._log.open("w") as stream:
            self._process = subprocess.Popen(
                [Path(sys.executable).parent / "flashpoint", "serve", "--host", "127.0.0.1", "--port", "0"],
                env={**os.environ, "FLASHPOINT_LOG_FORMAT": "json"},
                stderr=stream,
                start_new_session=True,  # Linux shares cores out by sessions: its callers are not to take its part
            )
        try:
            self.url = self._ready()
        except BaseException:
            self._process.kill()
            raise

    def warm(self) -> None:
        """Ask each request once: what a first call has to start is not what the load is to show."""
        for case in (case for kind in CASES.values() for case in kind):
            answer = httpx.post(self.url + case.path, content=case.body, headers=case.headers, timeout=START)
            answer.raise_for_status()
            case.check(answer.content)

    def memory(self) -> int:
        """Resident bytes of all its processes; what they share counts in each."""
        return sum(process.memory_info().rss for process in self.processes())

    def processes(self) -> list[psutil.Process]:
        """All of its own, the one that speaks HTTP first."""
        own = psutil.Process(self._process.pid)
        return [own, *own.children(recursive=True)]

    def stop(self) -> int:
        """Its exit code, after SIGTERM."""
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
        """The ids of the requests that it has begun to read."""
        return {entry["request_id"] for entry in self._entries() if entry["event"] == "request"}

    def _entries(self) -> Iterator[dict[str, Any]]:
        for line in self._log.read_text().splitlines():
            if line.startswith("{") and line.endswith("}"):  # the last line may be half written
                yield json.loads(line)
