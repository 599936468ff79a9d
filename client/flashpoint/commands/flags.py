"""Make command-line flags for the options of an attention call, from the contract's table."""

from __future__ import annotations

import functools
import inspect
import json
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal

import typer

from flashpoint.commands.running import INTS, words
from flashpoint.commands.running import OPTIONS as OPTIONS_PANEL
from flashpoint_contract.options import LAYOUTS, OPTIONS, Flag, Integer, Kind, Names, Number, OneOf, Option, Pair


def takes_options(command: Callable[..., int], **others: Any) -> Callable[..., int]:
    """Add a flag to `command` for each option of the contract. A flag in `others` replaces the usual one of its name.

    `command` receives the options that the user gives as its keyword argument `options`.
    """
    hints = typing.get_type_hints(command, include_extras=True)
    parameters = [
        each.replace(annotation=hints[each.name])
        for each in inspect.signature(command).parameters.values()
        if each.name != "options"
    ]
    flags = {name: _flag(option) for name, option in OPTIONS.items() if "cli" not in option.refused} | others
    first = next(i for i, each in enumerate(parameters) if each.name == "url")
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=flag)
        for name, flag in flags.items()
    ]
    by_keyword = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]

    @functools.wraps(command)
    def done(**keywords: Any) -> int:
        given = {name: keywords.pop(name, None) for name in flags}
        return command(**keywords, options={name: value for name, value in given.items() if value is not None})

    signature = inspect.Signature([*by_keyword[:first], *added, *by_keyword[first:]], return_annotation=int)
    done.__signature__ = signature  # type: ignore[attr-defined]
    done.__annotations__ = {**hints, **flags}
    return done


def _flag(option: Option) -> Any:
    kind, default = _type(option.kind)
    shown: str | bool = False
    if option.default is not None and not isinstance(option.kind, Flag):
        shown = option.default if isinstance(option.default, str) else json.dumps(option.default).strip("[]")
        shown = shown.replace('"', "")
    more = {"rich_help_panel": OPTIONS_PANEL, "show_default": shown, **default}
    return Annotated[kind, typer.Option(help=f"{_sentence(option.text)}.", **more)]


def _sentence(text: str) -> str:
    """Return a text with an upper-case first letter, unless the first word is a name such as bhsd, s or float32."""
    word = text.split()[0]
    return text[:1].upper() + text[1:] if word.isalpha() and len(word) > 1 and word not in LAYOUTS else text


def _type(kind: Kind) -> tuple[Any, dict[str, Any]]:
    """Return the type of an option for Typer, and other keyword arguments for Typer."""
    match kind:
        case Flag():
            return bool | None, {}
        case OneOf(values):
            return Literal[values] | None, {}
        case Number():
            return float | None, {}
        case Integer():
            return int | None, {}
        case Pair():
            return Any, INTS
        case Names(values):
            return Any, words(lambda: values)
