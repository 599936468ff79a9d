"""`flashpoint health` reports whether the server on this host answers."""

import re

from flashpoint.cli import main


def test_health_is_asked_where_the_server_is(server, capsys):
    assert main(["health", "--port", str(server.port)]) == 0
    assert (
        main(["health", "--port", str(server.port), "--host", "0.0.0.0"]) == 0
    )  # the command of the Docker image's health check
    assert capsys.readouterr().out == 2 * "alive: /health/live is 200\n"
    assert main(["health", "--port", "0"]) == 2
    assert main(["health", "--queue-limit", "0"]) == 2
    assert "flashpoint health: --queue-limit: unknown option" in capsys.readouterr().err


def test_health_takes_the_address_and_tls_alone(capsys):
    assert main(["health", "--help"]) == 0
    flags = set(re.findall(r"^  (?:-h, )?(--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    assert flags == {
        "--config", "--env-file", "--host", "--port", "--tls-cert", "--tls-key", "--tls-client-ca", "--help",
    }  # fmt: skip
