"""HTTPS: the server's certificate, and those that its callers must show where it asks for them (mTLS)."""

from __future__ import annotations

import ssl
from pathlib import Path

# The ciphers of TLS 1.2 that have the two properties of all in TLS 1.3: forward secrecy, and authenticated encryption.
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"


def context(cert: Path, key: Path | None, client_ca: Path | None) -> ssl.SSLContext:
    """TLS 1.2 and later, by PEM files. Raises ValueError, which names the file that is wrong."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.set_ciphers(CIPHERS)
    made.set_alpn_protocols(["http/1.1"])
    load(made, cert, key)
    if client_ca is not None:
        made.verify_mode = ssl.CERT_REQUIRED
        try:
            made.load_verify_locations(client_ca)
        except (OSError, ssl.SSLError) as error:
            raise ValueError(f"no certificates in {client_ca}: {error.strerror or error}") from None
    return made


def load(into: ssl.SSLContext, cert: Path, key: Path | None) -> None:
    """Show this certificate from the next connection on. Raises ValueError, and then all is as it was."""

    def no_password() -> str:
        raise ValueError(f"the key in {key or cert} has a password, and there is nobody to ask for it")

    try:
        # A pair that does not fit would leave `into` with half of it, and no connection could be made any more.
        for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), into):
            context.load_cert_chain(cert, key, no_password)
    except (OSError, ssl.SSLError) as error:
        files = f"{cert} and {key}" if key else f"{cert}"
        raise ValueError(
            f"the certificate and its key cannot be read from {files}: {error.strerror or error}"
        ) from None
