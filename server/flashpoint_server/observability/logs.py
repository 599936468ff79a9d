"""Structured logs on stderr: our lines and those of the libraries, in one format, through the queue of lines.py.

Our lines do not use `logging`: its records cost three times as much, and a request's line is made while its caller
waits for the processor core.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from flashpoint_server.observability.lines import LINES, STDERR, take_stderr


class _Queued:
    """structlog's logger, which puts lines into the queue."""

    def __init__(self, name: str) -> None:
        self.name = name

    def write(self, line: bytes) -> None:
        LINES.put(line)

    debug = info = warning = error = critical = exception = write


class _Handler(logging.Handler):
    """The handler of `logging`, which puts lines into the queue."""

    def emit(self, record: logging.LogRecord) -> None:
        LINES.put(self.format(record).encode("utf-8", "backslashreplace"))


def _json(_: WrappedLogger, __: str, event: EventDict) -> bytes:
    return msgspec.json.encode(event, enc_hook=repr)


def _json_line(logger: _Queued, method: str, event: EventDict) -> bytes:
    """Return our line as `shared` and `_json` make it. One function takes half the time of a chain."""
    event["level"] = method
    event["logger"] = logger.name
    event["timestamp"] = datetime.now(UTC).isoformat()[:-6] + "Z"
    if "exc_info" in event:
        event = structlog.processors.format_exc_info(logger, method, event)
    return msgspec.json.encode(event, enc_hook=repr)


def _encoded(_: WrappedLogger, __: str, line: Any) -> bytes:
    return str(line).encode("utf-8", "backslashreplace")


def _decoded(_: WrappedLogger, __: str, line: Any) -> str:
    return bytes(line).decode()


def _notice(processors: Sequence[Processor], dropped: int) -> bytes:
    """Return the line that says how many lines were dropped before it."""
    event: Any = {
        "event": "log lines dropped",
        "lines": dropped,
        "advice": "the reader of stderr is too slow or has stopped",
    }
    for processor in processors:
        event = processor(_Queued("flashpoint.logs"), "warning", event)
    return bytes(event)


def for_people(style: Literal["auto", "json", "console"]) -> bool:
    """Return whether lines are columns for a person."""
    return style == "console" or (style == "auto" and os.isatty(STDERR))


def configure(style: Literal["auto", "json", "console"], level: str) -> None:
    """Send every log line of the process to stderr, as one JSON object a line or as columns for a person.

    `auto` means columns if stderr is a terminal. NO_COLOR turns off their colours.
    """
    terminal, as_json = os.isatty(STDERR), not for_people(style)
    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: list[Processor] = (
        [structlog.processors.format_exc_info, _json]
        if as_json
        else [
            structlog.dev.ConsoleRenderer(
                colors=terminal and "NO_COLOR" not in os.environ,
                exception_formatter=structlog.dev.plain_traceback,  # rich's has the values of all local variables
            ),
            _encoded,
        ]
    )
    ours: list[Processor] = [_json_line] if as_json else [*shared, *renderer]
    structlog.configure(
        processors=ours,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=_Queued,
        cache_logger_on_first_use=True,
    )
    take_stderr(partial(_notice, ours))
    handler = _Handler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer, _decoded],
        )
    )
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.captureWarnings(True)
    # uvicorn's lines about starting and stopping repeat ours.
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
