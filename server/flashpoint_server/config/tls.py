"""Make the TLS context: the server's certificate, and the check of client certificates (mTLS)."""

from __future__ import annotations

import base64
import os
import re
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from flashpoint_server.config.content import content

# The ciphers of TLS 1.2 that have forward secrecy and authenticated encryption. All ciphers of TLS 1.3 have both.
_PEM = re.compile(rb"-----BEGIN (?:TRUSTED |X509 )?CERTIFICATE-----\s*(.*?)-----END", re.DOTALL)
_VERSION, _UTC_TIME = 0xA0, 0x17  # tags of DER
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"


class Certificate(NamedTuple):
    """A valid certificate with its intermediates, its key, and the authorities of client certificates, as PEM."""

    cert: bytes
    key: bytes | None  # None: `cert` contains it
    client_ca: bytes | None


def read(cert: Path, key: Path | None, client_ca: Path | None, look: Callable[[Path], bytes] = content) -> Certificate:
    """Return the content of PEM files, after a check. Raises ValueError, which names the file that is wrong."""
    if client_ca is not None:
        authorities = look(client_ca)
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=authorities.decode("ascii", "replace"))
        except (OSError, ssl.SSLError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise ValueError(f"{client_ca} contains no valid certificates: {why}") from None
    certificate = Certificate(
        look(cert), None if key is None else look(key), None if client_ca is None else authorities
    )
    if not _PEM.search(certificate.cert):
        raise ValueError(f"{cert} contains no certificate in PEM")
    if b"PRIVATE KEY-----" not in (certificate.key or certificate.cert):
        hint = "" if key else "; name its file with --tls-key"
        raise ValueError(f"{key or cert} contains no private key{hint}")
    try:
        load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), certificate)
    except _PasswordError:
        raise ValueError(f"the key in {key or cert} has a password; give a key without a password") from None
    except (OSError, ssl.SSLError) as error:
        files = f"{cert} and {key}" if key else f"{cert}"
        raise ValueError(
            f"the certificate and its key cannot be read from {files}: {error.strerror or error}"
        ) from None
    return certificate


def context(certificate: Certificate) -> ssl.SSLContext:
    """Return a context for TLS 1.2 and later."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.set_ciphers(CIPHERS)
    made.set_alpn_protocols(["http/1.1"])
    load(made, certificate)
    if certificate.client_ca is not None:
        made.verify_mode = ssl.CERT_REQUIRED
        made.load_verify_locations(cadata=certificate.client_ca.decode("ascii", "replace"))
    return made


def load(into: ssl.SSLContext, certificate: Certificate) -> None:
    """Load a certificate of `read` and its key into the context `into`, for new connections."""
    with _file(certificate.cert) as cert, _file(certificate.key or certificate.cert) as key:
        into.load_cert_chain(cert, key, _no_password)


def expiry(cert: bytes) -> float:
    """Return the Unix time at which the first of the certificates in a PEM file expires.

    The ssl module shows no date of a certificate of our own, so this function reads the DER. RFC 5280, 4.1: a
    certificate is a sequence that begins with one of version, serial number, algorithm, issuer and validity.
    """
    ends = []
    for block in _PEM.findall(cert):
        (_, certificate), *_ = _parts(base64.b64decode(block))
        (_, signed), *_ = _parts(certificate)
        _, _, _, (_, validity), *_ = [part for part in _parts(signed) if part[0] != _VERSION]
        _, (kind, end) = _parts(validity)
        text = end.decode("ascii")
        if kind == _UTC_TIME:  # two digits of the year
            text = ("20" if text < "5" else "19") + text
        ends.append(datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp())
    return min(ends)


def _parts(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the tag and the content of each part of a DER sequence's content."""
    at = 0
    while at < len(der):
        tag, size, at = der[at], der[at + 1], at + 2
        if size & 0x80:  # the size follows in as many bytes
            count = size & 0x7F
            size, at = int.from_bytes(der[at : at + count]), at + count
        yield tag, der[at : at + size]
        at += size


class _PasswordError(Exception):
    """The key has a password."""


def _no_password() -> str:
    raise _PasswordError


@contextmanager
def _file(text: bytes) -> Iterator[str]:
    """Yield the path of a file in memory with this content: the ssl module reads certificates only from files."""
    fd = os.memfd_create("flashpoint-certificate", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(text)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
