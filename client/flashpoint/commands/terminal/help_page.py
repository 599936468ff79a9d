"""Format the help of a command as text with groups of options, never truncated in narrow terminals."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable
from typing import Any

import typer

_NAMES = 30  # maximum characters of an option and its type before the help text moves to the next line
_WIDEST, _NARROWEST = 120, 50
_BOLD, _PLAIN = "\033[1m", "\033[0m"


def of(app: typer.Typer) -> str:
    """Return the help of the whole application."""
    command = typer.main.get_command(app)
    return page(command, command.make_context("flashpoint", [], resilient_parsing=True))


def page(command: Any, ctx: Any) -> str:
    """Return the help of a command or a group of commands."""
    width = max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size((100, 24)).columns))
    pieces = "COMMAND [ARGUMENTS]" if hasattr(command, "commands") else _usage(command, ctx)
    usage = f"usage: {ctx.command_path} {pieces}"
    parts = [
        textwrap.fill(usage, width, subsequent_indent="    ", break_on_hyphens=False),
        _paragraphs(command.help or "", width),
    ]
    rows: dict[str, list[tuple[str, str]]] = {}
    for name, each in getattr(command, "commands", {}).items():
        rows.setdefault(each.rich_help_panel or "Commands", []).append((name, each.help or ""))
    for param in command.get_params(ctx):
        if not getattr(param, "hidden", False):
            group = getattr(param, "rich_help_panel", None) or ("Options" if _is_option(param) else "Arguments")
            rows.setdefault(group, []).append((_name(param, ctx), _text(param)))
    column = min(_NAMES, 4 + max((len(name) for group_rows in rows.values() for name, _ in group_rows), default=0))
    parts += [_section(title, group_rows, column, width) for title, group_rows in _in_order(rows)]
    for part in (command.epilog or "").strip("\n").split("\n\n"):
        parts.append(_examples(part, width) if "\n  " in part else _paragraphs(part, width))
    return "\n\n".join(part for part in parts if part)


def _in_order(rows: dict[str, list[tuple[str, str]]]) -> Iterable[tuple[str, list[tuple[str, str]]]]:
    """Sort the groups: arguments first, options without a group last."""
    return sorted(rows.items(), key=lambda row: (row[0] != "Arguments", row[0] == "Options"))


def _section(title: str, rows: list[tuple[str, str]], column: int, width: int) -> str:
    lines = [_bold(f"{title}:")]
    for name, text in rows:
        wrapped = textwrap.wrap(text, width - column, break_long_words=False, break_on_hyphens=False) or [""]
        if len(name) + 4 > column:
            lines.append(f"  {name}")
        else:
            lines.append(f"  {name}".ljust(column) + wrapped.pop(0))
        lines += [" " * column + line for line in wrapped]
    return "\n".join(line.rstrip() for line in lines)


def _examples(text: str, width: int) -> str:
    """Wrap each command below a title, with the backslashes that a shell needs to read it as one line."""
    title, *commands = text.splitlines()
    lines = [title]
    for command in commands:
        joined = re.sub(r"(--\S+) (?=[^-])", "\\1\N{NO-BREAK SPACE}", " ".join(command.split()))
        wrapped = textwrap.wrap(joined, width - 4, break_long_words=False, break_on_hyphens=False)
        lines.append("  " + " \\\n    ".join(wrapped).replace("\N{NO-BREAK SPACE}", " "))
    return "\n".join(lines)


def _paragraphs(text: str, width: int) -> str:
    wrapped = (textwrap.fill(" ".join(each.split()), width, break_on_hyphens=False) for each in text.split("\n\n"))
    return "\n\n".join(wrapped)


def _usage(command: Any, ctx: Any) -> str:
    params = [param for param in command.get_params(ctx) if not _is_option(param) or param.required]
    names = [_name(param, ctx) if _is_option(param) else _name(param, ctx).upper() for param in params]
    shown = [name if param.required else f"[{name}]" for name, param in zip(names, params, strict=True)]
    return " ".join([*shown, "[OPTIONS]"])


def _is_option(param: Any) -> bool:
    return bool(param.opts) and param.opts[0].startswith("-")


def _name(param: Any, ctx: Any) -> str:
    """Return a parameter as the user writes it: `--dtype float16|float32`, `--causal/--no-causal`, `FILE`."""
    if not _is_option(param):
        return str(param.metavar or param.name).upper()
    names = ", ".join(sorted(param.opts, key=len)) + "".join(f"/{name}" for name in param.secondary_opts)
    return names if param.is_flag else f"{names} {param.metavar or _type(param, ctx)}"


def _type(param: Any, ctx: Any) -> str:
    words = {"int": "INT", "float": "NUMBER", "str": "TEXT", "file": "FILE", "path": "FILE"}
    shown = str(param.display_type(ctx)).strip("<>").removesuffix(" range")
    return words.get(shown, shown)


def _text(param: Any) -> str:
    """Return the help of a parameter, with its default and its environment variable."""
    notes = []
    default = param.show_default if isinstance(param.show_default, str) else param.default
    if getattr(param, "required", False):
        notes.append("required")
    elif param.show_default and default not in (None, False, "") and not callable(default):
        notes.append(f"default: {default}")
    if envvar := getattr(param, "envvar", None):
        notes.append(f"variable: {envvar}")
    return " ".join([param.help or "", *([f"[{'; '.join(notes)}]"] if notes else [])]).strip()


def _bold(text: str) -> str:
    colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"{_BOLD}{text}{_PLAIN}" if colours else text
