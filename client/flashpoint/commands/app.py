"""The Typer application: all commands, their help, and the common form of their errors.

A command is a function with annotations for Typer, which returns an exit code, or None for 0.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from flashpoint import errors
from flashpoint.commands import completion
from flashpoint.commands.registry import COMMANDS, complain, missing
from flashpoint.commands.terminal import help_page, streams
from flashpoint_contract.options import ProblemError
from flashpoint_contract.wording.hints import meant

RIGHT, WRONG, MISUSED, UNREACHABLE = range(4)
INTERRUPTED, TERMINATED = 130, 143  # shells use these exit codes for programs that SIGINT and SIGTERM have ended
CODES = (
    "0 right, 1 wrong or failed, 2 called wrongly or refused, 3 no server, or none that has time, 130 Ctrl-C, 143 TERM"
)

_ASK = "flashpoint info --url URL asks a server at another address"

# Patterns that find the values in the messages of Typer and pydantic.
_QUOTED = re.compile(r"'([^']*)'")
_EXTRA = re.compile(r"Got unexpected extra argument.*\((.*)\)")
_NOT_VALID = re.compile(r"Input should be (a valid \w+)")


class CommandError(Exception):
    """A command cannot continue: what is wrong, what to do, and the exit code."""

    def __init__(self, message: str, hint: str | None = None, code: int = MISUSED) -> None:
        super().__init__(message)
        self.message, self.hint, self.code = message, hint, code


class _Page:
    """A mixin that writes the help with flashpoint.commands.terminal.help_page, which does not truncate."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        text = help_page.page(cast(Any, self), ctx)
        formatter.write(streams.writable(text))  # Typer writes UTF-8 where stdout is ASCII


class _Command(_Page, TyperCommand):
    pass


class _Commands(_Page, TyperGroup):
    """All commands. Resolving a command imports it; listing the commands imports none."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and load(str(name)), rest


def load(name: str) -> Any:
    """Import the command of this name, and return it. Raises CommandError if a package is missing."""
    module, _, function = COMMANDS[name].target.partition(":")
    try:
        command = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        raise CommandError(*missing(error, module.partition(".")[0])) from error
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    epilog = f"{getattr(command, 'examples', '')}\nExit codes: {CODES}."
    alone.command(name, cls=_Command, epilog=epilog)(_flushed(command))
    return typer.main.get_command(alone)


def _flushed(command: Callable[..., int | None]) -> Callable[..., int]:
    """Flush stdout at the end of a command, so that a closed pipe raises its error inside `main`."""

    @functools.wraps(command)
    def run(**keywords: Any) -> int:
        code = command(**keywords)
        sys.stdout.flush()
        return code or RIGHT

    return run


def examples(text: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Return a decorator that adds examples to the end of a command's help."""

    def give(command: Callable[..., int]) -> Callable[..., int]:
        command.examples = f"Examples:\n{text.strip(chr(10))}\n"  # type: ignore[attr-defined]
        return command

    return give


