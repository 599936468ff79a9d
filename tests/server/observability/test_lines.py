"""The log never blocks the service: if its stderr is not read, the service drops and counts lines."""

import contextlib
import http.client
import json
import signal
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

from flashpoint_server.observability.lines import ROOM
from tests.conftest import DEVICE
from tests.support.gated import PROGRAM
from tests.support.messages import PATIENCE, ask, message, normal, post, read_metrics
from tests.support.servers import START_SECONDS, wait_for

PIPE = 1 << 16  # capacity of a pipe in bytes


SMALL = message({name: normal(2, 3) for name in "qkv"})


class Unread:
    """A server whose stderr is a pipe. After the server's start, only `read` reads it."""

    def __init__(self):
        command = [sys.executable, *PROGRAM, "--port=0", f"--device={DEVICE}", "--shutdown-timeout=5"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE)
        self.lines = []
        self.read(lambda line: line["event"] == "listening")
        self.port, self.url = self.lines[-1]["port"], self.lines[-1]["url"]
        wait_for(lambda: ask(self, "/health/ready").status == 200, lambda: self.lines)

    def read(self, until):
        """Read lines of the log up to the first for which `until` is true."""
        while not (self.lines and until(self.lines[-1])):
            text = self.process.stderr.readline()
            assert text, "the server has ended"
            self.lines.append(json.loads(text))

    def dropped(self, process):
        return read_metrics(self)[f'flashpoint_log_lines_dropped_total{{process="{process}"}}']

    def fill(self):
        """Send so many failing requests that their log lines, of 4 kB each, exceed the queue of lines and the pipe."""
        before = self.dropped("http-0")
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        with contextlib.closing(connection):
            for _ in range((ROOM + PIPE) // 3000):
                connection.request("GET", "/fail")
                answer = connection.getresponse()
                answer.read()
                assert answer.status == 500
        assert self.dropped("http-0") > before

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()


@pytest.fixture
def unread():
    server = Unread()
    yield server
    server.end()


@pytest.mark.slow
def test_a_server_whose_log_nobody_reads_serves_on_counts_what_it_drops_and_ends(unread):
    """A server whose log is not read continues to serve, counts the lines that it drops, and logs the counts later.

    The engine drops lines, too, and sends its count with its next answer.
    """
    unread.fill()
    assert ask(unread, "/health/live").status == 200
    assert post(unread, "/attention", SMALL, x_request_id="loud-1").status == 200
    assert post(unread, "/attention", SMALL).status == 200
    wait_for(lambda: unread.dropped("engine-cpu") > 0, lambda: "the engine counts nothing")
    dropped = [unread.dropped("http-0"), unread.dropped("engine-cpu")]

    def notices():
        return [line for line in unread.lines if line["event"] == "log lines dropped"]

    # A process may log its count in two lines, if it drops more lines after the first was written.
    unread.read(lambda _: sum(line["lines"] for line in notices()) >= sum(dropped))
    assert {line["level"] for line in notices()} == {"warning"}
    assert len(notices()) >= 2

    unread.fill()
    unread.process.send_signal(signal.SIGTERM)
    assert unread.process.wait(START_SECONDS) == 0


def test_what_python_writes_to_stderr_waits_for_no_reader():
    """`print`, warnings and tracebacks do not block a process, although they exceed the capacity of an unread pipe."""
    program = textwrap.dedent(f"""
        import sys, threading, warnings
        from flashpoint_server.observability import logs

        def fail():
            raise ValueError("x" * {PIPE})

        logs.configure("json", "info")
        print("y" * {PIPE}, file=sys.stderr)
        warnings.warn("z" * {PIPE})
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        fail()
    """)
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE) as ran:
        try:
            assert ran.wait(START_SECONDS) == 1
        finally:
            ran.kill()


def test_all_lines_are_written_before_the_end_of_a_process_whose_log_is_read():
    """The lines of two threads, and one just before the exit, are written whole and in order, or counted as dropped."""
    program = textwrap.dedent("""
        import threading
        import structlog
        from flashpoint_server.observability import logs

        logs.configure("json", "info")
        log = structlog.stdlib.get_logger("test")

        def write(name):
            for number in range(2000):
                log.info("said", by=name, number=number, long="x" * (number * 3))

        threads = [threading.Thread(target=write, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        log.info("last")
    """)
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE) as ran:
        lines = [json.loads(text) for text in ran.stderr]
        assert ran.wait(START_SECONDS) == 0
    said = [line for line in lines if line["event"] == "said"]
    numbers = {name: [line["number"] for line in said if line["by"] == name] for name in "ab"}
    dropped = sum(line["lines"] for line in lines if line["event"] == "log lines dropped")
    assert all(found == sorted(found) for found in numbers.values())
    assert len(said) + dropped + any(line["event"] == "last" for line in lines) == 4001
