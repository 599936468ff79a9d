"""`flashpoint serve`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches

import structlog
from pydantic import ValidationError

from flashpoint_server.cli.hangup import HANGUP
from flashpoint_server.cli.serving import open_to_all, run
from flashpoint_server.config.settings import Settings
from flashpoint_server.observability import logs

log = structlog.stdlib.get_logger("flashpoint.settings")

_PREFIX = "FLASHPOINT_"
_ALIKE = 0.95  # a slip of one letter; FLASHPOINT_PORT_8000_TCP, which Kubernetes sets, is nothing like a setting
_OF_CLIENTS = "FLASHPOINT_API_KEY"


def serve(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal; the exit code. `argv` are the flags, of the process by default; see `Settings`."""
    HANGUP.catch()
    flags = list(sys.argv[1:] if argv is None else argv)
    if (settings := parse("flashpoint serve", flags)) is None:
        return 2
    if not settings.insecure and (address := open_to_all(settings)) is not None:
        print(
            f"flashpoint serve: --host: other machines can reach {address}, and the server has no keys. Set keys "
            "(--api-keys-file; see `flashpoint key --help`) or --tls-client-ca. To serve everybody, set --insecure "
            "(FLASHPOINT_INSECURE=true). To serve this machine alone, set --host 127.0.0.1",
            file=sys.stderr,
        )
        return 2
    logs.configure(settings.log_format, settings.log_level)
    for name, meant in misspelt(os.environ):
        log.warning("unknown setting", variable=name, perhaps=meant)
    return run(settings, flags)


def parse(command: str, flags: list[str]) -> Settings | None:
    """The settings of flags and variables; None where one is not right, which is printed, each with its flag."""
    try:
        return Settings(_cli_parse_args=flags, _cli_prog_name=command)  # type: ignore[call-arg]
    except ValidationError as error:
        for e in error.errors(include_input=False):
            flag = ".".join(map(str, e["loc"])).replace("_", "-")
            print(f"{command}: --{flag}: {e['msg'].removeprefix('Value error, ')}", file=sys.stderr)
        return None


def misspelt(variables: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Environment variables that are no settings but look like one, each with that one."""
    known = {_PREFIX + name.upper() for name in Settings.model_fields}
    for name in variables:
        upper = name.upper()  # as the settings are read, whatever their case
        if upper not in known | {_OF_CLIENTS} and (near := get_close_matches(upper, known, 1, _ALIKE)):
            yield name, near[0]


if __name__ == "__main__":
    sys.exit(serve())
