"""The header fields that every HTTP answer of the server has, whichever way it is sent."""

from __future__ import annotations

from collections.abc import Iterable

from flashpoint_server.exchange import Exchange

Field = tuple[bytes, bytes]  # (name in lower case, value)

REPLICA_FIELD = "x-flashpoint-replica"
# A cache in front of the server must not store an answer: it may belong to one API key, or change at any time.
_CACHING = (b"cache-control", b"no-store")
_NO_GUESSING = (b"x-content-type-options", b"nosniff")  # browsers must not guess the media type
HTTP_ALONE = frozenset(name.decode() for name, _ in (_CACHING, _NO_GUESSING))  # fields that gRPC's metadata do not have


def answer_fields(exchange: Exchange, given: Iterable[Field]) -> list[Field]:
    """Return the header fields of an answer: `given`, and those of every answer.

    A Cache-Control in `given` replaces `no-store`. Only the files of the web page have one: they are the same for all
    callers until the next version, and have a validator.
    """
    fields = [*given, _NO_GUESSING, (b"x-request-id", exchange.request_id.encode())]
    if exchange.replica:
        fields.append((REPLICA_FIELD.encode(), exchange.replica.encode()))
    if not any(name == b"cache-control" for name, _ in fields):
        fields.append(_CACHING)
    return fields
