"""`flashpoint key NAME`: draw an API key. Its entry for the key file goes to stdout; the key goes once to stderr."""

from __future__ import annotations

import hashlib
import json
import secrets
import sys
from typing import Annotated, Any

import typer

from flashpoint.commands.app import RIGHT, CommandError, examples
from flashpoint_contract.hints import meant
from flashpoint_server.config.key_file import RIGHTS, check_name

EXAMPLES = """
  flashpoint key alice >> keys.toml
  flashpoint key alice --rights attention+info --requests-per-second 50 >> keys.toml
"""


def _limit(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="Limits of the key", show_default="none")


@examples(EXAMPLES)
def key(
    name: Annotated[str, typer.Argument(help="Name of the key in logs and metrics: letters, digits, - and _.")],
    rights: Annotated[str, typer.Option(help=f"Permissions of the key: {', '.join(RIGHTS)}; join several with +.")] = (
        "attention+info"
    ),
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
) -> int:
    """Make an API key. Its entry for the key file goes to stdout. The key goes to stderr; it is shown only once."""
    asked = rights.split("+")
    if unknown := [right for right in asked if right not in RIGHTS]:
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
    }
    limits = {limit: value for limit, value in given.items() if value is not None}
    for limit, value in limits.items():
        if not 0 < value < float("inf"):
            raise CommandError(f"--{limit.replace('_', '-')}: must be above 0, not {value:g}")

    drawn = f"fp_{secrets.token_urlsafe(32)}"
    digest = hashlib.sha256(drawn.encode()).hexdigest()
    entry = {"sha256": digest, "rights": asked, **limits}
    print(f"[{name}]", *(f"{field} = {json.dumps(value)}" for field, value in entry.items()), "", sep="\n")
    print(f"the key of {name}, which is not stored: {drawn}", file=sys.stderr)
    return RIGHT
