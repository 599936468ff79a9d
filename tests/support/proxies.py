"""Proxies on loopback: HTTP (CONNECT and forwarding), HTTP over TLS, and SOCKS 5. A thread copies each direction."""

import base64
import contextlib
import socket
import threading

from tests.support.raw_server import RawServer, read_head


class ProxyServer(RawServer):
    """A proxy; `asked` has the received request lines or SOCKS addresses. It requires `credentials`, USER:PASSWORD."""

    def __init__(self, scheme, tls=None, credentials=None):
        super().__init__(self._socks if scheme == "socks5" else self._http, tls)
        self.asked = []
        self._credentials = credentials
        userinfo = f"{credentials}@" if credentials else ""
        self.url = f"{scheme}://{userinfo}localhost:{self.port}"

    def _http(self, connection):
        head, body, _ = read_head(connection)
        if not head:
            return
        lines = head.split(b"\r\n")
        method, target, _ = lines[0].split()
        self.asked.append(lines[0].decode())
        if self._credentials:
            wanted = b"proxy-authorization: basic " + base64.b64encode(self._credentials.encode()).lower()
            if wanted not in [line.lower() for line in lines]:
                connection.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
                return
        if method == b"CONNECT":
            host, _, port = target.decode().rpartition(":")
            with socket.create_connection((host, int(port))) as server:
                connection.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                _both_ways(connection, server)
            return
        host, path = target.decode().removeprefix("http://").split("/", 1)
        name, _, port = host.rpartition(":")
        with socket.create_connection((name, int(port))) as server:
            forwarded = [line for line in lines[1:] if not line.lower().startswith(b"proxy-")]
            server.sendall(b"\r\n".join([b"%b /%b HTTP/1.1" % (method, path.encode()), *forwarded, b"", b""]) + body)
            _both_ways(connection, server)

    def _socks(self, connection):
        _, count = _exactly(connection, 2)
        methods = _exactly(connection, count)
        if self._credentials:
            assert 2 in methods
            connection.sendall(b"\x05\x02")
            _, size = _exactly(connection, 2)
            user = _exactly(connection, size)
            password = _exactly(connection, _exactly(connection, 1)[0])
            good = f"{user.decode()}:{password.decode()}" == self._credentials
            connection.sendall(b"\x01\x00" if good else b"\x01\x01")
            if not good:
                return
        else:
            connection.sendall(b"\x05\x00")
        _, _, _, kind = _exactly(connection, 4)
        if kind == 3:
            host = _exactly(connection, _exactly(connection, 1)[0]).decode()
        else:
            host = socket.inet_ntop(*((socket.AF_INET, _exactly(connection, 4)) if kind == 1
                                      else (socket.AF_INET6, _exactly(connection, 16))))  # fmt: skip
        port = int.from_bytes(_exactly(connection, 2), "big")
        self.asked.append(f"{host}:{port}")
        try:
            server = socket.create_connection((host, port))
        except OSError:
            connection.sendall(b"\x05\x05\x00\x01\0\0\0\0\0\0")
            return
        with server:
            connection.sendall(b"\x05\x00\x00\x01\0\0\0\0\0\0")
            _both_ways(connection, server)


def _exactly(connection, size):
    received = b""
    while len(received) < size:
        if not (more := connection.recv(size - len(received))):
            raise OSError("closed")
        received += more
    return received


def _both_ways(client, server):
    """Copy bytes in both directions until either side ends."""

    def copy(source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for each in (client, server):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    other = threading.Thread(target=copy, args=(server, client))
    other.start()
    copy(client, server)
    other.join()
