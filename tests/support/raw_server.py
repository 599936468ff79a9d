"""A server that is only a socket, for tests with behaviour that a correct HTTP server never shows."""

import contextlib
import socket
import threading

PATIENCE = 60  # seconds; only a hang takes so long


class RawServer:
    """A server that runs `talk(connection)` in a thread for each connection, and then closes the connection.

    `opened` counts all connections, `closed` the ended ones. With `tls`, an `ssl.SSLContext`, connections use TLS.
    `receive_buffer` is the size in bytes of their sockets' receive buffers (SO_RCVBUF).
    """

    def __init__(self, talk, tls=None, receive_buffer=None):
        self._talk = talk
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        if receive_buffer is not None:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._connections = []
        self._threads = []
        self.opened = self.closed = 0
        self.port = self._listener.getsockname()[1]
        self.url = f"http{'s' if tls else ''}://localhost:{self.port}"

    def __enter__(self):
        self._start(self._accept)
        return self

    def __exit__(self, *_):
        for each in (self._listener, *self._connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _start(self, target, *args):
        self._threads.append(threading.Thread(target=target, args=args))
        self._threads[-1].start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection = self._listener.accept()[0]
                # With Nagle's algorithm, an answer after TLS tickets would wait until the tickets are acknowledged. The
                # answer would be lost if the connection were closed before.
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._connections.append(connection)
                self.opened += 1
                self._start(self._serve, connection)

    def _serve(self, connection):
        with contextlib.suppress(OSError), connection:  # in some tests the client closes the connection
            if self._tls:
                with self._tls.wrap_socket(connection.dup(), server_side=True) as secure:
                    self._talk(secure)
            else:
                self._talk(connection)
        self.closed += 1


def read_head(connection):
    """Return a request's head, the body bytes that came with it, and the body's size.

    If the client has closed the connection, both are empty and the size is 0.
    """
    received = b""
    while b"\r\n\r\n" not in received:
        if not (data := connection.recv(1 << 16)):
            return b"", b"", 0
        received += data
    head, _, body = received.partition(b"\r\n\r\n")
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    return head, body, int(fields.get(b"content-length", 0))


def read_request(connection):
    """Return a request's body, or None if the client has closed the connection."""
    head, body, size = read_head(connection)
    if not head:
        return None
    received = bytearray(body)
    while len(received) < size:
        received += connection.recv(1 << 20)
    return received


def until_closed(connection):
    """Read until the client closes the connection."""
    while connection.recv(1 << 20):
        pass
