"""Choose the formats of a request and of its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flashpoint_contract.sse import MEDIA_TYPE as EVENT_STREAM
from flashpoint_server.formats.json import JSON
from flashpoint_server.formats.message import Format
from flashpoint_server.formats.safetensors import OCTETS, SAFETENSORS, SAFETENSORS_AS_OCTETS
from flashpoint_server.refusal import Refusal

# Seconds between comments in an idle event stream. They keep it open, and show whether the client has disconnected.
HEARTBEAT_SECONDS = 1.0

SERVED = (SAFETENSORS.media_type, JSON.media_type)
_TAKEN = {SAFETENSORS.media_type: SAFETENSORS, JSON.media_type: JSON, OCTETS: SAFETENSORS}


def formats(headers: Mapping[str, str]) -> tuple[Format, Format]:
    """Return the formats of the request and of its answer. Raises Refusal 406 and 415."""
    sent = _TAKEN.get(headers.get("content-type", ""))
    if sent and "content-encoding" not in headers and headers.get("accept", "") in ("", "*/*", sent.media_type):
        return sent, sent  # what most callers send
    given = request_format(headers)
    return given, answer_format(headers, given)


def check_json(headers: Mapping[str, str]) -> None:
    """Check that a body is JSON, for a call that takes no other format. Raises Refusal 415."""
    request_format(headers, (JSON.media_type,))


def request_format(headers: Mapping[str, str], served: Sequence[str] = SERVED) -> Format:
    """Return the format that Content-Type names; it must be one of `served`. Raises Refusal 415."""
    given = headers.get("content-type", "")
    if given not in _TAKEN:
        given = given.partition(";")[0].strip().lower()
    if given not in _TAKEN or _TAKEN[given].media_type not in served:
        raise Refusal(
            "unsupported_media_type",
            f"a body of type {given or 'unknown'} is not supported; send {' or '.join(served)}",
            headers={"Accept-Post": ", ".join(served)},
        )
    if (coding := headers.get("content-encoding", "identity").strip().lower()) != "identity":
        raise Refusal("unsupported_media_type", f"content coding {coding} is not supported; send the body uncompressed")
    return _TAKEN[given]


def answer_format(headers: Mapping[str, str], request: Format) -> Format:
    """Return the format that Accept prefers (RFC 9110, §12.5.1), or else the request's format. Raises Refusal 406."""
    other = JSON if request is SAFETENSORS else SAFETENSORS
    best = _preferred(headers, (request, other, SAFETENSORS_AS_OCTETS))
    if best is None:
        raise Refusal("not_acceptable", f"answers are {' or '.join(SERVED)}, but Accept allows neither")
    return best


def binary_format(headers: Mapping[str, str]) -> Format:
    """Return the format of an answer that is always safetensors. Raises Refusal 406 if Accept does not allow it."""
    best = _preferred(headers, (SAFETENSORS, SAFETENSORS_AS_OCTETS))
    if best is None:
        raise Refusal("not_acceptable", f"the answer is {SAFETENSORS.media_type}, but Accept does not allow it")
    return best


def _preferred(headers: Mapping[str, str], offered: tuple[Format, ...]) -> Format | None:
    """Return the first format of the best quality; None if Accept allows no format."""
    accept = headers.get("accept", "")
    if accept in ("", "*/*", offered[0].media_type) or not (ranges := _ranges(accept)):
        return offered[0]
    best = max(offered, key=lambda one: _quality(one.media_type, ranges))
    return best if _quality(best.media_type, ranges) > 0 else None


def takes_events(headers: Mapping[str, str]) -> bool:
    """Return whether Accept names event streams, with at least the quality of JSON. `*/*` does not count."""
    ranges = dict(_ranges(headers.get("accept", "")))
    quality = ranges.get(EVENT_STREAM, 0.0)
    return quality > 0 and quality >= ranges.get(JSON.media_type, 0.0)


def _ranges(accept: str) -> list[tuple[str, float]]:
    """Return the media ranges of an Accept field, each with its quality."""
    ranges = []
    for part in accept.split(","):
        media, *parameters = (piece.strip().lower() for piece in part.split(";"))
        if not media:
            continue
        quality = 1.0
        for parameter in parameters:
            name, _, value = parameter.partition("=")
            if name.strip() == "q":
                try:
                    quality = min(max(0.0, float(value)), 1.0)
                except ValueError:
                    quality = 0.0
        ranges.append((media, quality))
    return ranges


def _quality(media: str, ranges: list[tuple[str, float]]) -> float:
    """Return the quality of the most specific range that matches; 0 if none matches."""
    for pattern in (media, media.partition("/")[0] + "/*", "*/*"):
        matching = [quality for given, quality in ranges if given == pattern]
        if matching:
            return max(matching)
    return 0.0
