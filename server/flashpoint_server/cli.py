"""`flashpoint serve`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pydantic import ValidationError

from flashpoint_server import logs
from flashpoint_server.serving import run
from flashpoint_server.settings import Settings


def serve(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal; the exit code. `argv` are the flags, of the process by default; see `Settings`."""
    flags = list(sys.argv[1:] if argv is None else argv)
    try:
        settings = Settings(_cli_parse_args=flags)  # type: ignore[call-arg]
    except ValidationError as error:
        for e in error.errors(include_input=False):
            print(f"flashpoint serve: {'.'.join(map(str, e['loc']))}: {e['msg']}", file=sys.stderr)
        return 2
    logs.configure(settings.log_format, settings.log_level)
    return run(settings, flags)


if __name__ == "__main__":
    sys.exit(serve())
