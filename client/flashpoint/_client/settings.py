"""The settings that `Client` and `AsyncClient` share. A copy of a client has the same settings, and no connection."""

from __future__ import annotations

import base64
import os
import socket
import ssl
import sys
from collections.abc import Callable
from copy import deepcopy
from typing import Any, Generic, Self, TypeVar
from urllib.parse import unquote

import httpx
from pydantic import SecretStr

from flashpoint._calls.service import DEFAULT, Call
from flashpoint._http.exchange import Exchange
from flashpoint._http.listening import Listening
from flashpoint._http.transport import AsyncTransport, Transport
from flashpoint.errors import (
    AuthenticationError,
    ClosedError,
    ConnectionFailedError,
    FlashpointError,
    OverloadedError,
    invalid,
)

DEFAULT_URL = "http://localhost:8000"
KEY_VARIABLE = "FLASHPOINT_API_KEY"
TIMEOUT = 60.0  # seconds for a whole call
LONGEST_TIMEOUT = 1_000_000  # seconds, as in the server's settings; poll() waits at most 2^31 ms (2.1 million s)
RETRIES = 4
FAILURES = (httpx.TransportError, FlashpointError)
NOT_THERE = (OverloadedError, ConnectionFailedError)

# `_CONNECTED`: attributes that each copy makes anew. `_UNPICKLED`: attributes that a copy shares and a pickle omits,
# each with the name of the constructor's argument.
_CONNECTED = ("_http", "_own", "_process")
_UNPICKLED = {"_authorization": "api_key", "_tls": "tls", "_transport": "transport"}
_NO_SOCKETS = (httpx.MockTransport, httpx.ASGITransport, httpx.WSGITransport)

Http = TypeVar("Http", httpx.Client, httpx.AsyncClient)
Direct = TypeVar("Direct", Transport, AsyncTransport)


