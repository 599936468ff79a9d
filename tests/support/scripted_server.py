"""An HTTP server that follows a script, for tests of a client with answers that a healthy server never sends."""

import json
import socket
import struct
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from flashpoint_contract.wire import MEDIA_TYPE, build_head, head_size, parse_head


def message(tensors, metadata=None):
    """Return a safetensors body of numpy arrays."""
    head = build_head([(n, a.dtype.name, a.shape) for n, a in tensors.items()], metadata or {})
    return head + b"".join(a.tobytes() for a in tensors.values())


class ScriptedServer(ThreadingHTTPServer):
    """A server that answers each request by the next step of `script`. If there is no step, it sends q back as o.

    A step is a function of the handler, which has `body`, `answer(...)` and the `http.server` methods. `requests` holds
    (method, path, headers, body), `connections` counts the connections.
    """

    daemon_threads = True

    def __init__(self):
        self.script = deque()
        self.requests = []
        self.connections = 0
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"

    def get_request(self):
        self.connections += 1
        return super().get_request()

    def handle_error(self, request, client_address):
        """Ignore the error: in some scripts the client disconnects."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append((self.command, self.path, self.headers, self.body))
        step = self.server.script.popleft() if self.server.script else echo
        step(self)

    do_POST = do_DELETE = do_GET  # noqa: N815

    def answer(self, status=200, body=b"", media=MEDIA_TYPE, length=None, **headers):
        self.send_response(status)
        self.send_header("Content-Type", media)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def problem(self, status, code="some_code", detail="some detail", **headers):
        document = {"status": status, "code": code, "detail": detail, "request_id": "r1"}
        self.answer(status, json.dumps(document).encode(), "application/problem+json", **headers)

    def begin_chunks(self, status=200, media="text/event-stream", **headers):
        """Begin an answer of unknown length; `chunk` and `end_chunks` follow."""
        self.send_response(status)
        self.send_header("Content-Type", media)
        self.send_header("Transfer-Encoding", "chunked")
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def chunk(self, data):
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end_chunks(self):
        self.wfile.write(b"0\r\n\r\n")

    def vanish(self):
        """Reset the connection without an answer."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()
        self.wfile = self.rfile = open("/dev/null", "rb+", buffering=0)  # noqa: SIM115 - closed by the base class

    def log_message(self, format, *args):
        pass


def echo(handler):
    head = parse_head(handler.body[: head_size(handler.body[:8])])
    q = next(t for t in head.tensors if t.name == "q")
    data = handler.body[head.size + q.start : head.size + q.stop]
    handler.answer(body=build_head([("o", q.dtype, q.shape)], {}) + data)
