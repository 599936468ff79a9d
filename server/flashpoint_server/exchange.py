"""One request and its answer, seen from the server: id, clock, counts, and what its log line will say."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from flashpoint_server.refusal import Writer, problem

PARTS = ("decode", "queue", "compute", "encode")  # of a request's way
_KEY = "flashpoint.exchange"
# Ids that may be echoed into headers and logs; any other is replaced by one of ours.
_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=@~-]{1,128}")


@dataclass(eq=False)
class Timings:
    """When each part of the way began, in `time.perf_counter` seconds; `decode` includes the body's arrival."""

    decode: float
    queue: float = 0.0
    compute: float = 0.0
    encode: float = 0.0
    done: float = 0.0
    copy_in: float = 0.0  # seconds of computing that went to copies to a GPU, and from it
    copy_out: float = 0.0

    def stages(self) -> dict[str, float]:
        """Seconds of each part, copies counted apart from computing."""
        return {
            "decode": self.queue - self.decode,
            "queue": self.compute - self.queue,
            "copy_in": self.copy_in,
            "compute": self.encode - self.compute - self.copy_in - self.copy_out,
            "copy_out": self.copy_out,
            "encode": self.done - self.encode,
        }

    def spans(self) -> dict[str, tuple[float, float]]:
        """When each of these parts began and ended, in `time.perf_counter` seconds."""
        marks = (self.decode, self.queue, self.compute, self.encode, self.done)
        return {name: (marks[i], marks[i + 1]) for i, name in enumerate(PARTS)}

    def durations(self) -> dict[str, float]:
        """Milliseconds of what a caller is told of: decode, queue, compute with its copies, encode."""
        return {name: round((end - began) * 1000, 3) for name, (began, end) in self.spans().items()}


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
    key: str = ""  # the name of the key that the request came with
    replica: str = ""  # what leads to the caches that it is about, for the answer to say
    way: Way | None = None  # once it is computed
    write_refusal: Writer = problem  # in the form that clients of this address read
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
