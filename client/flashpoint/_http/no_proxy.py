"""NO_PROXY: the servers that are reached without a proxy. The rules are those of curl."""

from __future__ import annotations

import os
import re
import socket
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import httpx

_PORT = re.compile(r"([^:]+|\[.*\]):(\d+)")  # a host name, an IPv4 address or an IPv6 address in brackets, with a port


def excepted(host: str, port: int) -> bool:
    """Return whether NO_PROXY has an entry for a server. `no_proxy` counts before it, unless it is empty.

    Commas or blanks separate entries. An entry is `*`, which means every server; a name, which includes all names
    below it; an IP address; or a network, as 10.0.0.0/8. A name or an address may have a port, which curl ignores.
    """
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    return any(_matches(entry, host, port) for entry in re.split(r"[,\s]+", given) if entry)


def _matches(entry: str, host: str, port: int) -> bool:
    if entry == "*":
        return True
    if with_port := _PORT.fullmatch(entry):
        entry = with_port[1]
        if int(with_port[2]) != port:
            return False
    address = _address(host)
    if address is None:
        name, suffix = _name(host), _name(entry)
        return bool(suffix) and f".{name}".endswith(f".{suffix}")
    if "/" not in entry:
        return _address(entry) == address
    try:
        network = ip_network(entry.replace("[", "").replace("]", ""), strict=False)
    except ValueError:
        return False
    return address in network


def _address(host: str) -> IPv4Address | IPv6Address | None:
    """Return the IP address that `host` is; None for a name. IPv4 may be short, octal or hexadecimal, as in 127.1."""
    host = host.removeprefix("[").removesuffix("]").partition("%")[0]
    try:
        address = ip_address(host)
    except ValueError:
        try:
            return IPv4Address(socket.inet_aton(host.removesuffix(".")))
        except OSError:
            return None
    return getattr(address, "ipv4_mapped", None) or address


def _name(host: str) -> str:
    """Return a host name in lower case and as IDNA, without a dot at its start or its end."""
    host = host.removesuffix(".").removeprefix(".")
    try:
        return httpx.URL(scheme="http", host=host).raw_host.decode("ascii")
    except httpx.InvalidURL:
        return host.lower()
