"""HTTP/1.1 answers as bytes. Their bodies end by Content-Length, by chunks, or when the connection is closed."""

import numpy as np

from flashpoint_contract.wire import MEDIA_TYPE
from tests.support.raw_server import read_request
from tests.support.scripted_server import message

Q = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
TINY = np.zeros((1, 4), np.float32)
BIG = np.zeros((1, 4 << 20), np.float32)  # 16 MiB: more than the sockets buffer if a server has `receive_buffer=SMALL`
SMALL = 1 << 16  # bytes of a server's receive buffer
GOOD = message({"o": Q})
TYPE = f"Content-Type: {MEDIA_TYPE}\r\n".encode()


def answer(body=GOOD, status=b"200 OK", head=b"", version=b"1.1"):
    return b"HTTP/%b %b\r\n%b%bContent-Length: %d\r\n\r\n%b" % (version, status, TYPE, head, len(body), body)


def unframed(head=b"", body=GOOD, version=b"1.1"):
    return b"HTTP/%b 200 OK\r\n%b%b\r\n%b" % (version, TYPE, head, body)


def chunked(body=GOOD, size=7):
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def refusal(status):
    return answer(b'{"code": "early"}', status, b"Connection: close\r\n").replace(
        TYPE, b"Content-Type: application/problem+json\r\n"
    )


def echo(connection):
    while (body := read_request(connection)) is not None:
        q = np.frombuffer(body, np.float32, offset=8 + int.from_bytes(body[:8], "little"))[: Q.size].reshape(Q.shape)
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/vnd.safetensors\r\n"
        data = message({"o": q})
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)
