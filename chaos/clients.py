"""Faults of callers: they disconnect at any stage of a request, are slow, or stop sending."""

from __future__ import annotations

import contextlib
import socket
import struct
import time

import numpy as np

from chaos.held import Request
from chaos.keys import LOAD, bearer
from chaos.questions import Question, draw, safetensors
from chaos.world import World

PATIENCE = 60.0  # timeout of a socket in seconds
PIECES = 24  # number of pieces that a slow caller reads or writes
PAUSE = 0.02  # seconds between two pieces
STAGES = (
    "the request line", "the headers", "half the head", "half the tensors", "all but a byte", "the whole request",
    "a byte of the answer", "half the answer",
)  # fmt: skip


def leave(world: World) -> str | None:
    """Close the connection at a random stage of a request or its answer, with FIN or RST."""
    form = ("safetensors", "safetensors", "json", "oip")[int(world.rng.integers(4))]
    question = draw(world.rng, form, grad=bool(world.rng.integers(2)))
    stage = int(world.rng.integers(len(STAGES)))
    reset = bool(world.rng.integers(2))
    with contextlib.suppress(OSError), connected(world) as connection:
        break_off(connection, head_of(question), question.body, stage, reset)
    return f"after {STAGES[stage]}, {'reset' if reset else 'closed'}"


def break_off(connection: socket.socket, head: bytes, body: bytes, stage: int, reset: bool) -> None:
    """Send a request, and read its answer, up to STAGES[stage] only. With `reset`, closing `connection` sends RST."""
    size, total = len(body) // 3, len(body)
    if b"safetensors" in head:
        size = 8 + int.from_bytes(body[:8], "little")
    ends = (9, len(head), len(head) + size // 2, len(head) + (size + total) // 2, len(head) + total - 1)
    connection.sendall((head + body)[: ends[stage] if stage < len(ends) else None])
    if STAGES[stage] == "a byte of the answer":
        connection.recv(1)
    elif STAGES[stage] == "half the answer":
        connection.recv(300)
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def read_slowly(world: World) -> str | None:
    """Read an answer in pieces into a small buffer: the answer must be complete and belong to this caller."""
    question = _several_mib(world)
    with connected(world, receive=1 << 14) as connection:
        connection.sendall(head_of(question) + question.body)
        answer = b""
        for _ in range(PIECES):
            answer += connection.recv(1 << 14)
            time.sleep(PAUSE)
        answer += _rest(connection)
    return _checked(world, question, answer)


def write_slowly(world: World) -> str | None:
    question = _several_mib(world)
    text = head_of(question) + question.body
    with connected(world) as connection:
        for n in range(PIECES):
            connection.sendall(text[len(text) * n // PIECES : len(text) * (n + 1) // PIECES])
            time.sleep(PAUSE)
        answer = _rest(connection)
    return _checked(world, question, answer)


def fall_silent(world: World) -> str | None:
    """Stop sending in the middle of a body: the server answers 408 after --body-timeout."""
    question = draw(world.rng, "safetensors", grad=False)
    with connected(world) as connection:
        connection.sendall(head_of(question) + question.body[:-5])
        answer = connection.recv(1 << 16)
    if answer and not answer.startswith((b"HTTP/1.1 408", b"HTTP/1.1 429", b"HTTP/1.1 503")):
        world.violations.append(f"a silent caller got {answer[:60]!r}")
    return answer[9:12].decode() or "nothing"


def _several_mib(world: World) -> Question:
    """Return a question of several MiB. Each element of the right answer is the same random number of this call."""
    value = float(world.rng.integers(1, 1 << 20))
    q, k = np.zeros((1, 4, 4096, 64), np.float32), np.zeros((1, 4, 1, 64), np.float32)
    question = safetensors({"q": q, "k": k, "v": np.full_like(k, value)}, {}, "/attention")
    question.right = np.float32(value).tobytes()
    return question


def head_of(request: Question | Request, owner: str = LOAD) -> bytes:
    """Return the head of a POST request."""
    length_and_key = {"Content-Length": str(len(request.body)), "Connection": "close", **bearer(owner)}
    fields = {"Host": "localhost", **request.headers, **length_and_key}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {request.path} HTTP/1.1\r\n{lines}\r\n".encode()


def connected(world: World, receive: int | None = None) -> socket.socket:
    connection = socket.socket()
    if receive is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    connection.settimeout(PATIENCE)
    connection.connect(("127.0.0.1", world.service.port))
    return connection


def _rest(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(1 << 20), b""))


def _checked(world: World, question: Question, answer: bytes) -> str:
    """Check that an answer is right or a refusal, and return its status. Raises ConnectionError if it is incomplete."""
    head, _, body = answer.partition(b"\r\n\r\n")
    length = next((int(x[15:]) for x in head.lower().split(b"\r\n") if x.startswith(b"content-length:")), None)
    if length is None or len(body) < length:
        raise ConnectionError(f"{len(answer)} bytes, and no whole answer")
    status = head[9:12].decode()
    if status == "200":
        size = 8 + int.from_bytes(body[:8], "little")
        if body[size:] != question.right * ((length - size) // len(question.right)):
            world.violations.append("a slow caller got a wrong answer")
    elif status not in ("408", "429", "503", "504"):
        world.violations.append(f"a slow caller got {status}: {body[:200]!r}")
    return status
