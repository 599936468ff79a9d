"""Make the TLS context: the server's certificate, and the check of client certificates (mTLS)."""

from __future__ import annotations

import ssl
from pathlib import Path

# The ciphers of TLS 1.2 that have forward secrecy and authenticated encryption. All ciphers of TLS 1.3 have both.
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"


def context(cert: Path, key: Path | None, client_ca: Path | None) -> ssl.SSLContext:
    """Return a context for TLS 1.2 and later from PEM files. Raises ValueError, which names the file that is wrong."""
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
            raise ValueError(f"{client_ca} contains no valid certificates: {error.strerror or error}") from None
    return made


def load(into: ssl.SSLContext, cert: Path, key: Path | None) -> None:
    """Load the certificate and its key into the context `into`, for new connections.

    Raises ValueError, and then leaves `into` unchanged.
    """

    def no_password() -> str:
        raise ValueError(f"the key in {key or cert} has a password; give a key without a password")

    try:
        # Load into a temporary context first: a certificate and key that do not match would damage `into`, and every
        # later connection would fail.
        for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), into):
            context.load_cert_chain(cert, key, no_password)
    except (OSError, ssl.SSLError) as error:
        files = f"{cert} and {key}" if key else f"{cert}"
        raise ValueError(
            f"the certificate and its key cannot be read from {files}: {error.strerror or error}"
        ) from None
