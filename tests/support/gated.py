"""A server whose engine waits and fails on demand (tests/support/faulty), and the files that make it continue."""

import contextlib
import os

from tests.support.messages import post
from tests.support.servers import wait_for
from tests.support.sockets import nothing_inside, send

PROGRAM = ("-m", "tests.support.faulty.server")


def parts_of(server, name):
    """Return the log lines of those parts of a request that have started."""
    return [line for line in list(server.lines) if line["event"] == "part" and line["request_id"] == name]


def wait_for_parts(server, name, count, stop=lambda: False):
    """Wait until `count` parts of a request have started. Their log lines may come after its answer."""
    wait_for(lambda: len(parts_of(server, name)) >= count, lambda: f"{name} has not {count} parts", stop)


class GatedServer:
    """A server process, started by `start` with `settings`, whose requests can wait at gates (faulty/engine.py).

    A gate is a file in `folder`. With `closed`, the engine waits at its start until the test removes the file
    `gate("closed")`.
    """

    def __init__(self, start, folder, *, closed=False, environment=(), **settings):
        self._gates = folder / "open"
        if closed:
            self.gate("closed").touch()
        self.server = start(
            program=PROGRAM,
            log_level="debug",
            ready=not closed,
            environment={"FLASHPOINT_TEST_GATE": str(self._gates), **dict(environment)},
            **settings,
        )

    def gate(self, which):
        return self._gates.with_suffix(f".{which}")

    def begun(self, name):
        """Return whether the engine has started to compute the request with this id."""
        return self._said("begin", name)

    def _said(self, event, name):
        lines = list(self.server.lines)
        return any(line["event"] == event and line.get("request_id") == name for line in lines)

    def wait_begun(self, name):
        wait_for(lambda: self.begun(name), lambda: f"{name} has not begun: {self.server.lines[-9:]}")

    def wait_queued(self, name):
        """Wait until the request with this id is in the engine's queue."""
        wait_for(lambda: self._said("queued", name), lambda: f"{name} is not queued")

    def post(self, pool, name, body, path="/attention", **headers):
        """Post in the background; return the answer's future once the request is in the engine's queue or answered.

        The id of the request, `future.name`, is `name` and a unique suffix.
        """
        name = f"{name}-{os.urandom(4).hex()}"
        future = pool.submit(post, self.server, path, body, x_request_id=name, **headers)
        future.name = name
        wait_for(lambda: self._said("queued", name) or future.done(), lambda: f"{name} is not queued")
        return future

    @contextlib.contextmanager
    def busy(self, pool, body, which="gate", path="/attention", **headers):
        """Keep the engine busy with the request `body` inside the block; yield its future.

        The request waits at a gate, which opens at the end of the block. If `which` is not "gate", another request must
        already keep the engine busy, and this request is only queued behind it.
        """
        if which == "gate":
            nothing_inside(self.server)
        self.gate(which).unlink(missing_ok=True)
        try:
            answer = self.post(pool, which, body, path, **headers)
            if which == "gate":
                self.wait_begun(answer.name)
            yield answer
        finally:
            self.gate(which).touch()

    @contextlib.contextmanager
    def client(self, body):
        """Let a client wait for its answer inside the block, then disconnect; yield the request's id."""
        name = f"leaves-{os.urandom(4).hex()}"
        with send(self.server, body, request_id=name):
            self.wait_queued(name)
            yield name
        line = self.server.wait_for_request(name)
        assert (line["status"], line["code"]) == (499, "client_gone")

    def wait_dropped(self, name):
        """Wait until the engine has removed the request from its queue."""
        wait_for(lambda: self._said("dropped", name), lambda: f"{name} is not dropped")

    def wait_held(self, name):
        """Wait until the computation of the request with this id has reached a gate and waits there."""
        wait_for(lambda: self._said("held", name), lambda: f"{name} is not held")

    def wait_stopped(self, name):
        """Wait until the engine knows that it must stop this running verification, because its client disconnected."""
        wait_for(lambda: self._said("stopped", name), lambda: f"{name} is not stopped")

    def blocks(self, name):
        """Return the numbers of the started blocks of a verification."""
        lines = list(self.server.lines)
        return [line["number"] for line in lines if line["event"] == "block" and line["request_id"] == name]

    def inside(self):
        return self.server.get("/info")[1]["load"]["requests"]
