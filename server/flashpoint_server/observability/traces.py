"""Spans for OpenTelemetry, sent to `--otlp-endpoint`. OpenTelemetry's variables (OTEL_…) apply, through its SDK.

Spans are made after the answer was sent, from times that are measured anyway: one span for the request, with a child
span for each stage, and a link to the span of its launch. A launch is a batch that an engine computes. It has a trace
of its own, because several requests may share it. The trace id is made from the engine's number for the launch, so that
every HTTP process can make the link.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from importlib.metadata import version
from typing import Any

import structlog
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.sdk.environment_variables import OTEL_EXPORTER_OTLP_TIMEOUT, OTEL_EXPORTER_OTLP_TRACES_TIMEOUT
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.trace import Link, SpanContext, SpanKind, StatusCode, TraceFlags, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from flashpoint_server.http.request import OTHER, PARTS, Request
from flashpoint_server.ipc.client import Engine, Listener
from flashpoint_server.ipc.messages import Done

EXPORT_SECONDS = 5.0  # maximum seconds of one export, unless one of TIMEOUTS is set
TIMEOUTS = (OTEL_EXPORTER_OTLP_TIMEOUT, OTEL_EXPORTER_OTLP_TRACES_TIMEOUT)
LAST_EXPORT = 3.0  # maximum seconds for the remaining spans, when the process ends
STEP = 1_000_000  # nanoseconds; `time.time` and `time.perf_counter` drift apart by more only if the clock was set
_MIXER = 0x9E3779B97F4A7C15F39CC0605CEDC835  # odd; spreads the trace ids of launches, by which samplers choose

log = structlog.stdlib.get_logger("flashpoint.traces")


class _LaunchIds(IdGenerator):
    """Generates the ids of the launch `number`, which the caller sets."""

    number = 0

    def generate_trace_id(self) -> int:
        return self.number * _MIXER % (1 << 128)

    def generate_span_id(self) -> int:
        return self.number


class Traces(Listener):
    """Exports the spans of one application. `close` sends the remaining spans. ValueError means wrong variables."""

    def __init__(self, endpoint: str) -> None:
        timeout = None if any(map(os.environ.get, TIMEOUTS)) else EXPORT_SECONDS
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=timeout))
        ours = {"service.name": "flashpoint", "service.version": version("flashpoint")}
        self._resource = Resource.create({**ours, **OTELResourceDetector().detect().attributes})
        self._launch_ids = _LaunchIds()
        self._requests, self._launches = self._tracer(RandomIdGenerator()), self._tracer(self._launch_ids)
        self._propagator = _propagator()
        self._epoch = 0  # nanoseconds that convert `time.perf_counter` to Unix time

    def _tracer(self, ids: IdGenerator) -> Tracer:
        provider = TracerProvider(resource=self._resource, id_generator=ids, shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        return provider.get_tracer("flashpoint", version("flashpoint"))

    def close(self) -> None:
        """Send the remaining spans, in at most LAST_EXPORT seconds. The SDK would wait for half a minute."""
        sending = threading.Thread(target=self._processor.shutdown, name="flashpoint-traces", daemon=True)
        sending.start()
        sending.join(LAST_EXPORT)

    def request(self, request: Request, route: str, _: float) -> None:
        """Export the spans of a request of one of our routes that has ended, if the sampler chooses it."""
        if route == OTHER:
            return
        self._follow_clock()
        ended = time.perf_counter()
        attributes: dict[str, Any] = {
            "http.request.method": request.method,
            "http.route": route,
            "http.response.status_code": request.status,
            "http.request.body.size": request.bytes_in,
            "http.response.body.size": request.bytes_out,
            "flashpoint.request_id": request.request_id,
        }
        if request.code:
            attributes["error.type"] = request.code
        links = []
        if request.launch is not None:
            attributes |= {f"flashpoint.{name}": request.facts[name] for name in ("backend", "batch_size")}
            links = [Link(self._launch(request.launch))]
        span = self._requests.start_span(
            f"{request.method} {route}",
            self._propagator.extract(request.headers, Context()),
            SpanKind.SERVER,
            attributes,
            links,
            self._unix(request.arrived),
        )
        if not span.is_recording():
            return
        assert request.status is not None  # set, because the request has ended
        if request.status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end(self._unix(ended))
        inside = set_span_in_context(span, Context())
        for part, (began, end) in zip(PARTS, itertools.pairwise(request.marks), strict=False):
            self._requests.start_span(part, inside, start_time=self._unix(began)).end(self._unix(end))

    def computed(self, engine: Engine, done: Done) -> None:
        """Export the span of a launch, once: only one request of each launch has `done.flops`."""
        if done.flops is None:
            return
        self._follow_clock()
        attributes = {
            "flashpoint.backend": done.metadata["backend"],
            "flashpoint.batch_size": done.batch_size,
            "flashpoint.flops": done.flops,
            "flashpoint.padding_saved_flops": done.padding,
            "flashpoint.fill": done.fill,
        }
        self._launch_ids.number = done.launch
        span = self._launches.start_span("launch", Context(), attributes=attributes, start_time=self._unix(done.began))
        span.end(self._unix(done.ended))

    def _launch(self, number: int) -> SpanContext:
        """Return the context of a launch's span."""
        ids = self._launch_ids
        ids.number = number
        sampled = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(ids.generate_trace_id(), ids.generate_span_id(), is_remote=True, trace_flags=sampled)

    def _follow_clock(self) -> None:
        """Convert times by the present system clock. Small differences are noise, and would tear spans apart."""
        epoch = time.time_ns() - time.perf_counter_ns()
        if abs(epoch - self._epoch) > STEP:
            self._epoch = epoch

    def _unix(self, seconds: float) -> int:
        """Return a time of `time.perf_counter` in nanoseconds of Unix time."""
        return self._epoch + round(seconds * 1e9)


def _propagator() -> TextMapPropagator:
    """Return the propagator that OTEL_PROPAGATORS names; W3C Trace Context if one of its names is not known."""
    try:
        from opentelemetry.propagate import get_global_textmap
    except ValueError as error:
        log.warning("traceparent alone is read", error=str(error))
        return TraceContextTextMapPropagator()
    return get_global_textmap()
