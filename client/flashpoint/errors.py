"""The exceptions of the SDK, one class for each family of HTTP statuses. All are subclasses of FlashpointError."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flashpoint_contract.caches import CACHE_OPTIONS
from flashpoint_contract.options import OPTIONS, FieldProblem
from flashpoint_contract.saved import SAVED_OPTIONS
from flashpoint_contract.tensors import TENSORS

__all__ = [
    "AuthenticationError", "BadRequestError", "CacheError", "ClosedError", "ConnectionFailedError",
    "DeadlineExceededError", "FieldProblem", "FlashpointError", "InvalidInputError", "OverloadedError", "ProtocolError",
    "ServerError", "TooLargeError",
]  # fmt: skip


class FlashpointError(Exception):
    """Base of all exceptions. An attribute is None if the server did not send it, or if no server was asked.

    Args:
        detail: Text of the error.
        status: HTTP status.
        code: Short name of the error, as in the table of errors of the documentation.
        request_id: Name of the call in the server's log.
        errors: The fields that are not valid, each a `FieldProblem`.
        retry_after: Seconds that the server asks to wait.
    """

    def __init__(
        self,
        detail: str,
        *,
        status: int | None = None,
        code: str | None = None,
        request_id: str | None = None,
        errors: Iterable[FieldProblem] = (),
        retry_after: float | None = None,
    ) -> None:
        self.detail = detail
        self.status = status
        self.code = code
        self.request_id = request_id
        self.errors = tuple(errors)
        self.retry_after = retry_after
        super().__init__(detail)

    def __str__(self) -> str:
        about = [str(self.status)] if self.status else []
        about += [self.code] if self.code else []
        text = f"{' '.join(about)}: {self.detail}" if about else self.detail
        fields = "".join(f"\n  {field}: {message}" for field, message in self.errors if message not in self.detail)
        return text + fields + (f" (request {self.request_id})" if self.request_id else "")


class InvalidInputError(FlashpointError, ValueError):
    """A ValueError: tensors or options are not valid (422, or the client's own check). `errors` lists wrong fields."""


class BadRequestError(FlashpointError):
    """The server could not read the message, or has no such address: 400, 404, 405, 406, 408, 415."""


class CacheError(FlashpointError):
    """A cache or a saved forward is lost, or a cache is not as the call expects: 404, 409, 410, 421; see `code`.

    With code `cache_elsewhere` another replica holds it, and the balancer did not route the call there.
    """


class AuthenticationError(FlashpointError):
    """There is no API key, it is wrong, or it lacks the permission: 401, 403."""


class TooLargeError(FlashpointError):
    """The body is over the server's limit, or the work could never fit its device: 413."""


class OverloadedError(FlashpointError):
    """The server is full, starting or stopping, at every retry: 429, 503."""


class DeadlineExceededError(FlashpointError, TimeoutError):
    """A TimeoutError: the timeout passed, at the client or at the server (504)."""


class ServerError(FlashpointError):
    """The server failed: 500 and every other 5xx. `request_id` finds the error in its log."""


class ConnectionFailedError(FlashpointError, ConnectionError):
    """A ConnectionError: at every attempt, the connection to the server, or from a proxy to it, failed or broke."""


class ProtocolError(FlashpointError):
    """The answer does not follow the contract. Another program than Flashpoint may have sent it."""


class ClosedError(FlashpointError, RuntimeError):
    """A RuntimeError: the client was closed before the call, or the interpreter is ending.

    Make a new client, or call inside its `with` block.
    """


_OF_HELD = (404, 409, 410, 421)
_BY_STATUS: dict[int, type[FlashpointError]] = {
    401: AuthenticationError,
    403: AuthenticationError,
    413: TooLargeError,
    422: InvalidInputError,
    429: OverloadedError,
    503: OverloadedError,
    504: DeadlineExceededError,
}


_UNKNOWN = "unknown option or tensor"  # how a server's message for a name begins that it does not know
_KNOWN = frozenset({*OPTIONS, *TENSORS, *CACHE_OPTIONS, *SAVED_OPTIONS})  # names of this version
_OLDER_NAMES = "; this server is of an earlier version, which calls the backend cpu torch: upgrade it, or use auto"


def invalid(field: str, message: str) -> InvalidInputError:
    """Return an InvalidInputError for one field."""
    return all_invalid([(field, message)])


def all_invalid(errors: Iterable[tuple[str, str]]) -> InvalidInputError:
    """Return an InvalidInputError for several fields, given as (field, message)."""
    problems = [FieldProblem(*each) for each in errors]
    return InvalidInputError("; ".join(f"{name}: {message}" for name, message in problems), errors=problems)


def from_problem(
    status: int, problem: Mapping[str, Any], *, request_id: str | None = None, retry_after: float | None = None
) -> FlashpointError:
    """Return the error for an answer with `status`. `problem`: its RFC 9457 document; empty if not readable."""
    if status < 400:
        return ProtocolError(f"an answer with status {status}", status=status, request_id=request_id)
    code = _text(problem.get("code"))
    family = _BY_STATUS.get(status) or (ServerError if status >= 500 else BadRequestError)
    if status in _OF_HELD and (code or "").startswith(("cache_", "saved_")):
        family = CacheError
    errors = _fields(problem.get("errors"))
    detail = str(problem.get("detail") or problem.get("title") or "no detail was given")
    if any(field == "backend" and "auto" in said and "cpu" not in said for field, said in errors):
        detail += _OLDER_NAMES
    elif newer := [field for field, said in errors if said.startswith(_UNKNOWN) and field in _KNOWN]:
        detail += f"; this server is of an earlier version, which does not know {', '.join(newer)}: upgrade it"
    return family(
        detail,
        status=status,
        code=code,
        request_id=_text(problem.get("request_id")) or request_id,
        errors=errors,
        retry_after=retry_after,
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _fields(errors: object) -> list[FieldProblem]:
    """Return the problems in `[{"loc": ["q"], "msg": "…"}]`; `loc` may also be a single name."""
    problems = []
    for error in errors if isinstance(errors, list) else []:
        if isinstance(error, dict):
            loc = error.get("loc")
            path = loc if isinstance(loc, list) else [loc]
            problems.append(FieldProblem(".".join(map(str, path)), str(error.get("msg"))))
    return problems
