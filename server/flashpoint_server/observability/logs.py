"""Structured logs on stderr: our lines and those of libraries, in one format, through the queue of lines.py.

Our lines do not use `logging`, which takes three times as long for a line: making the line of a request delays the next
request on this core.
"""

from __future__ import annotations

import json
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
    """A logger for structlog that puts lines into the queue."""

    def __init__(self, name: str) -> None:
        self.name = name

    def write(self, line: bytes) -> None:
        LINES.put(line)

    debug = info = warning = error = critical = exception = write


class _Handler(logging.Handler):
    """A handler for `logging` that puts lines into the queue."""

    def emit(self, record: logging.LogRecord) -> None:
        LINES.put(self.format(record).encode("utf-8", "backslashreplace"))


def _encode(event: EventDict) -> bytes:
    """Return an event as JSON. NaN and infinities become null.

    A lone surrogate, as in a file name that is not UTF-8, is escaped.
    """
    try:
        return msgspec.json.encode(event, enc_hook=repr)
    except UnicodeEncodeError:
        finite = json.loads(json.dumps(event, default=repr), parse_constant=lambda _: None)
        return json.dumps(finite, separators=(",", ":")).encode()


def _json(_: WrappedLogger, __: str, event: EventDict) -> str:
    return _encode(event).decode()


def _json_line(logger: _Queued, method: str, event: EventDict) -> bytes:
    """Return the same line as `shared` (see `configure`), `format_exc_info` and `_json`, in half of their time."""
    event["level"] = method
    event["logger"] = logger.name
    event["timestamp"] = datetime.now(UTC).isoformat()[:-6] + "Z"
    if "exc_info" in event:
        event = structlog.processors.format_exc_info(logger, method, event)
    return _encode(event)


def _encoded(_: WrappedLogger, __: str, line: Any) -> bytes:
    return str(line).encode("utf-8", "backslashreplace")


def _notice(processors: Sequence[Processor], dropped: int) -> bytes:
    """Return the line that says how many lines were dropped before it."""
    advice = "the reader of stderr is too slow or has stopped"
    event: Any = {"event": "log lines dropped", "lines": dropped, "advice": advice}
    for processor in processors:
        event = processor(_Queued("flashpoint.logs"), "warning", event)
    return bytes(event)


def for_people(style: Literal["auto", "json", "console"]) -> bool:
    """Return whether `style` means lines in columns for a person; False means JSON."""
    return style == "console" or (style == "auto" and os.isatty(STDERR))


def configure(style: Literal["auto", "json", "console"], level: str) -> None:
    """Send every log line of the process to stderr, as a JSON object or in columns for a person.

    `auto` means columns if stderr is a terminal. NO_COLOR turns off their colours.
    """
    as_json = not for_people(style)
    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: list[Processor]
    ours: list[Processor]
    if as_json:
        renderer, ours = [structlog.processors.format_exc_info, _json], [_json_line]
    else:
        console = structlog.dev.ConsoleRenderer(
            colors=os.isatty(STDERR) and not os.environ.get("NO_COLOR"),
            exception_formatter=structlog.dev.plain_traceback,  # rich's shows the values of all local variables
        )
        renderer, ours = [console], [*shared, console, _encoded]
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
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.captureWarnings(True)
    # uvicorn's lines about starting and stopping repeat ours.
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
