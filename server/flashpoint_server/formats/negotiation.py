"""Which encoding a message is in, and which the answer must have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashpoint import jsonwire, wire
from flashpoint_server.refusal import Refusal

OCTETS = "application/octet-stream"
SERVED = (wire.MEDIA_TYPE, jsonwire.MEDIA_TYPE)


@dataclass(frozen=True)
class Encoding:
    """`media_type` is what the header says; octets are safetensors under another name."""

    media_type: str

    @property
    def is_json(self) -> bool:
        return self.media_type == jsonwire.MEDIA_TYPE


def request_encoding(headers: Mapping[str, str]) -> Encoding:
    """From Content-Type. Raises Refusal 415."""
    given = headers.get("content-type", "").partition(";")[0].strip().lower()
    if given not in (*SERVED, OCTETS):
        raise Refusal(
            "unsupported_media_type",
            f"a body of type {given or 'unknown'} is not taken; send {' or '.join(SERVED)}",
            headers={"Accept-Post": ", ".join(SERVED)},
        )
    if (coding := headers.get("content-encoding", "identity").strip().lower()) != "identity":
        raise Refusal("unsupported_media_type", f"a body in content coding {coding} is not taken")
    return Encoding(wire.MEDIA_TYPE if given == OCTETS else given)


def answer_encoding(headers: Mapping[str, str], request: Encoding) -> Encoding:
    """From Accept (RFC 9110, §12.5.1); the request's own where the client does not mind. Raises Refusal 406."""
    ranges = _ranges(headers.get("accept", ""))
    if not ranges:
        return request
    other = next(media for media in SERVED if media != request.media_type)
    best = max((request.media_type, other, OCTETS), key=lambda media: _quality(media, ranges))  # the first of equals
    if _quality(best, ranges) <= 0:
        raise Refusal("not_acceptable", f"answers are {' or '.join(SERVED)}, and Accept takes neither")
    return Encoding(best)


def _ranges(accept: str) -> list[tuple[str, float]]:
    found = []
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
        found.append((media, quality))
    return found


def _quality(media: str, ranges: list[tuple[str, float]]) -> float:
    """That of the most specific range that matches; 0 where none does."""
    for pattern in (media, media.partition("/")[0] + "/*", "*/*"):
        matching = [quality for given, quality in ranges if given == pattern]
        if matching:
            return max(matching)
    return 0.0
