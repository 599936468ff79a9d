"""Repeated header fields of a request are joined into one."""

from flashpoint_server.formats.negotiation import answer_format, request_format
from flashpoint_server.http.request import combined

BINARY, JSON, OCTETS = "application/vnd.safetensors", "application/json", "application/octet-stream"


def test_several_accept_headers_are_one_list():
    headers = combined([(b"content-type", JSON.encode()), (b"accept", b"text/html"), (b"accept", BINARY.encode())])
    assert answer_format(headers, request_format(headers)).media_type == BINARY
