"""The command line `flashpoint`. `--version` needs no extra; everything else needs the extra `cli`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

from flashpoint.commands.registry import COMMANDS, complain, missing, misused
from flashpoint.commands.terminal import streams


def main(argv: Sequence[str] | None = None) -> int:
    """Run `flashpoint` with `argv` (default: the process's arguments). Return the exit code; 2 for wrong arguments."""
    streams.prepare()
    stdout = sys.stdout
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        stdout.flush()
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        # No message for a BrokenPipeError: the reader closed the pipe, as in `flashpoint --help | head -3`.
        if not isinstance(error, BrokenPipeError):
            complain("flashpoint", f"cannot read or write: {error}")
        with contextlib.suppress(OSError):  # Python flushes stdout again at exit; a closed one has no descriptor
            os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
        return 1
    return code


def _run(arguments: list[str]) -> int:
    if arguments and arguments[0] in ("-V", "--version"):  # printing the version needs no extra
        from flashpoint import __version__

        print(f"flashpoint {__version__}")
        return 0
    try:
        from flashpoint.commands.app import run
    except ModuleNotFoundError as error:
        name = arguments[0] if arguments and arguments[0] in COMMANDS else ""
        package = COMMANDS[name].target.partition(".")[0] if name else "flashpoint"
        return misused(f"flashpoint {name}".rstrip(), *missing(error, package))
    return run(arguments)
