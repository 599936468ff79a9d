"""The server for the HTTP fuzzer, and a check that answers, memory, descriptors and log are right after the attack."""

from __future__ import annotations

import asyncio
import http.client
from contextlib import closing
from typing import Any

import numpy as np
import psutil

from flashpoint_contract import wire
from tests.fuzz.http_cases import SMUGGLED, all_cases
from tests.fuzz.http_fuzz import attack

# Short timeouts for stalled bodies and idle connections, because the fuzzer waits until they expire.
SETTINGS = {"body_timeout": 1.0, "keep_alive": 1}
# Allowed growth of memory, by the allocator's arenas, and of descriptors, by connections whose end was not seen yet.
MIB, FDS = 32, 8


def forward(seed: int = 0) -> bytes:
    """Return the body of a small forward request, in safetensors, with tensors that depend on the seed."""
    rng = np.random.default_rng(seed)
    tensors = {name: rng.standard_normal((2, 3), dtype=np.float32) for name in "qkv"}
    head = wire.build_head([(name, "float32", t.shape) for name, t in tensors.items()], {"causal": "true"})
    return head + b"".join(t.tobytes() for t in tensors.values())


class Attacked:
    """A `server` of tests/support/servers.py, started with SETTINGS, and its state before the attack."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.port: int = server.port
        self.body = forward()
        self.right = self.answer(self.body)
        self._others = {seed: self.answer(forward(seed)) for seed in range(1, 9)}
        # These requests make the server allocate memory slots and start its JSON process before the first measurement.
        self.answer(b'{"q": [[0]], "k": [[0]], "v": [[0]]}', "application/json")
        asyncio.run(attack(self.port, all_cases(self.body, seed=-1, count=100), self.right))
        self._rss, self._fds = self._resources()
        self._said = len(server.lines)

    def answer(self, body: bytes, media: str = wire.MEDIA_TYPE) -> bytes:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request("POST", "/attention", body, {"Content-Type": media})
            response = connection.getresponse()
            assert response.status == 200, response.read()
            return response.read()

    def _resources(self) -> tuple[int, int]:
        """Return the resident memory in MiB and the number of descriptors, summed over the server's processes."""
        process = psutil.Process(self.server.pid)
        family = [process, *process.children(recursive=True)]
        return sum(p.memory_info().rss for p in family) >> 20, sum(p.num_fds() for p in family)

    def faults(self) -> list[str]:
        """Return a text for each change of answers, memory, descriptors or load, and for each log line of an error."""
        faults = [f"answer {s} differs" for s, right in self._others.items() if self.answer(forward(s)) != right]
        rss, fds = self._resources()
        if rss > self._rss + MIB:
            faults.append(f"{rss} MiB, where it held {self._rss}")
        if fds > self._fds + FDS:
            faults.append(f"{fds} descriptors, where it held {self._fds}")
        if any((load := self.server.get("/info")[1]["load"]).values()):
            faults.append(f"something is still inside: {load}")
        for line in self.server.lines[self._said :]:
            wanted = line.get("code") in ("deadline_exceeded", "transfer_encoding")
            if line["level"] == "error" or ((line.get("status") or 0) >= 500 and not wanted):
                faults.append(f"the log says: {line}")
            if SMUGGLED in str(line.get("route")):
                faults.append(f"a smuggled request was carried out: {line}")
        return faults + [f"noise: {text}" for text in self.server.noise]
