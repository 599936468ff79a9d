"""`make loadtest`: a server of its own on a free port, locust against it for 30 seconds, the summary.

Exits with 0 when every answer was right, 1 when one was not or none came, 2 when the server did not start or stop.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import flashpoint

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
START = 60.0  # seconds for the server to be ready, a cold import of torch included
STOP = 30.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Load a server of its own and check every answer.")
    parser.add_argument("--seconds", type=int, default=30, help="default: %(default)s")
    parser.add_argument("--users", type=int, default=8, help="callers, each at a fixed rate; default: %(default)s")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "log") as url:
        locust = subprocess.run(
            [
                BIN / "locust", "--locustfile", HERE / "locustfile.py", "--host", url, "--headless", "--only-summary",
                "--users", str(arguments.users), "--spawn-rate", str(arguments.users),
                "--run-time", f"{arguments.seconds}s", "--stop-timeout", "10",
            ],
            check=False,
        )  # fmt: skip
    return 1 if locust.returncode else 0


@contextmanager
def serving(log: Path) -> Iterator[str]:
    """A `flashpoint serve` of its own, ready; its address. Its log is shown when it does not start or end well."""
    with log.open("w") as stream:
        server = subprocess.Popen(
            [BIN / "flashpoint", "serve", "--host", "127.0.0.1", "--port", "0"],
            env={**os.environ, "FLASHPOINT_LOG_FORMAT": "json"},
            stderr=stream,
        )
    try:
        url = wait_until_ready(server, log)
        yield url
    finally:
        server.terminate()
        try:
            code = server.wait(STOP)
        except subprocess.TimeoutExpired:
            server.kill()
            code = server.wait()
        if code != 0:
            print(log.read_text(), f"the server ended with {code}", sep="\n", file=sys.stderr)
            sys.exit(2)


def wait_until_ready(server: subprocess.Popen[bytes], log: Path) -> str:
    """The address that the server's log names, once it is ready there."""
    deadline = time.monotonic() + START
    while time.monotonic() < deadline and server.poll() is None:
        if (url := listening(log)) is not None:
            with flashpoint.Client(url) as client:
                if client.ready():
                    return url
        time.sleep(0.05)
    print(log.read_text(), "the server did not get ready", sep="\n", file=sys.stderr)
    sys.exit(2)


def listening(log: Path) -> str | None:
    for line in log.read_text().splitlines():
        if line.startswith("{") and line.endswith("}"):  # the last line may be half written
            entry = json.loads(line)
            if entry.get("event") == "listening":
                return str(entry["url"])
    return None


if __name__ == "__main__":
    sys.exit(main())
