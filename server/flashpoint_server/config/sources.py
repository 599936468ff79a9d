"""Read the settings from flags, environment variables, a file of variables, a TOML file and the defaults.

The first source in this order that has a setting wins. Values of all sources are text and are parsed in the same way. A
file is read only if it is named; a `.env` file in the current folder has no effect.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from dotenv import dotenv_values
from pydantic import SecretStr, ValidationError

from flashpoint_contract.schemas.validation import field_problems
from flashpoint_contract.wording.hints import did_you_mean
from flashpoint_server.config.settings import Settings

PREFIX = "FLASHPOINT_"
DEFAULT = "default"
FILES = ("CONFIG", "ENV_FILE")  # names of the variables that contain paths of setting files
# Minimum similarity (0 to 1) between an unknown variable and a setting's variable to report it as misspelt. Two swapped
# letters in the shortest name, FLASHPOINT_HOST, leave 0.933; FLASHPOINT_PORT_8000_TCP, which Kubernetes sets, has 0.77.
_ALIKE = 0.93
_OF_CLIENTS = ("API_KEY", "URL")
_SECRET = ("api_keys", "cache_secret")


class SettingError(Exception):
    """Raised for invalid settings. `problems` has a tuple for each: its source, the problem, and a hint or None."""

    def __init__(self, problems: Iterable[tuple[str, str, str | None]]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(f"{where}: {message}" for where, message, _ in self.problems))


class Sourced(NamedTuple):
    """Settings, and the source of each as text, which errors and `flashpoint config` show."""

    settings: Settings
    sources: Mapping[str, str]
    misspelt: tuple[tuple[str, str], ...]  # (unknown variable, the similar variable of a setting)


def flag(name: str) -> str:
    """Return the command-line flag of a setting, such as `--queue-limit` for `queue_limit`."""
    return f"--{name.replace('_', '-')}"


def load(
    flags: Mapping[str, str],
    config: Path | None = None,
    env_file: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    kind: type[Settings] = Settings,
) -> Sourced:
    """Return the settings from all sources. Raises SettingError, which names the source of each wrong value."""
    values: dict[str, str] = {}
    sources: dict[str, str] = {}
    looked_at = list(environment)
    for name, (value, source) in _config(config, _file_source("config", config, environment)).items():
        values[name], sources[name] = value, source
    if env_file is not None:
        of_file = _env_file(env_file, _file_source("env_file", env_file, environment))
        looked_at += of_file
        _take(of_file, f"{{}} in {env_file}", values, sources)
    _take(environment, "{}", values, sources)
    values |= flags
    sources |= {name: flag(name) for name in flags}
    try:
        settings = kind(**values)  # type: ignore[arg-type]  # all values are text, like variables
    except ValidationError as error:
        raise SettingError(_problems(error, values, sources)) from None
    return Sourced(settings, sources, tuple(misspelt(looked_at)))


def _take(variables: Mapping[str, str], source: str, values: dict[str, str], sources: dict[str, str]) -> None:
    names = {PREFIX + name.upper(): name for name in Settings.model_fields}
    for variable, value in variables.items():
        if (name := names.get(variable.upper())) is not None:  # variable names are not case-sensitive
            values[name], sources[name] = value, source.format(variable)


def _file_source(name: str, path: Path | None, environment: Mapping[str, str]) -> str:
    """Return the variable (such as FLASHPOINT_CONFIG) or the flag (`--config`) that set `path`, for error messages."""
    variable = PREFIX + name.upper()
    return variable if path is not None and environment.get(variable) == str(path) else flag(name)


def _config(path: Path | None, source: str) -> dict[str, tuple[str, str]]:
    if path is None:
        return {}
    try:
        document = tomllib.loads(path.read_text("utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError([(source, f"{path} cannot be read: {_reason(error)}", None)]) from None
    except tomllib.TOMLDecodeError as error:
        raise SettingError([(source, f"{path} is not TOML: {error}", "write a setting as: port = 8000")]) from None
    settings: dict[str, tuple[str, str]] = {}
    wrong: list[tuple[str, str, str | None]] = []
    for name, value in document.items():
        if name not in Settings.model_fields:
            hint = did_you_mean(name, Settings.model_fields)
            wrong.append((f"{name} in {path}", f"unknown setting{hint}", "flashpoint config lists the settings"))
        elif isinstance(value, dict):
            wrong.append((f"{name} in {path}", "must be a value, not a table", None))
        else:
            settings[name] = _text(value), f"{name} in {path}"
    if wrong:
        raise SettingError(wrong)
    return settings


def _text(value: Any) -> str:
    """Return a TOML value as text, in the form that an environment variable would have."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(_text, value)) if isinstance(value, list) else str(value)


def _env_file(path: Path, source: str) -> dict[str, str]:
    try:
        with path.open(encoding="utf-8-sig") as stream:
            variables = dotenv_values(stream=stream, interpolate=False)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError([(source, f"{path} cannot be read: {_reason(error)}", None)]) from None
    return {name: value or "" for name, value in variables.items()}


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or "it is not UTF-8 text").lower()


def _problems(
    error: ValidationError, values: Mapping[str, str], sources: Mapping[str, str]
) -> Iterator[tuple[str, str, str | None]]:
    for name, message in field_problems(error):
        field = name.partition(".")[0]
        if field in values and field not in _SECRET:
            value = repr(values[field])
            if "match pattern" in message:
                message = f"{value} is not valid"
            elif message.startswith("must"):
                message += f", not {value}"
        yield sources.get(field, flag(field)), message, _about(field)


def _about(name: str) -> str | None:
    return Settings.model_fields[name].description if name in Settings.model_fields else None


def misspelt(variables: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (unknown variable, setting's variable) for each unknown variable that resembles the one of a setting."""
    known = {PREFIX + name.upper() for name in Settings.model_fields} | {PREFIX + name for name in FILES}
    for name in variables:
        upper = name.upper()  # names of settings are not case-sensitive
        others = {PREFIX + other for other in _OF_CLIENTS}
        if upper not in known | others and (near := get_close_matches(upper, known, 1, _ALIKE)):
            yield name, near[0]


def as_environment(settings: Settings, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return an environment for a child process, where `Settings()` equals `settings`. It contains the secrets."""
    ours = {PREFIX + name.upper() for name in Settings.model_fields}
    others = {name: value for name, value in environment.items() if name.upper() not in ours}
    given = {PREFIX + name.upper(): _plain(value) for name, value in settings if value is not None}
    return others | given


def _plain(value: Any) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(_plain, value)) if isinstance(value, tuple) else str(value)


def shown(value: Any) -> Any:
    """Return a setting's value in the types of JSON. Secrets are masked."""
    if isinstance(value, tuple):
        return [shown(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)
