"""A gRPC server whose launches wait until a test opens a gate, and calls that are known to be in the engine's queue."""

import contextlib
import json
import os
import re
import urllib.request

import grpc

from tests.conftest import DEVICE
from tests.support.gated import GatedServer
from tests.support.oip.grpc_calls import HANG, Caller, port_of, request
from tests.support.oip.problem import problem
from tests.support.servers import serve, wait_for

ALL, LOOKS = ((("authorization", f"Bearer {key}"),) for key in ("all", "looks"))


class HeldServer(GatedServer):
    """A server with `settings`. With `interpret`, it runs Triton's kernels; a launch then computes several requests."""

    def __init__(self, folder, *, interpret=False, **settings):
        super().__init__(serve, folder, interpret=interpret, grpc_port=0, shutdown_timeout=HANG, **settings)
        self.caller = Caller(port_of(self.server))
        tensors = {name: t[:, :, :5] for name, t in problem().items()}
        self.question = request(tensors, backend="triton" if interpret or DEVICE != "cpu" else "reference")

    def stop(self):
        self.caller.close()
        self.server.stop()

    def begin(self, name, **how):
        """Call in the background; `call.name`, the id of the request, is `name` and a unique suffix."""
        name = f"{name}-{os.urandom(4).hex()}"
        call = self.caller.begin(self.question, metadata=(*ALL, ("x-request-id", name)), **how)
        call.name = name
        return call

    def queue(self, name):
        """Start a call without a deadline, and return it once the request is in the engine's queue or answered."""
        call = self.begin(name)
        wait_for(lambda: self._said("queued", call.name) or call.done(), lambda: f"{call.name} is not queued")
        assert not call.done() or call.code() is grpc.StatusCode.OK, call.details()
        return call

    @contextlib.contextmanager
    def shut(self, which="gate"):
        """Yield a request id whose launches wait at the gate `which` until the block ends."""
        self.gate(which).unlink(missing_ok=True)
        try:
            yield f"{which}-{os.urandom(4).hex()}"
        finally:
            self.gate(which).touch()

    @contextlib.contextmanager
    def busy(self, which="gate"):
        """Keep a call in a launch until the block ends; yield the call.

        If `which` is not "gate", another call must already be in a launch, and this call is only queued.
        """
        if which == "gate":
            self.wait_inside(0)
        with self.shut(which):
            call = self.queue(which)
            if which == "gate":
                self.wait_begun(call.name)
            yield call

    def overdue(self):
        """Return a call whose deadline passed while it was in the engine's queue; try longer and longer deadlines."""
        inside = self.inside()
        for doubling in range(10):
            call = self.begin("overdue", timeout=0.25 * 2**doubling)
            assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED, call.details()
            self.wait_inside(inside)
            if self._said("queued", call.name):
                return call
        raise AssertionError("no call gets inside before its deadline")

    def asked(self, path):
        asking = urllib.request.Request(f"{self.server.url}{path}", headers=dict(ALL))
        with urllib.request.urlopen(asking, timeout=HANG) as answer:
            return answer.read().decode()

    def inside(self):
        return json.loads(self.asked("/info"))["load"]["requests"]

    def wait_inside(self, count):
        """Wait until `count` requests are inside the server."""
        wait_for(lambda: self.inside() == count, lambda: f"{self.inside()} inside, never {count}")

    def metrics(self):
        return {n: float(v) for n, v in re.findall(r"^([^#\s]+) (\S+)$", self.asked("/metrics"), re.MULTILINE)}
