"""Callers of the service, one class for each kind. They check every answer.

    .venv/bin/locust -f loadtests/locustfile.py --host http://localhost:8000 Mix

opens locust's page, which starts and shows callers; `make loadtest` needs no page. A caller sends bytes that were made
in advance, and checks the answer after the time of the call has been measured. With `--calls-per-second` each caller
keeps its rate whatever the server does (an open loop, in which waiting callers do not hide a stall). Without it, a
caller calls again as soon as its answer comes (a closed loop).
"""

from __future__ import annotations

import math
import random
import secrets
from argparse import ArgumentParser

import gevent
from cases import CASES, WRONG, WrongAnswerError
from locust import FastHttpUser, constant_throughput, events, task

TIMEOUT = 30.0  # network timeout of a call, in seconds; X-Timeout-Ms also limits a call of an open loop


@events.init_command_line_parser.add_listener
def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--calls-per-second", type=float, default=0.0, help="rate of one caller; 0, the default: no wait between calls"
    )


class Caller(FastHttpUser):
    """A simulated client of the service. Each call sends a random request of CASES, of a random kind in `kinds`."""

    abstract = True
    kinds: tuple[str, ...]
    network_timeout = TIMEOUT

    def on_start(self) -> None:
        if self.pace:
            # Random, because otherwise all callers would call at the same moment. At least one period, because
            # constant_throughput counts from a caller's start: a first call within it would align callers again.
            gevent.sleep(random.uniform(1, 2) / self.pace)

    def wait_time(self) -> float:
        return constant_throughput(self.pace)(self) if self.pace else 0.0

    @property
    def pace(self) -> float:
        return self.environment.parsed_options.calls_per_second

    @task
    def call(self) -> None:
        kind = random.choice(self.kinds)
        case = random.choice(CASES[kind])
        id = secrets.token_hex(8)
        headers = {**case.headers, "X-Request-Id": id}
        max_ms = (
            1000 / self.pace if self.pace else math.inf
        )  # an answer that comes after the next call is due is too late
        if self.pace:
            headers["X-Timeout-Ms"] = str(int(max_ms))
        with self.client.post(
            case.path, data=case.body, headers=headers, name=kind, context={"id": id}, catch_response=True
        ) as answer:  # here, locust has already measured the time of the call
            if answer.status_code != 200:
                answer.failure(refusal(answer))
                return
            try:
                case.check(answer.content)
                if answer.request_meta["response_time"] > max_ms:
                    answer.failure("late: the answer came after the deadline")
            except WrongAnswerError as error:
                answer.failure(f"{WRONG}: {error}")


def refusal(answer) -> str:
    """Return why a call failed: the status with the answer's `code` (in /v2: its `error`), or why no answer came."""
    if not answer.status_code:
        return f"no answer: {type(answer.error).__name__}"
    document = answer.json() if answer.content else {}
    return f"{answer.status_code} {document.get('code', document.get('error'))}"


class Forward(Caller):
    kinds = ("forward",)


class Gradient(Caller):
    kinds = ("gradient",)


class Mixed(Caller):
    """Many lengths, forward and gradient."""

    kinds = ("mixed",)


class Decode(Caller):
    """One query against many keys, as in a step of decoding."""

    kinds = ("decode",)


class Json(Caller):
    kinds = ("json",)


class Oip(Caller):
    """Forward and gradient by the Open Inference Protocol, tensors as bytes."""

    kinds = ("oip",)


class Mix(Caller):
    """All of these kinds; forwards are the most frequent."""

    kinds = ("forward",) * 4 + ("gradient",) * 2 + ("mixed",) * 2 + ("decode", "json", "oip")


KINDS: dict[str, type[Caller]] = {
    "forward": Forward, "gradient": Gradient, "mixed": Mixed, "decode": Decode, "json": Json, "oip": Oip, "mix": Mix,
}  # fmt: skip
