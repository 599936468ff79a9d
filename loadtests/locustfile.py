"""Callers of the service, a class a kind, every answer checked.

    .venv/bin/locust -f loadtests/locustfile.py --host http://localhost:8000 Mix

opens locust's page, from where callers are started and watched; `make loadtest` asks its questions by itself. A caller
sends bytes that were made before, and its answer is checked once its time has been taken. With `--calls-per-second`
each caller keeps its rate whatever the server does (an open loop, in which a stall is not hidden by callers that
wait); without, it calls again as soon as it is answered (a closed loop).
"""

from __future__ import annotations

import math
import random
import secrets
from argparse import ArgumentParser

import gevent
from cases import CASES, WrongAnswerError
from locust import FastHttpUser, constant_throughput, events, task

TIMEOUT = 30.0  # seconds: what takes longer in a closed loop is a failure


@events.init_command_line_parser.add_listener
def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--calls-per-second", type=float, default=0.0, help="of one caller; 0, the default: each calls again at once"
    )


class Caller(FastHttpUser):
    """A program that computes attention: each call is of one of its `kinds`, at random."""

    abstract = True
    kinds: tuple[str, ...]
    network_timeout = TIMEOUT

    def on_start(self) -> None:
        if self.pace:
            # Else all of them would call at the same moment. constant_throughput counts from a caller's birth on: who
            # begins within its first period is in step with the others of its age.
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
        most = (
            1000 / self.pace if self.pace else math.inf
        )  # who is not answered when the next call is due is so too late
        if self.pace:
            headers["X-Timeout-Ms"] = str(int(most))
        with self.client.post(
            case.path, data=case.body, headers=headers, name=kind, context={"id": id}, catch_response=True
        ) as answer:  # its time has been taken here
            if answer.status_code != 200:
                answer.failure(refusal(answer))
                return
            try:
                case.check(answer.content)
                if answer.request_meta["response_time"] > most:
                    answer.failure("late: the answer came after the deadline")
            except WrongAnswerError as error:
                answer.failure(error)


def refusal(answer) -> str:
    """Return the reason of a refusal: a problem's code, the words of /v2, or why no answer came."""
    if not answer.status_code:
        return f"no answer: {type(answer.error).__name__}"
    said = answer.json() if answer.content else {}
    return f"{answer.status_code} {said.get('code', said.get('error'))}"


class Forward(Caller):
    kinds = ("forward",)


class Gradient(Caller):
    kinds = ("gradient",)


class Mixed(Caller):
    """Lengths of many sizes, forward and gradient."""

    kinds = ("mixed",)


class Decode(Caller):
    """One query against long keys, as a step of decoding has it."""

    kinds = ("decode",)


class Json(Caller):
    kinds = ("json",)


class Oip(Caller):
    """Forward and gradient by the Open Inference Protocol, tensors as bytes."""

    kinds = ("oip",)


class Mix(Caller):
    """All of these at once, forwards most."""

    kinds = ("forward",) * 4 + ("gradient",) * 2 + ("mixed",) * 2 + ("decode", "json", "oip")


KINDS: dict[str, type[Caller]] = {
    "forward": Forward, "gradient": Gradient, "mixed": Mixed, "decode": Decode, "json": Json, "oip": Oip, "mix": Mix,
}  # fmt: skip
