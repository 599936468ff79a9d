"""Send handwritten HTTP requests, and read all answers until the server closes the connection."""

import contextlib
import http.client
import io
import socket

from tests.support.messages import reply
from tests.support.sockets import connect


class _Read:
    """A socket from which `http.client` reads an answer."""

    def __init__(self, file):
        self._file = file

    def makefile(self, *_):
        return self._file


class _Open(io.BytesIO):
    """The bytes of several answers; `close` does nothing, because `http.client` closes the file after each answer."""

    def close(self):
        pass


def talk(server, sent, *, half=False):
    """Send bytes, and return all bytes until the server closes the connection; `half` shuts down sending."""
    with connect(server) as connection:
        connection.sendall(sent)
        if half:
            connection.shutdown(socket.SHUT_WR)
        return read_to_end(connection)


def read_to_end(connection):
    received = bytearray()
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(1 << 20):
            received += piece
    return bytes(received)


def answers(received):
    """Return the answers in `received`, in order; skip interim statuses."""
    file, read = _Open(received), []
    while file.tell() < len(received):
        response = http.client.HTTPResponse(_Read(file))
        response.begin()
        read.append(reply(response))
    return read


def one(received):
    """Return the only answer in `received`."""
    (answer,) = answers(received)
    return answer


def get(path, *fields, version="1.1", host="Host: localhost"):
    """Return a GET request; `host` may be several lines or none."""
    lines = [f"GET {path} HTTP/{version}", *([host] if host else []), *fields]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def post(path, body, media, *fields, version="1.1"):
    lines = [f"POST {path} HTTP/{version}", "Host: localhost", f"Content-Type: {media}", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, *fields, "", ""]).encode("latin-1") + body