def application() -> typer.Typer:
    """Return the application. It imports no command."""
    app = typer.Typer(
        cls=_Commands,
        pretty_exceptions_enable=False,
        help="Flash attention as an endpoint.",
        epilog=f"flashpoint COMMAND --help shows a command's own options.\n\nExit codes: {CODES}.",
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def options(
        version: bool = typer.Option(False, "-V", "--version", help="Print the version."),
    ) -> None: ...

    for name, command in COMMANDS.items():
        app.command(name, help=command.about, rich_help_panel=command.group)(lambda: None)
    return app


def run(arguments: Sequence[str]) -> int:
    """Run the command that the arguments name, and return its exit code."""
    arguments = ["--help"] if list(arguments) == ["help"] else arguments
    first = next((each for each in arguments if not each.startswith("-")), "")
    name = f"flashpoint {first}" if first in COMMANDS else "flashpoint"
    if completion.VARIABLE in os.environ:
        completion.join_words()
    elif not arguments:
        print(help_page.of(application()), file=sys.stderr)
        return MISUSED
    try:
        return int(application()(list(arguments), prog_name="flashpoint", standalone_mode=False) or RIGHT)
    except SystemExit as end:  # shell completion, or a closed pipe, raises it
        return end.code if isinstance(end.code, int) else RIGHT
    except errors.FlashpointError as error:
        complain(name, _error_text(error, first), hint(error))
        return exit_code(error)
    except ProblemError as error:  # a command that computes on this machine raises it
        complain(name, _error_text(errors.all_invalid(error.errors), first))
        return MISUSED
    except CommandError as error:
        complain(name, error.message, error.hint)
        return error.code
    except typer.TyperException as error:
        complain(name, *_usage(error, name))
        return MISUSED
    except typer.Abort:  # Ctrl-C raises it
        return INTERRUPTED


def _error_text(error: errors.FlashpointError, command: str) -> str:
    """Return the text of an error. If the client refused a field, the text names its command-line option."""
    if not error.errors or error.status is not None:
        return str(error)
    known = {each for param in load(command).params for each in param.opts}

    def option(field: str) -> str:
        last = field.rpartition(".")[2]
        flags = (f"--{name.replace('_', '-')}" for name in (last, last.removesuffix("s")))
        return next((flag for flag in flags if flag in known), field)

    return "; ".join(f"{option(field)}: {message}" if field else message for field, message in error.errors)


def exit_code(error: errors.FlashpointError) -> int:
    match error:
        case errors.ConnectionFailedError() | errors.OverloadedError() | errors.DeadlineExceededError():
            return UNREACHABLE
        case errors.ServerError() | errors.ProtocolError():
            return WRONG
    return MISUSED


def hint(error: errors.FlashpointError) -> str | None:
    """Return what the user can do about an error of a call; None if the command line has no remedy."""
    match error:
        case errors.ConnectionFailedError() if " certificate" not in str(error):
            return "is the server running? `flashpoint serve` starts one here; --url names another"
        case errors.AuthenticationError(status=401):
            return "give the server's key: FLASHPOINT_API_KEY, or --api-key"
        case errors.DeadlineExceededError():
            return "give it more seconds: --timeout"
        case errors.OverloadedError(code="not_ready"):
            return "the server is starting: try again in some seconds"
    return None


def _usage(error: Any, name: str) -> tuple[str, str | None]:
    """Return the message and the hint for wrong arguments. The message names the option and says what is wrong."""
    message = error.message
    option = getattr(error, "option_name", None) or _blamed(error)
    if hasattr(error, "possibilities"):  # the error is about an unknown option
        if error.option_name == "--url":
            return "--url: is no option of this command, which works on this machine alone", _ASK
        parser = error.ctx.command.get_params(error.ctx)
        near = meant_option(error.option_name, [each for one in parser for each in (*one.opts, *one.secondary_opts)])
        return f"{option}: unknown option", f"did you mean {near}?" if near else f"{name} --help lists the options"
    if hasattr(error, "param_type"):
        return f"{option}: is missing", f"{name} --help shows examples"
    if message.endswith("requires an argument."):
        return f"{option}: needs a value", f"{name} --help says which"
    if message.startswith("No such command"):
        message, _, near = message.partition(" Did you mean ")
        typed = (_QUOTED.findall(message) or [""])[0]
        names = ", ".join(_QUOTED.findall(near))
        return (
            f"no command {typed!r}",
            f"did you mean {names}?" if names else "flashpoint --help lists the commands",
        )
    if " is not one of " in message:
        given, *allowed = _QUOTED.findall(message)
        near = meant(given, allowed)
        text = f"{given!r} is not one of {', '.join(allowed)}"
        return f"{option}: {text}" if option else text, f"did you mean {near}?" if near else None
    if (extra := _EXTRA.fullmatch(message)) is not None:
        return f"unexpected argument: {extra[1]}", f"{name} --help shows examples"
    if (needed := _NOT_VALID.match(message)) is not None:
        return f"{option}: must be {'an integer' if needed[1].endswith('integer') else needed[1]}", None
    message = message.replace("Input should be greater than or equal to", "must be at least")
    message = message[:1].lower() + message[1:].rstrip(".")
    return (f"{option}: {message}" if option else message), None if option else f"{name} --help shows examples"


def meant_option(option: str, known: Sequence[str]) -> str | None:
    """Return the option that the user probably meant. Names from torch and flash-attn are also recognised."""
    names = {each.removeprefix("--"): each for each in known if each.startswith("--")}
    plain = {name.replace("-", "_"): each for name, each in names.items()}
    near = meant(option.lstrip("-"), plain)
    return plain[near] if near else None


def _blamed(error: Any) -> str | None:
    """Return the option or argument with the wrong value, in the form that the user types."""
    if (given := getattr(error, "param_hint", None)) is not None:
        return given if isinstance(given, str) else ", ".join(given)
    param = getattr(error, "param", None)
    if param is None:
        return None
    return param.opts[0] if param.opts and param.opts[0].startswith("-") else str(param.metavar or param.name).upper()
