"""One request and its answer: all that the server knows of it, from its head to its log line."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, cast

from starlette.types import Send

from flashpoint_contract.options import NAME
from flashpoint_server.access.admission import Admitted
from flashpoint_server.access.keys import Caller
from flashpoint_server.http.body import RequestBody
from flashpoint_server.ipc.messages import DeviceInfo
from flashpoint_server.plan import Plan
from flashpoint_server.refusal import Writer, problem

PARTS = ("decode", "queue", "compute", "encode")  # stages of a request; `decode` includes the arrival of the body
OTHER = "other"  # the route of paths that are not ours, in metrics
_KEY = "flashpoint.request"
FIELDS = "flashpoint.fields"  # key of `combined(headers)` in the ASGI scope; only our server (http/protocol.py) sets it
_IDS_AT_ONCE = 256
Field = tuple[bytes, bytes]  # a field of an answer's head: (name in lower case, value)
REPLICA_FIELD = "x-flashpoint-replica"
# A cache in front of the server must not store an answer: it may belong to one API key, or change at any time.
_CACHING = (b"cache-control", b"no-store")
_NO_GUESSING = (b"x-content-type-options", b"nosniff")  # browsers must not guess the media type
HTTP_ALONE = frozenset(name.decode() for name, _ in (_CACHING, _NO_GUESSING))  # fields that gRPC's metadata do not have


@dataclass(eq=False)
class Request(Admitted):
    """A request and its answer, in the place of starlette's `Request`.

    Requests that a route of ours handles (routes/pipeline.py) also have `body` and the fields below it, which the steps
    of the route set. `ends` are called when the route has ended, the last one first.
    """

    method: str
    path: str
    headers: Mapping[str, str]  # by lower-case name
    request_id: str
    arrived: float = field(default_factory=time.perf_counter)
    status: int | None = None  # set when the answer begins; 499 if the client disconnects before
    code: str | None = None  # the error code; client_gone if the client disconnects before its answer
    bytes_in: int = 0
    bytes_out: int = 0
    key: str = ""  # the name of the request's API key
    replica: str = ""  # the answer's X-Flashpoint-Replica: the replica of the caches or saved forward
    launch: int | None = None  # the number of its launch, set after it
    marks: tuple[float, ...] = ()  # when each of PARTS started, and when the last one ended, like `arrived`
    write_refusal: Writer = problem  # writes errors in the format of this path's clients
    facts: dict[str, Any] = field(default_factory=dict)  # fields that the route adds to the log line

    body: RequestBody = field(init=False, repr=False)
    send: Send = field(init=False, repr=False)
    query: str = ""
    caller: Caller = field(init=False, repr=False)  # set by `Service.authorize`
    device: DeviceInfo = field(init=False, repr=False)  # set by `begin`, like `priority`
    priority: int = 0
    rest: bytes = b""  # the first bytes of the tensors, which arrived together with a message's head
    plan: Plan = field(init=False, repr=False)  # set by `carry_out`
    error: type[BaseException] | None = None  # type of the exception that ended the request
    ends: list[Callable[[], object]] = field(init=False, repr=False, default_factory=list)

    @classmethod
    def open(cls, scope: MutableMapping[str, Any]) -> Request:
        """Return the request of an ASGI scope. The first call creates it; `request_of` only returns it."""
        if _KEY in scope:
            return request_of(scope)
        headers = scope[FIELDS] if FIELDS in scope else combined(scope["headers"])
        given_id = headers.get("x-request-id")
        request_id = given_id if given_id is not None and NAME.fullmatch(given_id) else (_ids or _drawn()).pop()
        request = scope[_KEY] = cls(scope["method"], scope["path"], headers, request_id)
        return request

    def answer_fields(self, given: Iterable[Field]) -> list[Field]:
        """Return the header fields of the answer, whichever way it is sent: `given`, and those of every answer.

        A Cache-Control in `given` replaces `no-store`. Only the files of the web page have one: they are the same for
        all callers until the next version, and have a validator.
        """
        fields = [*given, _NO_GUESSING, (b"x-request-id", self.request_id.encode())]
        if self.replica:
            fields.append((REPLICA_FIELD.encode(), self.replica.encode()))
        if b"cache-control" not in dict(fields):
            fields.append(_CACHING)
        return fields

    def waiting_since(self) -> float | None:
        return self.body.ended if self.status is None else None

    def end(self, error: type[BaseException] | None) -> None:
        """Call the functions in `ends`. `error` is the type of the exception that has ended the route, if any."""
        self.error = error
        try:
            while self.ends:
                self.ends.pop()()
        finally:
            if self.ends:  # a function has raised an exception: call the rest
                self.end(error)


def request_of(scope: MutableMapping[str, Any]) -> Request:
    return cast(Request, scope[_KEY])


_ids: list[str] = []  # random ids that are not in use yet


def _drawn() -> list[str]:
    """Draw ids, and return `_ids`. One system call draws many, because the call itself takes as long as drawing ten."""
    drawn = secrets.token_hex(16 * _IDS_AT_ONCE)
    _ids.extend(drawn[start : start + 32] for start in range(0, len(drawn), 32))
    return _ids


def combined(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the values of ASGI header fields by name. Values of one name are joined with commas (RFC 9110, §5.3)."""
    fields: dict[str, str] = {}
    for name, value in raw:
        key, text = name.decode("latin-1"), value.decode("latin-1")
        fields[key] = f"{fields[key]}, {text}" if key in fields else text
    return fields
