"""Build the requests of the calls /verify and /benchmark, and parse the answers. This module does no I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from flashpoint._calls.arrays import Array
from flashpoint._calls.results import BenchmarkJob, VerifyReport
from flashpoint._calls.service import DEFAULT, Call, Model, call_headers, checked, lookup, message
from flashpoint.errors import ConnectionFailedError, ProtocolError, from_problem, invalid
from flashpoint_contract import sse, wire
from flashpoint_contract.schemas import jsonwire
from flashpoint_contract.schemas.benchmark import BenchmarkRequest
from flashpoint_contract.schemas.options import AttentionOptions
from flashpoint_contract.schemas.verify import (
    VERIFY_EVENT,
    ProblemEvent,
    ReportEvent,
    VerifyEvent,
    VerifyProgress,
    VerifyRequest,
)
from flashpoint_contract.tensors import INPUT_TENSORS, JUDGED

DRAWN = ("shape", "dtype", "seed", "direction", "extras")  # keywords only for a problem that the server draws
CASE_TENSORS = tuple(dict.fromkeys((*INPUT_TENSORS, *JUDGED)))  # tensors of a problem, and answers to judge


def verify(q: Array | None, k: Array | None, v: Array | None, keywords: Mapping[str, Any]) -> Call[VerifyReport]:
    """Return the call that verifies the given tensors; without q, tensors that the server draws."""
    rest: dict[str, Any] = dict(keywords)
    timeout, progress = rest.pop("timeout", DEFAULT), rest.pop("progress", None)
    expected = jsonwire.MEDIA_TYPE if progress is None else sse.MEDIA_TYPE
    headers = {"Accept": expected, **call_headers(rest)}
    given = {name: rest.pop(name, None) for name in CASE_TENSORS} | {"q": q, "k": k, "v": v}
    if q is None:
        if alone := [name for name, t in given.items() if t is not None]:
            raise invalid(alone[0], "is taken only with q, k and v")
        media, body = jsonwire.MEDIA_TYPE, _document(checked(VerifyRequest, rest))
    else:
        if drawn := [name for name in DRAWN if name in rest]:
            raise invalid(drawn[0], "cannot be combined with tensors")
        media, body = wire.MEDIA_TYPE, message(given, checked(AttentionOptions, rest))
    headers["Content-Type"] = media
    call = Call("POST", "/verify", expected, headers, body, timeout, _reads(VerifyReport))
    if progress is None:
        return call
    return replace(call, reader=partial(_Verification, progress), read=lambda report: report)


class Events:
    """Reads server-sent events of type `kind`, and passes each to `take`. Implements `Reader`."""

    def __init__(self, kind: TypeAdapter[Any], take: Callable[[Any], object]) -> None:
        self._space = memoryview(bytearray(16 * 1024))
        self._frames = sse.Frames()
        self._kind, self._take = kind, take

    def space(self) -> memoryview:
        return self._space

    def filled(self, count: int) -> None:
        try:
            events = [self._kind.validate_json(data) for data in self._frames.feed(bytes(self._space[:count]))]
        except ValueError as error:
            raise ProtocolError(f"an event that cannot be read: {error}") from error
        for event in events:
            self._take(event)

    def finish(self) -> Any:
        """Return None: `take` has received all events."""


class _Verification(Events):
    """Passes the progress of a verification to the callback, and keeps the last event."""

    def __init__(self, progress: Callable[[VerifyProgress], object]) -> None:
        super().__init__(VERIFY_EVENT, self._note)
        self._progress = progress
        self._last: ReportEvent | ProblemEvent | None = None

    def _note(self, event: VerifyEvent) -> None:
        if isinstance(event, VerifyProgress):
            self._progress(event)
        else:
            self._last = event

    def finish(self) -> VerifyReport:
        """Return the report. Raises the error that the verification ended with."""
        if isinstance(self._last, ReportEvent):
            return VerifyReport(**dict(self._last.report))
        if self._last is None:
            raise ConnectionFailedError("the events ended before the verification did")
        status = self._last.problem.get("status")
        raise from_problem(status if isinstance(status, int) else 500, self._last.problem)


def submit(keywords: Mapping[str, Any]) -> Call[BenchmarkJob]:
    """Return the call that starts a benchmark and returns its BenchmarkJob. Raises InvalidInputError."""
    rest = dict(keywords)
    timeout = rest.pop("timeout", DEFAULT)
    headers = {"Accept": jsonwire.MEDIA_TYPE, "Content-Type": jsonwire.MEDIA_TYPE, **call_headers(rest)}
    body = _document(checked(BenchmarkRequest, rest))
    read = _reads(BenchmarkJob)
    return Call("POST", "/benchmark", jsonwire.MEDIA_TYPE, headers, body, timeout, read, success=202, repeatable=False)


def job(method: str, id: str) -> Call[BenchmarkJob]:
    """Return the call that gets a job (`method` GET) or cancels it (DELETE) and returns its BenchmarkJob."""
    return lookup(f"/benchmark/{id}", _reads(BenchmarkJob), method)


def _document(model: BaseModel) -> tuple[memoryview, ...]:
    return (memoryview(model.model_dump_json(exclude_defaults=True).encode("utf-8")),)


def _reads(model: type[Model]) -> Callable[[Any], Model]:
    def read(document: Any) -> Model:
        try:
            return model.model_validate(document)
        except ValidationError as error:
            raise ProtocolError(f"the answer is no {model.__name__}: {error}") from error

    return read
