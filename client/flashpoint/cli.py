"""`flashpoint COMMAND`: runs the commands that the installed packages bring, and knows none of them.

A command is an entry point of the group `flashpoint.commands`: a callable that takes the arguments behind its name and
returns an exit code or None.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points

from flashpoint import __version__

GROUP = "flashpoint.commands"
_EXTRAS = {"flashpoint": "cli", "flashpoint_server": "server"}  # which extra brings what a package needs


def main(argv: Sequence[str] | None = None) -> int:
    """Run `flashpoint` with `argv` (the process's by default); the exit code, 2 when it was called wrongly."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = {point.name: point for point in entry_points(group=GROUP)}
    usage = _usage(sorted(commands))
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"flashpoint {__version__}")
        return 0
    name, *rest = arguments
    if name not in commands:
        print(f"flashpoint: no command {name!r}\n\n{usage}", file=sys.stderr)
        return 2
    return _run(commands[name], rest)


def _run(point: EntryPoint, arguments: list[str]) -> int:
    package = point.module.partition(".")[0]
    try:
        command = point.load()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == package:
            raise  # not something to install: the package itself is broken
        extra = _EXTRAS.get(package, package)
        print(
            f"flashpoint {point.name} needs {error.name}, which is not installed: pip install 'flashpoint[{extra}]'",
            file=sys.stderr,
        )
        return 2
    return int(command(arguments) or 0)


def _usage(commands: Sequence[str]) -> str:
    listed = "\n".join(f"  {name}" for name in commands)
    return (
        "usage: flashpoint COMMAND [ARGUMENTS]\n\n"
        "Flash attention as an endpoint.\n\n"
        f"commands:\n{listed}\n\n"
        "options:\n  --help     this text; flashpoint COMMAND --help for a command's own\n  --version  the version"
    )
