"""One request and its answer, seen from the server: id, clock, counts, and what its log line will say."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
    from flashpoint_server.access.keys import Caller
    from flashpoint_server.ipc.job import Timings

_KEY = "flashpoint.exchange"
# What may be echoed into headers and logs; anything else is replaced by an id of ours.
_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=@~-]{1,128}")


class Way(NamedTuple):
    """How it was computed."""

    backend: str
    batch_size: int
    launch: int
    timings: Timings


@dataclass(eq=False)
class Exchange:
    """`arrived` is in `time.perf_counter` seconds. `status` is None until the answer begins. `code` is a problem's.

    A client that goes before its answer leaves status 499 and code client_gone.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    request_id: str
    arrived: float = field(default_factory=time.perf_counter)
    status: int | None = None
    code: str | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    caller: Caller | None = None  # once it is known who asks
    way: Way | None = None  # once it is computed
    facts: dict[str, Any] = field(default_factory=dict)  # what the route adds to the log line

    @classmethod
    def open(cls, scope: MutableMapping[str, Any]) -> Exchange:
        """The exchange of an ASGI scope, begun where it is not yet, where `Exchange.of` finds it again."""
        if _KEY in scope:
            return cls.of(scope)
        headers = combined(scope["headers"])
        asked = headers.get("x-request-id", "")
        request_id = asked if _SANE_ID.fullmatch(asked) else secrets.token_hex(16)
        exchange = scope[_KEY] = cls(scope["method"], scope["path"], headers, request_id)
        return exchange

    @staticmethod
    def of(scope: MutableMapping[str, Any]) -> Exchange:
        return cast(Exchange, scope[_KEY])


def combined(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Header fields by their lower-case names, those of one name as one list (RFC 9110, §5.3)."""
    fields: dict[str, str] = {}
    for name, value in raw:
        key, text = name.decode("latin-1"), value.decode("latin-1")
        fields[key] = f"{fields[key]}, {text}" if key in fields else text
    return fields
