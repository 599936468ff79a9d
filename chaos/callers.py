"""Callers are threads that repeat calls; this module records the outcome of each call.

Each caller has its own questions (`Question`), which are requests with known answers. The outcomes are:

right     the answer has the same bytes as that of an idle service
refused   the answer is a complete, documented error
lost      the connection broke: a violation unless a fault may break connections
wrong     anything else: other bytes, another caller's answer, an undocumented error, a 500
hung      no answer within the caller's timeout
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np

import flashpoint
from chaos.keys import LOAD, key_of
from chaos.questions import Question, draw, safetensors
from flashpoint_server.refusal import STATUS

if TYPE_CHECKING:
    from chaos.load import Load

HANG = 300.0  # timeout in seconds, above any deadline and above the start of an engine on a busy machine
DEADLINE = 60.0  # deadline in seconds, for callers that send one
THINK = 0.02  # seconds between two calls, so that the faults get processor time
AFTER_NOTHING = 0.05  # seconds before the next call after a connection failed
IDS = 8  # number of each key's newest caches whose ids are kept
REFUSALS = {code for code, status in STATUS.items() if status in (408, 429, 503, 504)}  # codes that a fault may cause
WORDS = {408, 429, 503, 504}  # statuses of refusals by /v2, which has no codes


@dataclass(frozen=True)
class Outcome:
    kind: str
    caller: str
    began: float  # `time.monotonic` seconds
    ended: float
    detail: str = ""
    opened: float | None = None  # earliest time when its connection was opened, if that was before the call


class WrongError(Exception):
    """A caller got an answer that no caller may get; the message is the reason."""


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """Return the code of a documented error with this status, else ""."""
        with contextlib.suppress(ValueError):
            document = self.json
            if isinstance(document, dict) and STATUS.get(code := document.get("code")) == self.status:
                return code
        return ""


def send(
    connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
) -> Answer:
    """Send a request with a new X-Request-Id. Raises WrongError if the answer has another id."""
    name = secrets.token_hex(8)
    connection.request(method, path, body, {**headers, "X-Request-Id": name})
    response = connection.getresponse()
    answer = Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    if answer.headers.get("x-request-id") != name:
        raise WrongError(f"the answer to request {answer.headers.get('x-request-id')}")
    return answer


class Book:
    """Records the outcome of every call, all questions, and the ids of caches by the API key that owns them."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.questions: list[Question] = []
        self._ids: dict[str, deque[str]] = {}  # ids of caches, by the key that owns the caches
        self._lock = threading.Lock()

    def add(self, outcome: Outcome) -> None:
        with self._lock:
            self.outcomes.append(outcome)

    def made(self, owner: str, ids: Iterable[str]) -> None:
        """Record caches that a key owns."""
        with self._lock:
            self._ids.setdefault(owner, deque(maxlen=IDS)).extend(ids)

    def others(self, owner: str) -> list[str]:
        """Return ids of some caches that belong or belonged to other keys."""
        with self._lock:
            return [cache_id for name, ids in self._ids.items() if name != owner for cache_id in ids]

    def compare(self, question: Question, body: bytes) -> None:
        """Compare the body of an answer with the right body. Raises WrongError."""
        if body != question.right:
            whose = next((q for q in self.questions if q is not question and q.right == body), None)
            raise WrongError(
                "another caller's answer" if whose else f"other bytes, {len(body)} of {len(question.right)}"
            )

    def compare_arrays(self, question: Question, arrays: dict[str, np.ndarray]) -> None:
        """Compare the arrays of an answer with the right arrays. Raises WrongError."""
        for name, array in arrays.items():
            if array.tobytes() != question.answer[name].tobytes():
                others = [q for q in self.questions if q is not question and name in q.answer]
                swapped = any(array.tobytes() == other.answer[name].tobytes() for other in others)
                raise WrongError("another caller's answer" if swapped else f"other bits in {name}")


