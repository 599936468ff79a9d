"""The table of all commands, the form of their errors, and the hints that say which extra to install.

A command is imported only when it runs, because its module needs an extra. This module works without any extra.
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


_GROUPS = {
    ("Serve", "flashpoint_server.cli"): {
        "serve": "Start a server.",
        "config": "Print the settings in force and where each comes from.",
        "health": "Ask the server on this host whether it is alive.",
        "key": "Make an API key and its entry for the file of keys.",
    },
    ("Judge and measure, here or at a server", "flashpoint.commands"): {
        "verify": "Judge attention against float64: a backend's, or your own.",
        "benchmark": "Time attention over a grid, on each backend.",
        "reproduce": "Measure here what papers and projects claim.",
        "capacity": "Predict how long a request takes and what a load needs.",
        "loadtest": "Put load on a server, and check every answer.",
        "info": "Show device, versions, backends and the options of each.",
    },
}
COMMANDS = {
    name: Command(f"{package}.{name}:{name}", group, about)
    for (group, package), commands in _GROUPS.items()
    for name, about in commands.items()
}
_EXTRAS = {"flashpoint": "cli", "flashpoint_server": "server"}  # the extra that installs the dependencies of a package


def missing(error: ModuleNotFoundError, package: str) -> tuple[str, str]:
    """Return the message and the hint for a missing dependency. Raises `error` if `package` itself is broken."""
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
