"""Callers of the service: forward and gradient through the client, every answer checked.

    .venv/bin/locust -f loadtests/locustfile.py --headless --users 8 --run-time 30s --host http://localhost:8000

`make loadtest` does this against a server of its own. Tensors and right answers are made once, before the load, so that
what is timed is the call. Each caller keeps a fixed rate whatever the server does: a stall shows as late answers and is
not hidden by callers that wait.
"""

import logging
import time
from dataclasses import dataclass

import numpy as np
from locust import User, constant_throughput, events, task
from locust.env import Environment
from numpy.typing import NDArray

import flashpoint

logging.getLogger("httpx").setLevel(logging.WARNING)  # locust's own log would show a line a call

Array = NDArray[np.float32]

RATE = 2.0  # calls a second of one caller: eight of them keep two CPU cores busy but not full
BOUND = 5e-6  # of the largest value: float32 against float64 at these lengths


@dataclass(frozen=True)
class Case:
    """Inputs (B,H,S,D) of one shape, and the answers by the definition, in float64."""

    name: str
    q: Array
    k: Array
    v: Array
    do: Array
    o: NDArray[np.float64]
    grads: tuple[NDArray[np.float64], ...]

    @classmethod
    def make(cls, batch: int, heads: int, length: int, dim: int, *, causal: bool) -> "Case":
        rng = np.random.default_rng(length)
        inputs = rng.standard_normal((4, batch, heads, length, dim)).astype(np.float32)
        q, k, v, do = inputs.astype(np.float64)
        scale = dim**-0.5
        s = scale * q @ k.swapaxes(-1, -2)
        if causal:
            s = np.where(np.tri(length, dtype=bool), s, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        o = p @ v
        dp = do @ v.swapaxes(-1, -2)
        ds = scale * p * (dp - (do * o).sum(-1, keepdims=True))
        grads = (ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ do)
        name = f"({batch},{heads},{length},{dim}){' causal' if causal else ''}"
        return cls(name, *inputs, o, grads)


CASES = [
    (Case.make(1, 8, 128, 64, causal=True), True),
    (Case.make(4, 4, 64, 32, causal=False), False),
    (Case.make(1, 2, 509, 40, causal=True), True),
]


def check(found: NDArray[np.float32], expected: NDArray[np.float64]) -> None:
    """Raises AssertionError where `found` is not the right answer."""
    error = np.abs(found - expected).max() / np.abs(expected).max()
    if not error <= BOUND:
        raise AssertionError(f"the answer is wrong by {error:.1e} of its largest value")


class Caller(User):
    """One program that computes attention: three forwards to a gradient."""

    wait_time = constant_throughput(RATE)

    def on_start(self) -> None:
        self.client = flashpoint.Client(self.host)
        self.turn = 0

    def on_stop(self) -> None:
        self.client.close()

    @task(3)
    def forward(self) -> None:
        case, causal = self.next_case()
        with self.timed("forward", case):
            check(self.client.attention(case.q, case.k, case.v, causal=causal), case.o)

    @task(1)
    def gradient(self) -> None:
        case, causal = self.next_case()
        with self.timed("gradient", case):
            found = self.client.attention_grad(case.do, case.q, case.k, case.v, causal=causal)
            for grad, expected in zip(found, case.grads, strict=True):
                check(grad, expected)

    def next_case(self) -> tuple[Case, bool]:
        self.turn += 1
        return CASES[self.turn % len(CASES)]

    def timed(self, kind: str, case: Case) -> "_Timed":
        return _Timed(self, kind, case)


class _Timed:
    """Reports what runs inside it to locust: its time, and its error as a failure."""

    def __init__(self, user: Caller, kind: str, case: Case) -> None:
        self.user, self.kind, self.case = user, kind, case

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if error is not None and not isinstance(error, Exception):
            return False  # locust ends the callers when the time is over, in the middle of a call
        self.user.environment.events.request.fire(
            request_type=self.kind,
            name=self.case.name,
            response_time=(time.perf_counter() - self.start) * 1000,
            response_length=self.case.o.size * 4 * (1 if self.kind == "forward" else 3),
            exception=error,
        )
        return error is not None


@events.quitting.add_listener
def fail_when_nothing_ran(environment: Environment, **_: object) -> None:
    """locust's exit code is 1 where a call failed; here also where there was none."""
    if environment.stats.total.num_requests == 0:
        environment.process_exit_code = 1
