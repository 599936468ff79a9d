"""Requests whose answers have one value everywhere, so that a test notices bytes of another request's answer."""

import torch

from tests.support.messages import message
from tests.support.sockets import send

ROWS = 1 << 13


def constant(value, rows=ROWS):
    """Return a request whose answer, (1, 4, rows, 64) float32, is `value` everywhere; by default 8 MiB."""
    zeros = {name: torch.zeros(1, 4, n, 64) for name, n in (("q", rows), ("k", 1))}
    return message({**zeros, "v": torch.full((1, 4, 1, 64), float(value))})


def shows_only(answer, value):
    return bool((answer.tensors["o"] == value).all())


def values_of(body):
    """Return the distinct values of a float32 answer."""
    return set(
        torch.frombuffer(bytearray(body[8 + int.from_bytes(body[:8], "little") :]), dtype=torch.float32).tolist()
    )


def wide(value, rows):
    """Like `constant`, with a small body: the answer, (1, 4, rows, 256) float32, is about 256 times as large."""
    q, k = torch.zeros(1, 4, rows, 1), torch.zeros(1, 4, 1, 1)
    return message({"q": q, "k": k, "v": torch.full((1, 4, 1, 256), float(value))})


def unread(server, value, name):
    """Return a connection whose answer nobody reads: 16 MiB, more than the socket buffers hold."""
    return send(server, wide(value, 1 << 12), request_id=name, receive_buffer=1 << 16)


def given_up(server, name):
    """Wait for the log line that says that the server stopped sending this answer after a timeout, and return it."""
    line = server.wait_for_request(name)
    assert (line["status"], line["code"]) == (200, "answer_timeout")
    return line
