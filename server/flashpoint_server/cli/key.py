"""`flashpoint key`: draw an API key, and add its entry to a key file; list the keys of a file; rotate or revoke one.

The key itself is not stored. It is shown once: on stdout with --file, so that `KEY=$(flashpoint key …)` has it, and on
stderr without it, because stdout then has the entry.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from flashpoint.commands.app import RIGHT, CommandError, examples
from flashpoint.commands.completion import values
from flashpoint.commands.running import console
from flashpoint.commands.terminal.tables import number
from flashpoint_contract.wording.hints import meant
from flashpoint_server.config import key_edits, key_file
from flashpoint_server.config.key_file import RIGHTS, check_name

EXAMPLES = """
  flashpoint key alice --file keys.toml
  flashpoint key bob --file keys.toml --rights attention+info --requests-per-second 50
  flashpoint key --list --file keys.toml
  flashpoint key alice --rotate --file keys.toml
  flashpoint key alice --retire --file keys.toml
  flashpoint key alice --revoke --file keys.toml
"""


def _limit(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="Limits of the key", show_default="none")


@examples(EXAMPLES)
def key(
    name: Annotated[
        str | None, typer.Argument(help="Name of the key in logs and metrics: letters, digits, - and _.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Add the entry to this key file. Without it: to stdout.")
    ] = None,
    list: Annotated[bool, typer.Option("--list", help="Show the keys of FILE with their rights and limits.")] = False,
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Draw a new key for NAME; the present one stays valid until --retire.")
    ] = False,
    retire: Annotated[bool, typer.Option("--retire", help="End the key that --rotate has replaced.")] = False,
    revoke: Annotated[bool, typer.Option("--revoke", help="Remove the key from FILE.")] = False,
    rights: Annotated[
        str,
        typer.Option(
            help=f"Permissions of the key: {', '.join(RIGHTS)}; join several with +.",
            autocompletion=values(lambda: RIGHTS, "+"),
        ),
    ] = "attention+info",
    requests_per_second: Annotated[float | None, _limit("Maximum calls of any kind a second.")] = None,
    bytes_per_second: Annotated[
        float | None, _limit("Maximum bytes of tensors a second, in and out; for JSON, bytes of text.")
    ] = None,
    flops_per_second: Annotated[
        float | None, _limit("Maximum floating-point operations a second, of attention, gradients and verifications.")
    ] = None,
    compute_seconds_per_second: Annotated[
        float | None, _limit("Maximum predicted compute seconds in a second, on one core or the GPU.")
    ] = None,
    concurrent: Annotated[
        int | None,
        _limit("Maximum compute requests at the same time, from their head to the last byte of their answer."),
    ] = None,
    cache_bytes: Annotated[
        int | None, _limit("Maximum bytes of KV caches and saved forwards in each engine; each fork counts in full.")
    ] = None,
    cache_count: Annotated[int | None, _limit("Maximum number of KV caches and saved forwards in each engine.")] = None,
) -> int:
    """Make an API key, and add its entry to a key file.

    The key is shown only once: on stdout with --file, else on stderr. The file is replaced at once, its comments stay,
    and a running server reads it again within two seconds.
    """
    flags = {"list": list, "rotate": rotate, "retire": retire, "revoke": revoke}
    asked_for = [f"--{flag}" for flag, given in flags.items() if given]
    if asked_for and file is None:
        raise CommandError(f"{asked_for[0]}: needs the key file", "name it with --file")
    if list:
        return _list(file, name, asked_for[1:])
    if len(asked_for) > 1:
        raise CommandError(f"{asked_for[1]}: is not taken with {asked_for[0]}")
    if name is None:
        raise CommandError("NAME: is missing", "flashpoint key --help shows examples")
    if revoke:
        _edited(key_edits.remove, file, name)
        print(f"{name} is removed from {file}", file=sys.stderr)
        return RIGHT
    if retire:
        _edited(key_edits.retire, file, name)
        print(f"the previous key of {name} is removed from {file}", file=sys.stderr)
        return RIGHT
    if rotate:
        drawn, digest = _drawn()
        _edited(key_edits.rotate, file, name, digest)
        return _show(f"the new key of {name}", drawn)
    chosen_rights = rights.split("+")
    if unknown := [right for right in chosen_rights if right not in RIGHTS]:
        near = meant(unknown[0], RIGHTS)
        hint = "put + between two: attention+info" if "," in rights else f"did you mean {near}?" if near else None
        raise CommandError(f"--rights: {unknown[0]!r} is not one of {', '.join(RIGHTS)}", hint)
    try:
        check_name(name)
    except ValueError as error:
        raise CommandError(f"NAME: {error}") from None
    given = {
        "requests_per_second": requests_per_second,
        "bytes_per_second": bytes_per_second,
        "flops_per_second": flops_per_second,
        "compute_seconds_per_second": compute_seconds_per_second,
        "concurrent": concurrent,
        "cache_bytes": cache_bytes,
        "cache_count": cache_count,
    }
    limits = {limit: value for limit, value in given.items() if value is not None}
    for limit, value in limits.items():
        if not 0 < value < float("inf"):
            raise CommandError(f"--{limit.replace('_', '-')}: must be above 0, not {value:g}")

    drawn, digest = _drawn()
    entry = {"sha256": digest, "rights": chosen_rights, **limits}
    text = "\n".join([f"[{name}]", *(f"{field} = {json.dumps(value)}" for field, value in entry.items()), ""])
    if file is not None:
        _edited(key_edits.add, file, name, text)
        return _show(f"the key of {name}", drawn)
    print(_joint(name) + text)
    print(f"the key of {name}, which is not stored: {drawn}", file=sys.stderr)
    return RIGHT


def _show(subject: str, drawn: str) -> int:
    """Print only the key to stdout, and before it a sentence to stderr, which a key in `$(…)` does not follow."""
    where = ":" if sys.stdout.isatty() else ", is on stdout"
    print(f"{subject}, which is not stored{where}", file=sys.stderr, flush=True)
    print(drawn)
    return RIGHT


def _drawn() -> tuple[str, str]:
    """Return a new key, and its SHA-256 in hexadecimal."""
    key = f"fp_{secrets.token_urlsafe(32)}"
    return key, hashlib.sha256(key.encode()).hexdigest()


def _edited(edit: Any, file: Path | None, *arguments: str) -> None:
    try:
        edit(file, *arguments)
    except ValueError as error:
        raise CommandError(f"--file: {error}") from None


def _list(file: Path | None, name: str | None, others: Sequence[str]) -> int:
    """Print the names, rights and limits of the keys in a file, without keys and hashes."""
    if name is not None or others:
        raise CommandError(f"--list: shows all keys, and is not taken with {others[0] if others else 'NAME'}")
    assert file is not None
    try:
        entries = key_file.read(file)
    except ValueError as error:
        raise CommandError(f"--file: {error}") from None
    show = console()
    for name, entry in entries.items():
        details = [f"{field} {number(value)}" for field, value in entry.limits.items()]
        details += ["its previous key is valid, too"] if entry.previous_sha256 else []
        rights = "+".join(right for right in RIGHTS if right in entry.rights)
        show.print(f"{name}  {rights}  {', '.join(details) or 'no limits'}", markup=False, soft_wrap=True)
    return RIGHT


def _joint(name: str) -> str:
    """Return the text to print before an entry: a newline if stdout is a file whose last line has none, else "".

    For example, stdout is a file in `flashpoint key alice >> keys.toml`. Raises CommandError if the file has a key of
    this name: a second table would make the whole file wrong.
    """
    try:
        if not stat.S_ISREG(os.fstat(1).st_mode) or sys.stdout.fileno() != 1:
            return ""
        text = Path("/proc/self/fd/1").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
    try:
        twice = name in key_file.parse(text, Path("the file"))
    except ValueError:
        twice = False  # the server will report the error in this file
    if twice:
        hint = f"draw a new key for it: flashpoint key {name} --rotate --file FILE; or use another name"
        raise CommandError(f"NAME: the file has a key {name} already", hint)
    return "" if not text or text.endswith("\n") else "\n"
