"""What an engine answers to a request: that it is computed, or why it is not."""

from __future__ import annotations

import os
import time
from typing import Any

import structlog

from flashpoint_server.engine.device import DeviceLostError, OutOfMemoryError, Stages
from flashpoint_server.engine.entry import Entry
from flashpoint_server.ipc.messages import Batch, Done, Failed
from flashpoint_server.observability.lines import LINES
from flashpoint_server.refusal import Refusal

log = structlog.stdlib.get_logger("flashpoint.engine")


def done(entry: Entry, size: int, stages: Stages, memory: int, number: int, about: Batch | None) -> Done:
    """Return the message that a request is computed.

    It ran in launch `number` with `size` requests, about which `about` tells in the answer of one of them; the engine
    holds `memory` bytes of its device.
    """
    submit, spec = entry.placed.submit, entry.spec
    metadata: dict[str, Any] = {"backend": submit.backend}
    if spec.options.dropout_p:
        metadata["dropout_seed"] = entry.seed
    ended, dropped = time.perf_counter(), LINES.dropped()
    return Done(submit.id, metadata, entry.began, ended, size, *stages, memory, number, about, dropped)


def failed(entry: Entry) -> Failed:
    """Return the message that says why a request failed. Ends the process where its device is lost."""
    submit, error = entry.submit, entry.failure
    assert error is not None
    if isinstance(error, DeviceLostError):
        log.critical("device lost", request_id=submit.request_id, error=str(error))
        LINES.flush()
        os._exit(1)  # what runs is lost with it; what has not begun is another engine's
    if isinstance(error, Refusal):
        reply = Failed(submit.id, error.code, error.detail, list(error.errors))
    elif isinstance(error, OutOfMemoryError):
        reply = Failed(submit.id, "out_of_memory", "the device ran out of memory for this request", [])
    else:
        log.error("failed", request_id=submit.request_id, error=type(error).__name__, exc_info=error)
        reply = Failed(submit.id, "internal_error", "an error of the server, logged by its engine", [])
    error.__traceback__ = None  # the entry may be kept a while longer, and must keep no tensors
    return reply
