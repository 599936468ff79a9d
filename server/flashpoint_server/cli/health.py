"""`flashpoint health`: ask the server on this host whether it is alive.

The container image uses it as its health check (docs/docker.md).
"""

from __future__ import annotations

import http.client
import socket
import ssl
from functools import partial

from flashpoint.commands.app import RIGHT, WRONG, CommandError, examples
from flashpoint_server.cli.flags import takes_settings
from flashpoint_server.config.settings import GivenSettings, Settings
from flashpoint_server.config.sources import Sourced

EXAMPLES = """
  flashpoint health
  flashpoint health --port 9000
"""
_ADDRESS = ("host", "port", "tls_cert", "tls_key", "tls_client_ca")  # the settings that say how to reach the server
PATH = "/health/live"
PATIENCE = 4.0  # timeout in seconds
_THIS_HOST = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


@examples(EXAMPLES)
@partial(takes_settings, kind=GivenSettings, only=_ADDRESS)  # it needs no key, and answers while a file is damaged
def health(*, sourced: Sourced) -> int:
    """Ask the server on this host whether it is alive.

    Host, port and TLS are read as `flashpoint serve` reads them: from flags, variables and files. Exit code 0: the
    server answers. 1: it does not. `flashpoint info --url URL` asks a server at another address.
    """
    settings = sourced.settings
    if settings.port == 0:
        raise CommandError("--port: must be the port of the server, not 0", "the log of the server names it: listening")
    try:
        state = ask(settings)
    except (OSError, http.client.HTTPException) as error:
        hint = "is the server running, with the same host, port and TLS?"
        raise CommandError(f"no answer on port {settings.port}: {error}", hint, WRONG) from None
    print(state)
    return RIGHT


def ask(settings: Settings) -> str:
    """Return the server's answer. Raises OSError or HTTPException if there is none.

    With mTLS the server requires a client certificate, which this command does not have. Then a TLS alert in the
    handshake counts as the answer, because the process that serves requests sends it.
    """
    host = _THIS_HOST.get(settings.host, settings.host)
    if settings.tls_cert is None:
        return _get(http.client.HTTPConnection(host, settings.port, timeout=PATIENCE))
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # The connection stays on this host and sends no secrets, so do not verify the certificate.
    trusting.check_hostname = False
    trusting.verify_mode = ssl.CERT_NONE
    if settings.tls_client_ca is None:
        return _get(http.client.HTTPSConnection(host, settings.port, timeout=PATIENCE, context=trusting))
    with socket.create_connection((host, settings.port), PATIENCE) as connection:
        try:
            trusting.wrap_socket(connection, server_hostname=host).close()
        except ssl.SSLError as error:
            if "alert" not in str(error).lower():  # a TLS alert that asks for a certificate counts as an answer
                raise
    return "alive: it answers the handshake"


def _get(connection: http.client.HTTPConnection) -> str:
    try:
        connection.request("GET", PATH)
        answer = connection.getresponse()
        answer.read()
    finally:
        connection.close()
    if answer.status >= 500:
        raise http.client.HTTPException(f"{PATH} is {answer.status}")
    return f"alive: {PATH} is {answer.status}"
