"""Parse host names and addresses of the Host header and of `--allowed-hosts`."""

from __future__ import annotations

import re
from ipaddress import IPv6Address, ip_address

LONGEST_HOST = 300  # maximum characters of a Host header; a DNS name has 253 at most

# RFC 3986, §3.2.2 and §3.2.3, without user information: an IPv6 address in brackets, an IPv4 address or a name, and an
# optional port.
_AUTHORITY = re.compile(
    r"(\[[0-9A-Fa-f:.]{2,45}\]|(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+)(?::([0-9]{0,5}))?", re.ASCII
)


def host_name(host: str) -> str | None:
    """Return the name or address in a Host header, in lower case and without the port; None if it is not valid."""
    match = _AUTHORITY.fullmatch(host) if len(host) <= LONGEST_HOST else None
    if match is None or int(match[2] or 0) > 65535:
        return None
    name = match[1].lower()
    if not name.startswith("["):
        return name.removesuffix(".") or None
    try:
        return f"[{IPv6Address(name[1:-1])}]"
    except ValueError:
        return None


def is_loopback(name: str) -> bool:
    """Return whether a name from `host_name` means this machine by definition, without asking a resolver."""
    if name in ("localhost", "ip6-localhost", "ip6-loopback") or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
