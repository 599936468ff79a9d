"""`flashpoint key NAME`: draws a key. Its entry for the file of keys goes to stdout, the key itself to stderr, once."""

from __future__ import annotations

import argparse
import hashlib
import json
import secrets
import sys
from collections.abc import Sequence

from flashpoint_server.config.key_file import RIGHTS, check_name

_RATES = ("requests_per_second", "bytes_per_second", "flops_per_second", "compute_seconds_per_second")
_WHOLE = ("concurrent", "cache_bytes")
_LIMITS = (*_RATES, *_WHOLE)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a new key and its entry; the exit code."""
    parser = argparse.ArgumentParser(
        prog="flashpoint key",
        description="Draw a key. Its entry goes to stdout, the key itself to stderr: it is shown this once.",
        epilog="example: flashpoint key alice --rights attention+info --requests-per-second 50 >> keys.toml",
    )
    parser.add_argument("name", help="what logs and metrics call it: letters, digits, - and _")
    parser.add_argument("--rights", default="attention+info", help=f"of {', '.join(RIGHTS)}, with + between them")
    for limit in _LIMITS:
        parser.add_argument(f"--{limit.replace('_', '-')}", type=int if limit in _WHOLE else float)
    asked = parser.parse_args(argv)
    rights = asked.rights.split("+")
    if unknown := [right for right in rights if right not in RIGHTS]:
        parser.error(f"--rights: {unknown[0]!r} is none of {', '.join(RIGHTS)}")
    try:
        check_name(asked.name)
    except ValueError as error:
        parser.error(f"name: {error}")
    limits = {limit: value for limit in _LIMITS if (value := getattr(asked, limit)) is not None}
    for limit, value in limits.items():
        if not 0 < value < float("inf"):
            parser.error(f"--{limit.replace('_', '-')}: must be above 0")

    key = f"fp_{secrets.token_urlsafe(32)}"
    digest = hashlib.sha256(key.encode()).hexdigest()
    entry = {"sha256": digest, "rights": rights, **limits}
    print(f"[{asked.name}]", *(f"{field} = {json.dumps(value)}" for field, value in entry.items()), "", sep="\n")
    print(f"the key of {asked.name}, which is kept nowhere: {key}", file=sys.stderr)
    return 0
