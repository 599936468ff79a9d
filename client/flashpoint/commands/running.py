"""Helper functions of several commands, for options, local or remote work, and output files."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from flashpoint import errors
from flashpoint.commands import completion
from flashpoint.commands.app import INTERRUPTED, TERMINATED, WRONG, CommandError
from flashpoint.commands.registry import missing
from flashpoint.commands.terminal import streams
from flashpoint_contract.schemas.benchmark import PlotTheme
from flashpoint_contract.schemas.verify import VerifyProgress
from flashpoint_contract.wording.hints import how_to_install

STAGES = {
    "backend": "the backend",
    "float64": "float64",
    "torch": "torch's own math",
    "rounding": "the effect of rounding",
    "causes": "known mistakes",
}
WIDTH = 140  # characters in a table's line if the output is not a terminal
NARROWEST, WIDEST = 40, 1000  # in a narrower terminal, lines break at its edge
HEIGHT = 25  # lines; no output depends on it

# The data types' names in torch, NumPy and other libraries.
_DTYPES_ELSEWHERE = {
    "half": "float16", "fp16": "float16", "f16": "float16", "bf16": "bfloat16", "float": "float32", "single": "float32",
    "fp32": "float32", "f32": "float32", "double": "float64", "fp64": "float64", "f64": "float64",
}  # fmt: skip

SERVER, OUTPUT, SHAPE, OPTIONS = "Server", "Output", "Problem", "Attention options"


def group(name: str) -> Callable[..., Any]:
    """Return a function that makes options in a group of the help: `of_shape("Number of sequences.")`."""

    def option(help: str, *flags: str, **more: Any) -> Any:
        return typer.Option(*flags, help=help, rich_help_panel=name, **more)

    return option


of_shape, of_server, of_output = group(SHAPE), group(SERVER), group(OUTPUT)

_URL = "A server, such as http://localhost:8000. Without it, or if it is empty, this machine."
_TIMEOUT = "Seconds that the server has for a call."
Url = Annotated[str | None, of_server(_URL, envvar="FLASHPOINT_URL")]
Key = Annotated[str | None, of_server("The server's API key.", envvar="FLASHPOINT_API_KEY")]
Timeout = Annotated[float, of_server(_TIMEOUT, min=0.001, metavar="SECONDS")]
Json = Annotated[Path | None, of_output("Write the result as JSON; - is stdout.", "--json", metavar="FILE")]
Plot = Annotated[Path | None, of_output("Draw it: FILE.svg or FILE.png. Needs matplotlib.", metavar="FILE")]
Theme = Annotated[PlotTheme, of_output("Draw it for a light or a dark page.")]


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(","))


def _ints(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, _words(text)))
    except ValueError:
        raise typer.BadParameter(f"must be integers, with a comma between two, not {text!r}") from None


INTS: Any = {"parser": _ints, "metavar": "INT,…"}  # keywords of an option that may be a list: 512,1024


def words(choices: Callable[[], Sequence[str]]) -> dict[str, Any]:
    """Return Typer's keywords for an option that may be a list of names. A shell completes the choices."""
    return {"parser": _words, "metavar": "NAME,…", "autocompletion": completion.values(choices)}


def dtype_of(kind: Any, *, several: bool = False) -> dict[str, Any]:
    """Return Typer's keywords for an option that is a data type of the Literal `kind`, or a list of them.

    Names of torch and NumPy are taken, too: half, torch.float16, double.
    """
    known = get_args(kind)

    def one(text: str) -> str:
        name = text.strip().lower().removeprefix("torch.").removeprefix("np.").removeprefix("numpy.")
        name = _DTYPES_ELSEWHERE.get(name, name)
        if name not in known:
            raise typer.BadParameter(f"{text!r} is not one of {', '.join(map(repr, known))}")
        return name

    complete = completion.values(lambda: known)
    if several:
        return {
            "parser": lambda text: tuple(map(one, _words(text))), "metavar": "NAME,…", "autocompletion": complete,
        }  # fmt: skip
    return {"parser": one, "metavar": "|".join(known), "autocompletion": complete}


def server_of(url: str | None, alone: Mapping[str, Any] = MappingProxyType({}), reason: str = "") -> str | None:
    """Return the server's URL, from --url or FLASHPOINT_URL; None if it is missing or empty: then use this machine.

    `alone` has the values of options that work only on this machine. If the user gives one, FLASHPOINT_URL is ignored,
    and --url raises BadParameter with the `reason`.
    """
    excluded = [flag for flag, value in alone.items() if value is not None]
    if not url or not excluded:
        return url or None
    if url == os.environ.get("FLASHPOINT_URL"):
        return None
    raise typer.BadParameter(f"is not taken with --url{reason}", param_hint=excluded[0])


def local(name: str, *, served: bool = True) -> Callable[..., Any]:
    """Return the function that does `name` on this machine. Raises CommandError if a package is missing.

    The returned function may raise ProblemError. `served`: the command can also use a server, and the hint says so.
    """
    try:
        (registered,) = entry_points(group="flashpoint.local", name=name)
        function: Callable[..., Any] = registered.load()
    except ModuleNotFoundError as error:
        message, hint = missing(error, "flashpoint_server")
        other = "; or ask a server with --url" if served else ""
        raise CommandError(f"{message} on this machine", hint + other) from error
    return function


