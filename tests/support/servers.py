"""Real `flashpoint serve` processes on ephemeral ports of 127.0.0.1."""

import atexit
import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from tests.conftest import DEVICE

# The file to which HTTP processes append their long steps (flashpoint_server.http.steps). tests/conftest.py reads it.
STEPS = Path(tempfile.mkdtemp(prefix="flashpoint-test-")) / "steps"
read = 0  # the number of its lines that were read
atexit.register(shutil.rmtree, STEPS.parent, ignore_errors=True)
STARTS = os.environ.get("FLASHPOINT_TEST_STARTS")  # a file for a line of JSON for each start, with its test
START_SECONDS = 600  # a start takes 4 s on an idle machine, minutes on a busy one


class ServerProcess:
    """A server on an ephemeral port of 127.0.0.1; `lines` are the parsed lines of its log so far."""

    def __init__(self, command, environment):
        if STARTS:
            with open(STARTS, "a", encoding="utf-8") as file:
                file.write(f"{json.dumps([os.environ.get('PYTEST_CURRENT_TEST'), *command[1:]])}\n")
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, text=True)
        self.pid = self.process.pid
        self.lines = []
        self.noise = []  # lines that are not JSON
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            listening = self.wait_for_line(lambda line: line["event"] == "listening")
        except BaseException:
            self.end()
            raise
        self.port, self.url = listening["port"], listening["url"]

    def _read(self):
        for text in self.process.stderr:
            try:
                self.lines.append(json.loads(text))
            except ValueError:
                self.noise.append(text)

    def wait_for_line(self, matches):
        """Wait for a matching log line; return the first one."""
        return wait_for(
            lambda: next((line for line in list(self.lines) if matches(line)), None),
            lambda: f"the log has no such line: {self.lines[-5:]} {self.noise}",
            stop=lambda: self.process.poll() is not None and not self._reader.is_alive(),
        )

    def wait_for_request(self, request_id):
        """Wait for the end of a request; return its log line."""
        return self.wait_for_line(lambda line: line["event"] == "request" and line["request_id"] == request_id)

    def get(self, path):
        """Return status and parsed JSON of a GET."""
        with contextlib.closing(
            http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_SECONDS)
        ) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, json.load(response)

    def children(self, module):
        """Return the pids of the server's descendants that run its `module`, or the tests' replacement of it."""
        below = psutil.Process(self.pid).children(recursive=True)
        names = {f"flashpoint_server.{module}", f"tests.support.faulty.{module.partition('.')[0]}"}
        found = []
        for child in below:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
                found += [child.pid] if names & set(child.cmdline()) else []
        return found

    @property
    def json_pid(self):
        """The process that reads and writes small texts in JSON."""
        pids = self.children("formats.codec_process")
        (pid,) = (pid for pid in pids if psutil.Process(pid).cmdline()[-1] == "json")
        return pid

    @property
    def engine_pid(self):
        (pid,) = self.children("engine.process")
        return pid

    def wait_ready(self):
        wait_for(lambda: self.get("/health/ready")[0] == 200, lambda: f"not ready: {self.lines} {self.noise}")
        return self

    def wait_exit(self):
        """Wait for the end of the process; return its exit code."""
        code = self.process.wait(START_SECONDS)
        self._reader.join()
        self.process.stderr.close()
        return code

    def stop(self):
        """End the server by SIGTERM, and check that it exits with 0 and logged only JSON."""
        try:
            if self.process.returncode is None:
                self.process.send_signal(signal.SIGTERM)
                assert self.wait_exit() == 0, (self.lines[-5:], self.noise)
            assert not self.noise, self.noise
        finally:
            self.end()

    def end(self):
        """Kill the server in any state, and release its pipe."""
        self.process.kill()
        self.wait_exit()


def wait_for(found, otherwise, stop=lambda: False, seconds=START_SECONDS):
    """Poll `found()` until it is true, and return its value.

    Fail with the text of `otherwise()` after `seconds`, or once `stop()` is true.
    """
    deadline, pause = time.monotonic() + seconds, 0.005
    while True:
        last = stop() or time.monotonic() > deadline  # first, so `found` is polled once more after a stop
        if value := found():
            return value
        assert not last, otherwise()
        time.sleep(pause)
        pause = min(1.5 * pause, 0.1)  # polling takes processor time from the awaited work


def serve(*, ready=True, interpret=False, program=("-m", "flashpoint_server.cli.serve"), environment=(), **settings):
    """Start a server with `settings` as flags and `environment` as more variables.

    With `interpret`, Triton's interpreter runs the kernels. On a GPU (`make gpu-serve`) `interpret` has no effect.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("FLASHPOINT_", "TRITON_INTERPRET"))}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in {"port": 0, "device": DEVICE, **settings}.items()]
    variables = {
        **inherited,
        "_FLASHPOINT_STEPS": str(STEPS),
        **({"TRITON_INTERPRET": "1"} if interpret and DEVICE == "cpu" else {}),
        **dict(environment),
    }
    server = ServerProcess([sys.executable, *program, *flags], variables)
    try:
        return server.wait_ready() if ready else server
    except BaseException:
        server.end()
        raise
