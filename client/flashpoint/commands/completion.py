"""Complete values of list options in a shell, and join words that bash splits at = and :."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence

VARIABLE = "_FLASHPOINT_COMPLETE"  # a shell sets this variable to ask for completions, and passes no argument
_BREAKS = ("=", ":")  # bash passes these as separate words (COMP_WORDBREAKS)


def values(choices: Callable[[], Sequence[str]], separator: str = ",") -> Callable[[str], list[str]]:
    """Return a completion for Typer: choices that start like the last item of a list and are not in it yet."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(separator)
        named = before.split(separator)
        return [f"{before}{comma}{each}" for each in choices() if each.startswith(last) and each not in named]

    return complete


def of_kernels(module: str, name: str) -> Callable[[], Sequence[str]]:
    """Return a function that gets names from `flashpoint_kernels`; no names if it is not installed."""

    def look_up() -> Sequence[str]:
        try:
            names: Sequence[str] = getattr(importlib.import_module(f"flashpoint_kernels.{module}"), name)
        except ImportError:
            return ()
        return names

    return look_up


def join_words() -> None:
    """Join the words in COMP_WORDS that bash has split: `--dtype`, `=` and `bf` are the word `--dtype=bf`."""
    if os.environ.get(VARIABLE) != "complete_bash" or "COMP_WORDS" not in os.environ:
        return
    words, at = os.environ["COMP_WORDS"].split("\n"), os.environ.get("COMP_CWORD", "")
    if len(words) == 1 or not at.isdecimal():
        return
    joined: list[str] = []
    place = int(at)
    for number, word in enumerate(words):
        if joined and (word in _BREAKS or words[number - 1] in _BREAKS):
            joined[-1] += word
            place -= number <= int(at)
        else:
            joined.append(word)
    os.environ |= {"COMP_WORDS": "\n".join(joined), "COMP_CWORD": str(place)}