def refused(answer: Answer, path: str) -> str:
    """Return the code of a documented error. Raises WrongError for any other error."""
    status, headers, body = answer
    try:
        document = answer.json
    except ValueError:
        raise WrongError(f"status {status}, and no JSON: {body[:80]!r}") from None
    if path.startswith("/v2"):
        if status not in WORDS or not isinstance(document.get("error"), str):
            raise WrongError(f"status {status}: {document}")
        return f"{status}"
    code = document.get("code")
    if headers.get("content-type") != "application/problem+json" or code not in REFUSALS or STATUS[code] != status:
        raise WrongError(f"status {status}: {document}")
    if status in (429, 503) and "retry-after" not in headers:
        raise WrongError(f"{code} without Retry-After")
    return f"{status} {code}"


def is_refusal(error: object) -> TypeGuard[flashpoint.FlashpointError]:
    """Return whether the SDK raised `error` for a refusal that a fault may cause."""
    refusals = flashpoint.OverloadedError, flashpoint.DeadlineExceededError
    return isinstance(error, refusals) and error.code in REFUSALS


def failure(error: Exception) -> tuple[str, str]:
    """Return the kind of outcome of a call that raised `error`, and the reason."""
    if is_refusal(error):
        return "refused", f"{error.status} {error.code}"
    if isinstance(error, WrongError):
        return "wrong", str(error)
    if isinstance(error, TimeoutError):
        return "hung", str(error)
    if isinstance(error, OSError | http.client.HTTPException):
        return "lost", type(error).__name__
    return "wrong", f"{type(error).__name__}: {error}"


class Caller(threading.Thread, ABC):
    """A thread that makes calls while `going` is set. Otherwise it closes its connection after a call and waits."""

    connection: http.client.HTTPConnection | flashpoint.Client | None = None
    opened: float | None = None  # `time.monotonic` seconds when the connection that is still open was opened

    def __init__(self, name: str, load: Load, rng: np.random.Generator) -> None:
        super().__init__(name=name, daemon=True)
        self.load, self.port, self.rng, self.book = load, load.port, rng, load.book
        self.idle = threading.Event()
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.is_set():
            if not self.load.going.is_set():
                self.rest()
                self.idle.set()
                self.load.going.wait()
                self.idle.clear()
                continue
            self.turn()
            time.sleep(THINK)
        self.leave()

    def call(self, ask: Callable[[], str]) -> str:
        """Call `ask`, record the outcome, and return the kind of outcome.

        `ask` returns the code of a refusal, or "" for a right answer, or raises an error that `failure` classifies.
        """
        began, opened, kind, detail = time.monotonic(), self.opened, "right", ""
        try:
            detail = ask()
            kind = "refused" if detail else "right"
        except Exception as error:
            kind, detail = failure(error)
        if kind != "right":
            self.leave()
        self.book.add(Outcome(kind, self.name, began, time.monotonic(), detail, opened))
        if kind == "lost":
            time.sleep(AFTER_NOTHING)
        return kind

    @abstractmethod
    def turn(self) -> str:
        """Make a random call; return the kind of outcome."""

    @abstractmethod
    def probe(self) -> str:
        """Make calls that must be right without other load; return the kind of the last outcome."""

    def rest(self) -> None:
        """Delete the caller's caches at the service, and disconnect."""
        self.leave()

    def connected(self) -> http.client.HTTPConnection:
        """Return the open connection, or open one."""
        if self.connection is None:
            self.opened = time.monotonic()
            self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.load.patience)
        return self.connection

    def client(self, owner: str, retries: int) -> flashpoint.Client:
        """Return the open client of the SDK, or open one, with the key of `owner`."""
        if self.connection is None:
            self.opened = time.monotonic()
            self.connection = flashpoint.Client(
                self.load.url, api_key=key_of(owner), timeout=self.load.patience, retries=retries
            )
        return self.connection

    def leave(self) -> None:
        """Close the open connection."""
        if self.connection is not None:
            self.connection.close()
            self.connection = self.opened = None


