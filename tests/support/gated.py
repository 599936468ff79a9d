"""A server whose engine waits and fails on demand (tests/support/faulty), and the gates that hold it."""

import contextlib
import os

from tests.support.messages import post
from tests.support.servers import wait_for
from tests.support.sockets import nothing_inside, send

PROGRAM = ("-m", "tests.support.faulty.server")


def parts_of(server, name):
    """The log lines of the parts of a request that have begun."""
    return [line for line in list(server.lines) if line["event"] == "part" and line["request_id"] == name]


def wait_for_parts(server, name, count, stop=lambda: False):
    """Until so many parts of a request have begun. Their lines may come after its answer."""
    wait_for(lambda: len(parts_of(server, name)) >= count, lambda: f"{name} has not {count} parts", stop)


class GatedServer:
    """`server` is the process, started by `start` with `settings`; the gates are files in `folder`.

    With `closed`, its engine waits at its start until `open("closed")`.
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
        """Whether the engine has begun to compute the request of this id."""
        return self._said("begin", name)

    def _said(self, event, name):
        lines = list(self.server.lines)
        return any(line["event"] == event and line.get("request_id") == name for line in lines)

    def wait_begun(self, name):
        wait_for(lambda: self.begun(name), lambda: f"{name} has not begun: {self.server.lines[-9:]}")

    def wait_queued(self, name):
        """Until the request of this id is in the engine's queue."""
        wait_for(lambda: self._said("queued", name), lambda: f"{name} is not queued")

    def post(self, pool, name, body, path="/attention", **headers):
        """Post in the background; returns the future, once the request is in the engine's queue or answered.

        The id of the request, `future.name`, is `name` and a suffix of its own.
        """
        name = f"{name}-{os.urandom(4).hex()}"
        future = pool.submit(post, self.server, path, body, x_request_id=name, **headers)
        future.name = name
        wait_for(lambda: self._said("queued", name) or future.done(), lambda: f"{name} is not queued")
        return future

    @contextlib.contextmanager
    def busy(self, pool, body, which="gate", path="/attention", **headers):
        """Inside, the engine computes the request `body` until the end; its future.

        With another gate than "gate", the request is only queued: it waits for what is computed before it.
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
        """Inside, a client waits for its answer; then it leaves, and the server has noticed that. The request's id."""
        name = f"leaves-{os.urandom(4).hex()}"
        with send(self.server, body, request_id=name):
            self.wait_queued(name)
            yield name
        line = self.server.wait_for_request(name)
        assert (line["status"], line["code"]) == (499, "client_gone")

    def wait_dropped(self, name):
        """Until the engine has taken the request out of its queue."""
        wait_for(lambda: self._said("dropped", name), lambda: f"{name} is not dropped")

    def wait_held(self, name):
        """Until the request of this id waits within what it computes."""
        wait_for(lambda: self._said("held", name), lambda: f"{name} is not held")

    def wait_stopped(self, name):
        """Until the engine knows that nobody waits for this verification, which it has begun."""
        wait_for(lambda: self._said("stopped", name), lambda: f"{name} is not stopped")

    def blocks(self, name):
        """The numbers of the blocks of a verification that have begun."""
        lines = list(self.server.lines)
        return [line["number"] for line in lines if line["event"] == "block" and line["request_id"] == name]

    def inside(self):
        return self.server.get("/info")[1]["load"]["requests"]
