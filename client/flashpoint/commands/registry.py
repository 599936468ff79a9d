"""The table of all commands, the form of their errors, and the hints that say which extra to install.

The table has only names: a command is imported when it runs. The commands need the extra `cli`, and those that serve
need the extra `server`. This module needs neither extra.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from flashpoint_contract.wording.hints import how_to_install


class Command(NamedTuple):
    """A command: its `module:function`, its group in the help, and its line in the help."""

    target: str
    group: str
    about: str


_SERVING, _JUDGING = "Serve", "Judge and measure, here or at a server"
COMMANDS = {
    "serve": Command("flashpoint_server.cli.serve:serve", _SERVING, "Start a server."),
    "config": Command(
        "flashpoint_server.cli.config:config", _SERVING, "Print the settings in force and where each comes from."
    ),
    "health": Command(
        "flashpoint_server.cli.health:health", _SERVING, "Ask the server on this host whether it is alive."
    ),
    "key": Command("flashpoint_server.cli.key:key", _SERVING, "Make an API key and its entry for the file of keys."),
    "verify": Command(
        "flashpoint.commands.verify:verify", _JUDGING, "Judge attention against float64: a backend's, or your own."
    ),
    "benchmark": Command(
        "flashpoint.commands.benchmark:benchmark", _JUDGING, "Time attention over a grid, on each backend."
    ),
    "reproduce": Command(
        "flashpoint.commands.reproduce:reproduce", _JUDGING, "Measure here what papers and projects claim."
    ),
    "capacity": Command(
        "flashpoint.commands.capacity:capacity", _JUDGING, "Predict how long a request takes and what a load needs."
    ),
    "info": Command(
        "flashpoint.commands.info:info", _JUDGING, "Show device, versions, backends and the options of each."
    ),
}
_EXTRAS = {"flashpoint": "cli", "flashpoint_server": "server"}  # the extra that installs the dependencies of a package


def missing(error: ModuleNotFoundError, package: str) -> tuple[str, str]:
    """Return the message and the hint for a missing dependency of `package`.

    Raises `error` if the missing module belongs to `package`: then the package is broken.
    """
    if error.name is None or error.name.partition(".")[0] == package:
        raise error
    return f"needs {error.name}, which is not installed", how_to_install(_EXTRAS.get(package, package))


def misused(name: str, message: str, hint: str | None = None) -> int:
    """Print an error about wrong arguments to stderr, and return the exit code."""
    complain(name, message, hint)
    return 2


def complain(name: str, message: str, hint: str | None = None) -> None:
    """Print an error to stderr: one line says what is wrong, the next one what to do."""
    print(f"{name}: {message}" + (f"\n  hint: {hint}" if hint else ""), file=sys.stderr)
