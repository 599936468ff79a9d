"""Check a request's head: its size, its Host field, and its Transfer-Encoding."""

from __future__ import annotations

import re

from flashpoint_server.config.hosts import host_name
from flashpoint_server.refusal import Refusal

# Limits of a request's head. By default nginx allows 32 KiB and h11 16 KiB. A browser, a proxy and our SDK send fewer
# fields.
HEAD_BYTES = 1 << 16
HEAD_FIELDS = 128

Field = tuple[bytes, bytes]  # (name in lower case, value)

_ABSOLUTE = re.compile(rb"https?://([^/?#]*)", re.IGNORECASE)


def too_large() -> Refusal:
    detail = f"the request's head exceeds {HEAD_BYTES} bytes, or {HEAD_FIELDS} fields or parameters: send less in it"
    return Refusal("head_too_large", detail)


def with_host_of(url: bytes, fields: list[Field]) -> list[Field]:
    """Return `fields`, with the host of an absolute `url` instead of the Host field (RFC 9112, §3.2.2)."""
    if (match := _ABSOLUTE.match(url)) is None:
        return fields
    return [*(field for field in fields if field[0] != b"host"), (b"host", match[1])]


def wrong(version: str, url: bytes, fields: list[Field]) -> Refusal | None:
    """Return the refusal of a head; None if the head is valid. `version` is "1.0" or "1.1"."""
    size = len(url)
    hosts: list[bytes] = []
    codings: list[bytes] = []
    for name, value in fields:
        size += len(name) + len(value)
        if name == b"host":
            hosts.append(value)
        elif name == b"transfer-encoding":
            codings.append(value)
    if size > HEAD_BYTES or len(fields) > HEAD_FIELDS or url.count(b"&") > HEAD_FIELDS:
        return too_large()
    if len(hosts) > 1 or not (hosts or version == "1.0"):
        due = f"{'at most' if version == '1.0' else 'exactly'} one Host field"
        return Refusal("malformed_head", f"an HTTP/{version} request needs {due}, and this one has {len(hosts)}")
    if hosts and host_name(host := hosts[0].decode("latin-1").strip()) is None:
        form = "a host name, an IPv4 address or an [IPv6] address, with or without a :port"
        return Refusal("malformed_head", f"the Host field must be {form}, not {host!r}")
    return _wrong_coding(version, codings) if codings else None


def _wrong_coding(version: str, codings: list[bytes]) -> Refusal | None:
    coding = b", ".join(codings).decode("latin-1").strip()
    if coding.lower() != "chunked":
        due = "send the body unencoded, with Content-Length or chunked"
        return Refusal("transfer_encoding", f"Transfer-Encoding {coding!r} is not supported, only 'chunked': {due}")
    if version == "1.0":
        return Refusal("malformed_head", "HTTP/1.0 has no Transfer-Encoding: send Content-Length")
    return None