def check_file(option: str, path: Path | None) -> None:
    """Raise InvalidInputError if a file cannot be written, before the work begins."""
    if path is None or str(path) == "-":
        return
    if os.path.isdir(path):
        raise errors.invalid(option, f"{path} is a folder")
    if not os.path.isdir(path.parent):
        raise errors.invalid(option, f"{path} cannot be written: there is no folder {path.parent}")
    if not os.access(path if os.path.exists(path) else path.parent, os.W_OK):
        raise errors.invalid(option, f"{path} cannot be written: no permission")


def make_folder(option: str, path: Path) -> None:
    """Make a folder for results, before the work begins. Raises InvalidInputError if nothing can be written there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise errors.invalid(option, f"{path} is no folder") from None
    except OSError as error:
        raise errors.invalid(option, f"the folder {path} cannot be made: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise errors.invalid(option, f"{path} cannot be written: no permission")


def picture_format(json_file: Path | None, plot: Path | None) -> Any:
    """Check that both files can be written, and matplotlib imported. Return the format of `plot`, svg or png."""
    check_file("--json", json_file)
    check_file("--plot", plot)
    if plot is None:
        return None
    format = plot.suffix.lower().removeprefix(".")
    if format not in ("svg", "png"):
        raise typer.BadParameter("the file must end with .svg or .png", param_hint="--plot")
    check_matplotlib("--plot")
    return format


def check_matplotlib(option: str) -> None:
    """Raise CommandError if matplotlib is not installed, before the work begins."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise CommandError(f"{option}: needs matplotlib, which is not installed", how_to_install("plot")) from None


class Bar:
    """A progress bar on stderr. A call of it updates the bar."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar, self._task = bar, task

    def __call__(self, **changes: Any) -> None:
        self._bar.update(self._task, **changes)

    def print_above(self, show: Console, *lines: Text) -> None:
        """Print lines to another console, without the bar between them."""
        self._bar.stop()
        for line in lines:
            show.print(line, soft_wrap=True)
        show.file.flush()
        if not self._bar.disable:
            self._bar.start()


@contextmanager
def progress_bar(text: str = "starting", *, counted: bool = True) -> Iterator[tuple[Bar, bool]]:
    """Yield a bar on stderr, and whether stderr is a terminal: otherwise there is no bar."""
    stderr = _console(to_stderr=True)
    columns = (BarColumn(), *([MofNCompleteColumn()] if counted else []), TimeElapsedColumn())
    disabled = not stderr.is_terminal
    with Progress(*columns, TextColumn("{task.description}"), console=stderr, transient=True, disable=disabled) as bar:
        yield Bar(bar, bar.add_task(text, total=None)), stderr.is_terminal


class Terminated(KeyboardInterrupt):
    """SIGTERM has come. A command that keeps what is done at Ctrl-C keeps it then, too."""


@contextmanager
def terminable() -> Iterator[None]:
    """Raise Terminated in this context when SIGTERM comes. Outside the main thread, signals are as before."""

    def end(*_: object) -> None:
        raise Terminated

    try:
        before = signal.signal(signal.SIGTERM, end)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def code_of(end: KeyboardInterrupt) -> int:
    """Return the exit code of a command that Ctrl-C or SIGTERM has ended, as shells have it."""
    return TERMINATED if isinstance(end, Terminated) else INTERRUPTED


@contextmanager
def working(what: str) -> Iterator[Callable[[VerifyProgress], None] | None]:
    """Yield a function that shows a verification's progress in a bar on stderr; None if stderr is no terminal.

    The bar shows the text `what` at first.
    """
    with progress_bar(what) as (update, is_terminal):

        def show(at: VerifyProgress) -> None:
            update(completed=at.done, total=at.total, description=f"{STAGES[at.stage]}, {at.direction}")

        yield show if is_terminal else None


def write_file(option: str, path: Path, data: bytes) -> None:
    """Write `data` to `path`, the value of `option`. Raises CommandError if this fails.

    Call it after the command has shown its result, so that a failure does not lose the result.
    """
    try:
        path.write_bytes(data)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise CommandError(f"{option}: {path} cannot be written: {reason}", code=WRONG) from error


def write_json(path: Path | None, document: Any) -> None:
    """Write the file of --json, or stdout if it is `-`. Raises CommandError."""
    if path is None:
        return
    to_stdout = str(path) == "-"
    text = json.dumps(document, indent=1, allow_nan=False, ensure_ascii=to_stdout and not streams.is_unicode()) + "\n"
    if to_stdout:
        sys.stdout.write(text)
    else:
        write_file("--json", path, text.encode())


def console(json_file: Path | None = None) -> Console:
    """Return the console for tables: stdout, or stderr if the JSON goes to stdout."""
    return _console(to_stderr=str(json_file) == "-")


def _console(*, to_stderr: bool) -> Console:
    """Return a console whose width is COLUMNS if that is a number above 0, else the terminal's, else WIDTH.

    Its sizes are given: rich would take any number of COLUMNS and LINES, such as 0, and fail for other digits.
    """
    stream = sys.stderr if to_stderr else sys.stdout
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() else 0
    with suppress(OSError, ValueError):  # not a terminal, or no file
        width = width or os.get_terminal_size(stream.fileno()).columns
    width = min(max(width or WIDTH, NARROWEST), WIDEST)
    return Console(stderr=to_stderr, width=width, height=HEIGHT, highlight=False, emoji=False)
