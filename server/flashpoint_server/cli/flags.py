"""Flags for the settings of the service, derived from `Settings`, and for the files of settings."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Container
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from flashpoint.commands.app import CommandError
from flashpoint.commands.completion import values
from flashpoint_server.config.settings import Settings
from flashpoint_server.config.sources import PREFIX, SettingError, load

# The first setting of each group. Every other setting belongs to the group of the setting before it.
GROUPS = {
    "host": "Network and processes",
    "api_keys": "Access: keys, TLS, browsers",
    "body_limit": "Limits of a request",
    "queue_limit": "Queue, batches and memory",
    "cache_bytes": "KV caches and saved forwards",
    "verify_flops": "Verifications and benchmarks",
    "default_timeout_ms": "Timeouts",
    "otlp_endpoint": "Traces and logs",
}
_OFFERED = {"device": ["auto", "cpu", "cuda", "all"]}  # shell completions for a setting that accepts any text
_FILE_HELP = {
    "config": "TOML file of settings, with lines like: port = 9000.",
    "env_file": "File of FLASHPOINT_* variables, one a line.",
}


def takes_settings(
    command: Callable[..., int], kind: type[Settings] = Settings, only: Container[str] = Settings.model_fields
) -> Callable[..., int]:
    """Add --config, --env-file and a flag for each setting in `only` to `command`.

    The command's argument `sourced` gets all settings, from every source.
    """
    hints = typing.get_type_hints(command, include_extras=True)
    of_command = [each for each in inspect.signature(command).parameters.values() if each.name != "sourced"]
    flags = {name: flag for name, flag in _flags().items() if name in _FILE_HELP or name in only}

    @functools.wraps(command)
    def done(config: Path | None = None, env_file: Path | None = None, **keywords: Any) -> int:
        given = {name: keywords.pop(name, None) for name in Settings.model_fields if name in flags}
        texts = {name: _text(value) for name, value in given.items() if value not in (None, [], ())}
        try:
            sourced = load(texts, config, env_file, kind=kind)
        except SettingError as error:
            text = "\n  ".join(f"{where}: {message}" for where, message, _ in error.problems)
            raise CommandError(text, error.problems[0][2] if len(error.problems) == 1 else None) from None
        return command(sourced=sourced, **keywords)

    named = inspect.Parameter.KEYWORD_ONLY
    parameters = [each.replace(kind=named, annotation=hints[each.name]) for each in of_command]
    parameters += [inspect.Parameter(name, named, default=None, annotation=flag) for name, flag in flags.items()]
    done.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
    done.__annotations__ = {name: hint for name, hint in hints.items() if name != "sourced"} | flags
    return done


def _flags() -> dict[str, Any]:
    """Return the annotation of each flag, by its name."""
    made: dict[str, Any] = {}
    for name, text in _FILE_HELP.items():
        variable = PREFIX + name.upper()
        option = typer.Option(help=text, metavar="FILE", envvar=variable, rich_help_panel="Files of settings")
        made[name] = Annotated[Path | None, option]
    group = ""
    for name, field in Settings.model_fields.items():
        group = GROUPS.get(name, group)
        default = field.default
        description = field.description or ""
        text = f"{description if description.startswith('auto,') else description[:1].upper() + description[1:]}."
        more: dict[str, Any] = {
            "help": text,
            "rich_help_panel": group,
            "show_default": False if default in (None, (), "", False) else str(default),
        }
        kind = field.annotation
        choices = list(get_args(kind)) if get_origin(kind) is Literal else []
        if kind is bool:
            annotation: Any = bool | None
        else:
            several = default == ()
            annotation = list[str] | None if several else str | None
            more["metavar"] = "|".join(choices) or _metavar(kind, several=several)
            if choices or name in _OFFERED:
                more["autocompletion"] = values(partial(list, choices or _OFFERED[name]))
        made[name] = Annotated[annotation, typer.Option(**more)]
    return made


def _metavar(kind: Any, *, several: bool) -> str:
    if several:
        return "NAME,…"
    words = {"int": "INT", "float": "NUMBER", "Path": "FILE"}
    return next((word for name, word in words.items() if name in str(kind)), "TEXT")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, list) else str(value)
