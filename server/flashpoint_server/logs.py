"""Structured logs on stderr: ours and those of the libraries, in one format.

Ours go past `logging`, whose records cost three times as much: a request's line is written while its caller waits for
the core.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import Any, Literal

import msgspec
import structlog
from structlog.typing import Processor


class _Stderr:
    """Where structlog's lines go; one that cannot be written is lost, and its request is not."""

    def __init__(self, name: str) -> None:
        self.name = name

    def write(self, line: str) -> None:
        with suppress(OSError):
            sys.stderr.write(line + "\n")

    debug = info = warning = error = critical = exception = write


def _json(event: Any, **_: Any) -> str:
    return msgspec.json.encode(event, enc_hook=repr).decode()


def configure(style: Literal["json", "console"], level: str) -> None:
    """Send every log line of the process to stderr: a JSON object a line, or columns for a person."""
    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: list[Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(_json)]
        if style == "json"
        else [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    )
    structlog.configure(
        processors=[*shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=_Stderr,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.captureWarnings(True)
    # Its lines about starting and stopping say again what ours say.
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
