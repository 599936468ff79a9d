"""The command `flashpoint serve`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import structlog

from flashpoint.cli import main as run_command
from flashpoint.commands.app import CommandError, examples
from flashpoint_server.cli.flags import takes_settings
from flashpoint_server.cli.hangup import HANGUP
from flashpoint_server.cli.ports import open_to_all
from flashpoint_server.cli.serving import run
from flashpoint_server.config.sources import Sourced
from flashpoint_server.observability import logs

log = structlog.stdlib.get_logger("flashpoint.settings")

EXAMPLES = """
  flashpoint serve
  flashpoint serve --port 9000 --workers 4
  FLASHPOINT_DEVICE=cpu flashpoint serve
  flashpoint serve --config flashpoint.toml --log-level debug
  flashpoint serve --host 0.0.0.0 --api-keys-file keys.toml
"""


@examples(EXAMPLES)
@takes_settings
def serve(*, sourced: Sourced) -> int:
    """Serve flash attention over HTTP until a signal ends it.

    A setting is a flag, a variable (--queue-limit is FLASHPOINT_QUEUE_LIMIT), a line of --env-file, or a line of
    --config (queue_limit = 64). The first source in this order that has the setting wins. `flashpoint config` prints
    the settings in use.
    """
    HANGUP.catch()
    settings = sourced.settings
    if not settings.insecure and (address := open_to_all(settings)) is not None:
        raise CommandError(
            f"--host: other machines can reach {address}, and the server has no API keys",
            "set keys (--api-keys-file; see `flashpoint key --help`) or --tls-client-ca. To serve everybody, set "
            "--insecure (FLASHPOINT_INSECURE=true). To serve this machine alone, set --host 127.0.0.1",
        )
    logs.configure(settings.log_format, settings.log_level)
    for name, meant in sourced.misspelt:
        log.warning("unknown setting", variable=name, perhaps=meant)
    return run(settings)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `flashpoint serve` with the flags `argv` (by default those of the process). Return the exit code."""
    return run_command(["serve", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
