"""Spans for OpenTelemetry, sent to `--otlp-endpoint`.

Spans are made after the answer was sent, from times that are measured anyway: one span for the request, with a child
span for each stage, and a link to the span of its launch. A launch is a batch that an engine computes. It has a trace
of its own, because several requests may share it. The trace id is made from the engine's number for the launch, so that
every HTTP process can make the link.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from flashpoint_server.exchange import Exchange
from flashpoint_server.ipc.client import Engine, Listener
from flashpoint_server.ipc.messages import Done

EXPORT_SECONDS = 5.0  # maximum seconds of one export, including the last one when the process ends
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class Traces(Listener):
    """Exports the spans of one application. `close` sends the remaining spans."""

    def __init__(self, endpoint: str) -> None:
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_SECONDS))
        self._resource = Resource.create({"service.name": "flashpoint", "service.version": version("flashpoint")})
        self._scope = InstrumentationScope("flashpoint", version("flashpoint"))
        self._ids = RandomIdGenerator()
        self._context = TraceContextTextMapPropagator()
        self._epoch = time.time_ns() - time.perf_counter_ns()  # converts `time.perf_counter` to Unix time

    def close(self) -> None:
        self._processor.shutdown()  # type: ignore[no-untyped-call]

    def request(self, exchange: Exchange, route: str) -> None:
        """Export the spans of a request that has ended, unless the caller's `traceparent` is not sampled."""
        above = get_current_span(self._context.extract(exchange.headers)).get_span_context()
        if above.is_valid and not above.trace_flags.sampled:
            return
        ended = time.perf_counter()
        trace = above.trace_id if above.is_valid else self._ids.generate_trace_id()
        mine = self._new(trace)
        attributes: dict[str, Any] = {
            "http.request.method": exchange.method,
            "http.route": route,
            "http.response.status_code": exchange.status,
            "http.request.body.size": exchange.bytes_in,
            "http.response.body.size": exchange.bytes_out,
            "flashpoint.request_id": exchange.request_id,
        }
        if exchange.code:
            attributes["error.type"] = exchange.code
        links = []
        if (way := exchange.way) is not None:
            attributes |= {"flashpoint.backend": way.backend, "flashpoint.batch_size": way.batch_size}
            links = [Link(_launch(way.launch))]
        assert exchange.status is not None  # set, because the request has ended
        failed = Status(StatusCode.ERROR if exchange.status >= 500 else StatusCode.UNSET)
        name = f"{exchange.method} {route}"
        parent = above if above.is_valid else None
        self._tell(name, mine, parent, exchange.arrived, ended, attributes, links, SpanKind.SERVER, failed)
        for part, (began, end) in (way.timings.spans() if way is not None else {}).items():
            self._tell(part, self._new(trace), mine, began, end)

    def computed(self, engine: Engine, done: Done) -> None:
        """Export the span of a launch, once: only one request of each launch has `done.batch`."""
        if (batch := done.batch) is None:
            return
        attributes = {
            "flashpoint.backend": done.metadata["backend"],
            "flashpoint.batch_size": done.batch_size,
            "flashpoint.flops": batch.flops,
            "flashpoint.padding_saved_flops": batch.padding,
            "flashpoint.fill": batch.fill,
        }
        self._tell("launch", _launch(done.launch), None, done.began, done.ended, attributes)

    def _new(self, trace: int) -> SpanContext:
        return SpanContext(trace, self._ids.generate_span_id(), is_remote=False, trace_flags=_SAMPLED)

    def _tell(
        self, name: str, context: SpanContext, parent: SpanContext | None, began: float, ended: float,
        attributes: Mapping[str, Any] | None = None, links: Sequence[Link] = (), kind: SpanKind = SpanKind.INTERNAL,
        status: Status | None = None,
    ) -> None:  # fmt: skip
        """Export a span. Times are in `time.perf_counter` seconds."""
        span = ReadableSpan(
            name, context, parent, self._resource, attributes, links=links, kind=kind,
            instrumentation_scope=self._scope, status=status or Status(),
            start_time=self._epoch + round(began * 1e9), end_time=self._epoch + round(ended * 1e9),
        )  # fmt: skip
        self._processor.on_end(span)


def _launch(number: int) -> SpanContext:
    """Return the context of a launch's span: the span id is the launch number; the trace id is the number twice."""
    return SpanContext(number << 64 | number, number, is_remote=True, trace_flags=_SAMPLED)