class ClientSettings(Generic[Http]):
    """Base class of both clients: their settings."""

    _http: Http
    _missing: tuple[str, ...] = ()  # constructor arguments that are missing because this client was unpickled
    _process: int | None = None  # id of the first process that has used the caller's transport

    def __init__(
        self, url: str | None, api_key: str | None, timeout: float | None, retries: int, tls: ssl.SSLContext | None,
        replica: str, transport: Any,
    ) -> None:  # fmt: skip
        if type(retries) is not int or retries < 0:
            raise invalid("retries", "must be an integer, 0 or more")
        if not isinstance(replica, str) or not (replica.isascii() and replica.isprintable() and len(replica) <= 128):
            raise invalid("replica", "must be printable ASCII of up to 128 characters")
        self._parsed, credentials = _address(url)
        self.url = str(self._parsed) if credentials else str(url or os.environ.get("FLASHPOINT_URL") or DEFAULT_URL)
        self._authorization = _authorization(api_key, credentials)
        self._timeout = seconds(timeout)
        self._retries = retries
        self._tls = tls
        self._replica = replica
        self._transport = transport
        self._connect()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def _connect(self) -> None:
        """Set `_http` to an unconnected httpx client, and `_own` to its transport, or to None if that is not ours."""
        raise NotImplementedError

    def __copy__(self) -> Self:
        return self._copied(lambda value: value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self._copied(lambda value: deepcopy(value, memo), memo)

    def _copied(self, copied: Callable[[Any], Any], memo: dict[int, Any] | None = None) -> Self:
        made = self.__class__.__new__(self.__class__)
        if memo is not None:
            memo[id(self)] = made
        for name, value in vars(self).items():
            if name not in _CONNECTED:
                vars(made)[name] = value if name in _UNPICKLED else copied(value)
        made._connect()
        return made

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if name not in (*_CONNECTED, *_UNPICKLED)}
        dropped: list[str] = [argument for name, argument in _UNPICKLED.items() if vars(self)[name] is not None]
        return {**state, "_missing": tuple(dict.fromkeys((*self._missing, *dropped)))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({**state, **dict.fromkeys(_UNPICKLED)})
        self._connect()

    def _complete(self) -> None:
        """After unpickling, read the API key from the environment. Raises an error if an argument is still missing."""
        if "api_key" in self._missing and (given := os.environ.get(KEY_VARIABLE)):
            self._authorization = _authorization(given, None)
            self._missing = tuple(name for name in self._missing if name != "api_key")
            self._connect()
        for name in self._missing:
            why = "this client comes from a pickle, which does not carry it"
            if name == "api_key":
                raise AuthenticationError(f"there is no API key: {why}; set {KEY_VARIABLE}, or make a new client")
            raise invalid(name, f"is missing: {why}; make a new client")

    def _check_process(self) -> None:
        """Raise InvalidInputError if the caller's transport was used before a fork: processes may share connections."""
        if isinstance(self._transport, _NO_SOCKETS):
            return
        self._process = self._process or os.getpid()
        if self._process != os.getpid():
            raise invalid("transport", "may have connections of the parent process: make a new client after a fork")

    def _http_settings(self) -> dict[str, Any]:
        self._process = None
        headers = {"User-Agent": "flashpoint", "Accept-Encoding": "identity"}
        if self._authorization is not None:
            headers["Authorization"] = self._authorization.get_secret_value()
        # No limit on connections: a server refuses too many requests at once, and a client that waited would hide this.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        return {"base_url": self._parsed, "headers": headers, "limits": limits, "timeout": self._timeout,
                "verify": self._tls or True}  # fmt: skip

    def _direct(self, transport: Callable[[httpx.URL, ssl.SSLContext | None], Direct]) -> Direct:
        """Return our own transport. Raises InvalidInputError if the environment names a proxy that cannot be used."""
        try:
            return transport(self._parsed, self._tls)
        except ValueError as error:
            raise invalid("proxy", str(error)) from None

    def _with_cookies(self, response: httpx.Response, request: httpx.Request) -> httpx.Response:
        if "set-cookie" in response.headers:  # a balancer sets cookies
            response.request = request
            self._http.cookies.extract_cookies(response)
        return response

    def _ready_to_call(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Raise ClosedError if no call can be sent. While the interpreter ends, a thread that is started never runs."""
        if finalizing():
            raise ClosedError("the interpreter is ending: make calls, and leave `with` blocks, before the program ends")
        if self._http.is_closed:
            raise ClosedError("the client is closed: make a new one, or call inside its `with` block")
        if self._missing:
            self._complete()

    def _exchange(self, call: Call[Any], *, once: bool = False, stop: socket.socket | None = None) -> Exchange:
        self._ready_to_call()
        if call.affinity is not None:
            call.affinity.replica = call.affinity.replica or self._replica
        timeout = self._timeout if call.timeout is DEFAULT else seconds(call.timeout)
        return Exchange(call, timeout=timeout, retries=0 if once else self._retries, stop=stop)

    def _listening(self, id: str, after: int) -> Listening:
        self._ready_to_call()
        return Listening(id, after, timeout=self._timeout, retries=self._retries)


def seconds(timeout: Any) -> float | None:
    """Return a timeout in seconds; None if there is no timeout. Raises InvalidInputError."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout <= LONGEST_TIMEOUT:
        raise invalid("timeout", "must be a number of seconds above 0 and up to 1,000,000, or None for no end")
    return float(timeout)


def _address(url: str | None) -> tuple[httpx.URL, bytes]:
    """Return the server's URL without credentials, and the user and password. InvalidInputError shows no password."""
    given = os.environ.get("FLASHPOINT_URL") or DEFAULT_URL if url is None else url
    try:
        parsed = httpx.URL(given)
    except (httpx.InvalidURL, TypeError) as error:
        secret = isinstance(given, str) and "@" in given  # the error must not show the URL's password
        raise invalid("url", "is not a valid URL; write /, ? and # in a password as %2F, %3F and %23" if secret
                      else str(error)) from None  # fmt: skip
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise invalid("url", "must begin with http:// or https:// and name a host, as http://localhost:8000 does")
    return parsed.copy_with(userinfo=b""), parsed.userinfo


def _authorization(api_key: str | None, credentials: bytes | None) -> SecretStr | None:
    """Return the value of the Authorization header; None without a key. Raises InvalidInputError."""
    name = "api_key" if api_key is not None else KEY_VARIABLE
    key = os.environ.get(KEY_VARIABLE, "") if api_key is None else api_key
    if key and (problem := _key_problem(key)):
        raise invalid(name, problem)
    if not credentials:
        return SecretStr(f"Bearer {key}") if key else None
    if key:
        raise invalid(name, "cannot be combined with a user and a password in the URL: a request has one of them")
    return SecretStr("Basic " + base64.b64encode(unquote(credentials.decode("ascii")).encode()).decode("ascii"))


def _key_problem(key: object) -> str | None:
    """Return why an API key cannot be sent in a header; None if it can. The text does not contain the key."""
    if not isinstance(key, str):
        return f"must be a str, not {type(key).__name__}"
    if key != key.strip():
        return "begins or ends with white space, such as the newline at the end of a file: remove it with strip()"
    for position, character in enumerate(key):
        if not "!" <= character <= "~":
            kind = "a space" if character == " " else "not printable ASCII"
            return f"must be printable ASCII without spaces: the character at index {position} is {kind}"
    return None
