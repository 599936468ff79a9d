"""`flashpoint config`: print the settings that `flashpoint serve` would use with the same flags, and their sources."""

from __future__ import annotations

import json as json_module
from typing import Annotated

import typer

from flashpoint.commands.app import RIGHT, examples
from flashpoint.commands.running import Json, check_file, write_json
from flashpoint.commands.terminal import streams
from flashpoint_server.cli.flags import takes_settings
from flashpoint_server.config.settings import Settings
from flashpoint_server.config.sources import DEFAULT, Sourced, shown

EXAMPLES = """
  flashpoint config
  FLASHPOINT_PORT=9000 flashpoint config --changed
  flashpoint config --config flashpoint.toml --queue-limit 64
  flashpoint config --workers 4 > flashpoint.toml    # a file to start from
"""


@examples(EXAMPLES)
@takes_settings
def config(
    changed: Annotated[bool, typer.Option("--changed", help="Only settings that differ from the defaults.")] = False,
    json: Json = None,
    *,
    sourced: Sourced,
) -> int:
    """Print the settings in use, and the source of each: flag, variable, file or default.

    It takes the flags of `flashpoint serve`, and starts nothing. The output is a valid file for --config. It does not
    contain secrets.
    """
    check_file("--json", json)
    names = [name for name in Settings.model_fields if name in sourced.sources or not changed]
    values = {name: shown(getattr(sourced.settings, name)) for name in names}
    report = {n: {"value": values[n], "source": sourced.sources.get(n, DEFAULT)} for n in names}
    write_json(json, report)
    if json is not None:
        return RIGHT
    lines = {name: _line(name, value) for name, value in values.items()}
    column = max((len(line) for line in lines.values() if len(line) < 40), default=0) + 2
    for name, line in lines.items():
        print(_toml(f"{line.ljust(column)}  # {report[name]['source']}"))
    for variable, perhaps in sourced.misspelt:
        print(f"# {variable} is not a setting: did you mean {perhaps}?")
    return RIGHT


def _toml(line: str) -> str:
    """Return a line of TOML with escapes such as `\\U000000e9` for é, unless stdout is Unicode."""
    if streams.is_unicode():
        return line
    return "".join(each if each.isascii() else f"\\U{ord(each):08x}" for each in line)


def _line(name: str, value: object) -> str:
    """Return the line of TOML for a setting; a comment if the setting has no value or is secret."""
    if value is None:
        return f"# {name} is not set"
    text = json_module.dumps(value, ensure_ascii=False)  # JSON of these types is also valid TOML
    return f"# {name} = {text}" if "**********" in text else f"{name} = {text}"
