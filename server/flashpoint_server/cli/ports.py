"""Own the ports of a server: another server that wants one fails at its start, with a sentence.

HTTP processes share one listening socket. gRPC makes its own sockets, so a reservation holds its port for the life of
the server, and the sockets of the server's own processes join it.
"""

from __future__ import annotations

import errno
import socket
from ipaddress import ip_address
from typing import Any

import structlog

from flashpoint_server.config.settings import Settings

log = structlog.stdlib.get_logger("flashpoint.serving")


def listen(settings: Settings) -> socket.socket | None:
    """Return a socket that listens for HTTP. If it cannot, log the reason and return None.

    The host `::` means every address of IPv6 and of IPv4, as for gRPC.
    """
    address, family = (settings.host, settings.port), _family(settings.host)
    both = family == socket.AF_INET6 and settings.host == "::" and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(address, family=family, backlog=2048, dualstack_ipv6=both)
    except OSError as error:
        log.error("cannot listen", **why(error, *address, "--port"))
        return None


def reserve(settings: Settings) -> socket.socket | None:
    """Return a socket that owns the port for gRPC. If it cannot, log the reason and return None.

    Sockets of this user with SO_REUSEPORT can listen on the port; other servers' reservations cannot.
    """
    host, port = settings.host, settings.grpc_port
    try:
        if not port:
            with socket.create_server((host, 0), family=_family(host)) as free:
                port = free.getsockname()[1]
        return _reserved(host, port)
    except OSError as error:
        log.error("cannot listen", **why(error, host, port, "--grpc-port"))
        return None


def address(settings: Settings) -> str:
    """Return the numeric address, with the port, that `reserve` has reserved: gRPC would resolve a name to several."""
    where = socket.getaddrinfo(
        settings.host or None, settings.grpc_port, _family(settings.host), socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    host, port = map(str, where[0][4][:2])
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _reserved(host: str, port: int) -> socket.socket:
    owner = socket.socket(_family(host))
    try:
        # Connections of an ended server in TIME_WAIT do not hinder the bind. If two bind at the same time, the second
        # fails to listen.
        owner.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        owner.bind((host, port))
        owner.listen(1)
        owner.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        owner.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        owner.shutdown(socket.SHUT_RDWR)  # it receives no connections, and keeps the port
    except BaseException:
        owner.close()
        raise
    return owner


def why(error: OSError, host: str, port: int | None, flag: str) -> dict[str, Any]:
    """Return the fields of the log line about a port that cannot be used; `advice` says what to do."""
    name = f"set {flag} (FLASHPOINT_{flag.strip('-').replace('-', '_').upper()})"
    cause = error.__cause__ if isinstance(error.__cause__, OSError) and error.errno is None else error
    reason, advice = cause.strerror or str(cause), f"{name} to another port, or end the program that uses this one"
    if (cause.errno or 0) < 0:  # errors of the resolver have negative numbers
        reason, advice = f"the host name {host!r} has no address", "set --host to an address of this machine: 127.0.0.1"
    elif cause.errno == errno.EADDRINUSE:
        reason = f"port {port} is in use by another program"
        advice = f"{name} to another port (0: any free one), or end the program that uses it (`ss -ltnp` names it)"
    elif cause.errno in (errno.EACCES, errno.EPERM):
        reason = f"this user may not listen on port {port}"
        advice = f"{name} to 1024 or above, or give the program the capability CAP_NET_BIND_SERVICE"
    elif cause.errno == errno.EADDRNOTAVAIL:
        reason, advice = f"{host} is no address of this machine", "set --host to one: 127.0.0.1, or 0.0.0.0 for all"
    return {"host": host, "port": port, "error": reason, "advice": advice}


def open_to_all(settings: Settings) -> str | None:
    """Return an address of `settings.host` that other hosts reach without authentication; None if there is none."""
    if settings.api_keys or settings.api_keys_file or settings.tls_client_ca:
        return None
    host, port, family = settings.host or None, settings.port, _family(settings.host)
    try:
        addresses = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:  # `listen` will report this error
        return None
    return next((str(where[0]) for *_, where in addresses if not loopback(str(where[0]))), None)


def loopback(address: str) -> bool:
    ip = ip_address(address)
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
