"""How every command runs: its exit codes, where it does its work, and the files it leaves."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from flashpoint import errors
from flashpoint._client import Client
from flashpoint.benchmark_schema import PlotTheme

RIGHT, WRONG, MISUSED, UNREACHABLE = range(4)
CODES = "Exit codes: 0 right, 1 wrong or failed, 2 called wrongly or refused, 3 no server, or none that has time."
LOCAL = "flashpoint.local"  # the entry points of what runs without a server
WIDTH = 140  # of a table where there is no terminal that has one

Url = Annotated[str | None, typer.Option(help="A server, such as http://localhost:8000. Without it, this machine.")]
Key = Annotated[str | None, typer.Option(envvar="FLASHPOINT_API_KEY", help="The server's bearer key.")]
Timeout = Annotated[float, typer.Option(min=0.001, help="Seconds that the server has for a call.")]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all of it as JSON; - is stdout.")]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it: FILE.svg or FILE.png. Needs matplotlib.")]
Theme = Annotated[PlotTheme, typer.Option(help="Draw it for a light or a dark page.")]


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(","))


def _ints(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, _words(text)))
    except ValueError:
        raise typer.BadParameter("must be integers: 512,1024") from None


# Options that may be lists: 512,1024.
INTS: Any = {"parser": _ints, "metavar": "INT,…"}
WORDS: Any = {"parser": _words, "metavar": "NAME,…"}


def run(command: Callable[..., int], argv: Sequence[str], examples: str) -> int:
    """Run `command` with `argv`; its exit code. `examples` end its help."""
    name = f"flashpoint {command.__name__}"
    # A line that starts with \b keeps its breaks.
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")

    @app.command(epilog=f"\b\nExamples:\n{examples.strip(chr(10))}\n\n{CODES}")
    @functools.wraps(command)
    def done(**keywords: Any) -> None:
        try:
            for option in ("json", "plot"):
                _check_file(f"--{option}", keywords.get(option))
            code = command(**keywords)
            sys.stdout.flush()  # here, where typer ends in silence if nobody reads it any more
            raise typer.Exit(code)
        except errors.FlashpointError as error:
            print(f"{name}: {error}", file=sys.stderr)
            raise typer.Exit(exit_code(error)) from None

    try:
        app(list(argv), prog_name=name)
    except SystemExit as end:  # typer's way to end
        return end.code if isinstance(end.code, int) else RIGHT
    return RIGHT


def exit_code(error: errors.FlashpointError) -> int:
    match error:
        case errors.ConnectionFailedError() | errors.OverloadedError() | errors.DeadlineExceededError():
            return UNREACHABLE
        case errors.ServerError() | errors.ProtocolError():
            return WRONG
    return MISUSED


def client(url: str, api_key: str | None, timeout: float) -> Client:
    return Client(url, api_key=api_key, timeout=timeout)


def local(name: str) -> Callable[..., Any]:
    """What does `name` on this machine. Raises InvalidInputError saying what to install."""
    for point in entry_points(group=LOCAL, name=name):
        try:
            found: Callable[..., Any] = point.load()
        except ModuleNotFoundError as error:
            what = f"needs {error.name} on this machine: pip install 'flashpoint[server]', or ask a server with --url"
            raise errors.InvalidInputError(what) from error
        return found
    raise errors.InvalidInputError("nothing here does it: pip install 'flashpoint[server]', or ask a server with --url")


def _check_file(option: str, path: Path | None) -> None:
    """Raise InvalidInputError for a file that cannot be written, before there is something to write."""
    if path is None or str(path) == "-":
        return
    if os.path.isdir(path):
        raise errors.invalid(option, f"{path} is a folder")
    if not os.path.isdir(path.parent):
        raise errors.invalid(option, f"{path} cannot be written: there is no folder {path.parent}")
    if not os.access(path if os.path.exists(path) else path.parent, os.W_OK):
        raise errors.invalid(option, f"{path} cannot be written: no permission")


def picture_format(plot: Path | None) -> Any:
    """svg or png, by the file's name. Raises BadParameter for another, and where matplotlib is not installed."""
    if plot is None:
        return None
    format = plot.suffix.lower().removeprefix(".")
    if format not in ("svg", "png"):
        raise typer.BadParameter("the file must end with .svg or .png", param_hint="--plot")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise typer.BadParameter("needs matplotlib: pip install 'flashpoint[plot]'", param_hint="--plot") from None
    return format


def write_json(path: Path | None, document: Any) -> None:
    if path is None:
        return
    text = json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
    else:
        path.write_text(text, encoding="utf-8")


def console(json_file: Path | None = None) -> Console:
    """Where tables go: stdout, or stderr where stdout has the JSON."""
    to_stderr = str(json_file) == "-"
    found = Console(stderr=to_stderr, highlight=False, soft_wrap=False)
    return found if found.is_terminal else Console(stderr=to_stderr, highlight=False, width=WIDTH)
