"""`flashpoint COMMAND`: runs the commands that the installed packages bring, and knows of ours what help says of them.

A command is an entry point of the group `flashpoint.commands`: a callable that takes the arguments behind its name and
returns an exit code or None.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points

from flashpoint import __version__

GROUP = "flashpoint.commands"
_ABOUT = {
    "benchmark": "times attention, on every backend or those named",
    "capacity": "how long a request takes, and what a load needs",
    "health": "asks the server on this host whether it lives",
    "info": "device, versions, backends, and the options of each",
    "key": "draws a key for a server's file of keys",
    "reproduce": "measures what papers and projects claim",
    "serve": "starts a server",
    "verify": "judges attention against float64: a backend's, or your own from a file",
}
_EXTRAS = {"flashpoint": "cli", "flashpoint_server": "server"}  # which extra brings what a package needs


def main(argv: Sequence[str] | None = None) -> int:
    """Run `flashpoint` with `argv` (the process's by default); the exit code, 2 when it was called wrongly."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = {point.name: point for point in entry_points(group=GROUP)}
    usage = _usage(sorted(commands))
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        return _print(usage) if arguments else _misused(usage)
    if arguments[0] in ("-V", "--version"):
        return _print(f"flashpoint {__version__}")
    name, *rest = arguments
    if name not in commands:
        return _misused(f"flashpoint: no command {name!r}\n\n{usage}")
    return _run(commands[name], rest)


def _run(point: EntryPoint, arguments: list[str]) -> int:
    package = point.module.partition(".")[0]
    try:
        command = point.load()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == package:
            raise  # not something to install: the package itself is broken
        extra = _EXTRAS.get(package, package)
        return _misused(
            f"flashpoint {point.name} needs {error.name}, which is not installed: pip install 'flashpoint[{extra}]'"
        )
    return int(command(arguments) or 0)


def _print(text: str) -> int:
    """Print to stdout, where whoever reads it may stop early: `flashpoint --help | head -3`."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end
        return 1
    return 0


def _misused(text: str) -> int:
    print(text, file=sys.stderr)
    return 2


def _usage(commands: Sequence[str]) -> str:
    listed = "\n".join(f"  {name:<9}  {_ABOUT.get(name, '')}".rstrip() for name in commands)
    return (
        "usage: flashpoint COMMAND [ARGUMENTS]\n\n"
        "Flash attention as an endpoint.\n\n"
        f"commands:\n{listed}\n\n"
        "options:\n  --help     this text; flashpoint COMMAND --help for a command's own\n  --version  the version"
    )