class Asker(Caller):
    """A caller with questions whose answers are known."""

    count = 3  # number of questions

    def __init__(self, name: str, load: Load, rng: np.random.Generator) -> None:
        super().__init__(name, load, rng)
        self.questions = [self.draw() for _ in range(self.count)]
        self.book.questions += self.questions

    def draw(self) -> Question:
        return draw(self.rng, "safetensors", grad=False)

    def turn(self) -> str:
        question = self.questions[int(self.rng.integers(len(self.questions)))]
        return self.call(lambda: self.ask(question))

    def probe(self) -> str:
        return self.call(lambda: self.ask(self.questions[0]))

    @abstractmethod
    def ask(self, question: Question) -> str:
        """Return the code of a refusal, or "" for a right answer. Raises errors that `failure` classifies."""


class Plain(Asker):
    """A caller that uses one connection of http.client for many calls.

    Its answers have the same size as those of other callers, so that only the bytes show whether two were swapped.
    """

    headers: Mapping[str, str] = MappingProxyType({})

    def draw(self) -> Question:
        return draw(self.rng, "safetensors", grad=False, length=64, heads=2, dim=32)

    def ask(self, question: Question) -> str:
        answer = send(self.connected(), "POST", question.path, question.body, {**question.headers, **self.headers})
        if answer.status != 200:
            return refused(answer, question.path)
        self.book.compare(question, answer.body)
        return ""


class Gradient(Plain):
    def draw(self) -> Question:
        return draw(self.rng, "safetensors", grad=True)


class Numbers(Plain):
    def draw(self) -> Question:
        return draw(self.rng, "json", grad=bool(self.rng.integers(2)))


class Inference(Plain):
    def draw(self) -> Question:
        return draw(self.rng, "oip", grad=bool(self.rng.integers(2)))


class Deadline(Plain):
    headers = MappingProxyType({"X-Timeout-Ms": str(int(DEADLINE * 1000)), "X-Priority": "3"})


class Launches(Plain):
    """A caller of the backend `reference`: each call is a single launch, which the engine does not split into parts."""

    def draw(self) -> Question:
        return draw(self.rng, "safetensors", grad=False, backend="reference", length=300, heads=2)


class Large(Plain):
    """A caller that sends and receives some megabytes, with several reads and writes of a socket."""

    count = 2

    def draw(self) -> Question:
        q = self.rng.standard_normal((1, 4, 6000, 32), dtype=np.float32)
        k, v = self.rng.standard_normal((2, 1, 4, 5, 32), dtype=np.float32)
        return safetensors({"q": q, "k": k, "v": v}, {"causal": False}, "/attention")


class Sdk(Asker):
    """A caller that uses the SDK's client with retries."""

    retries = 2

    def ask(self, question: Question) -> str:
        client, t = self.client(LOAD, self.retries), question.tensors
        if "do" in t:
            grads = client.attention_grad(t["do"], t["q"], t["k"], t["v"], **question.options)
            arrays = dict(zip(("dq", "dk", "dv"), grads, strict=True))
        else:
            arrays = {"o": client.attention(t["q"], t["k"], t["v"], **question.options)}
        self.book.compare_arrays(question, arrays)
        return ""


class SdkGradient(Sdk):
    retries = 0

    def draw(self) -> Question:
        return draw(self.rng, "safetensors", grad=True)


class Asyncio(Asker):
    """A caller that uses the SDK's asyncio client and sends all questions at once."""

    def ask(self, question: Question) -> str:
        return asyncio.run(self._ask())

    async def _ask(self) -> str:
        async with flashpoint.AsyncClient(
            self.load.url, api_key=key_of(LOAD), timeout=self.load.patience, retries=1
        ) as client:
            calls = [client.attention(*(q.tensors[n] for n in "qkv"), **q.options) for q in self.questions]
            answers = await asyncio.gather(*calls, return_exceptions=True)
        code = ""
        for question, answer in zip(self.questions, answers, strict=True):
            if is_refusal(answer):
                code = f"{answer.status} {answer.code}"
            elif isinstance(answer, BaseException):
                raise answer
            else:
                self.book.compare_arrays(question, {"o": answer})
        return code
