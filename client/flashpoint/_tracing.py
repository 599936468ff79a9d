"""The caller's trace, where OpenTelemetry is in use: it goes with each request, and the server's span belongs to it."""

from __future__ import annotations

import sys


def trace_headers() -> dict[str, str]:
    """`traceparent` and what else the caller's propagator has (W3C Trace Context); nothing where nobody traces."""
    if "opentelemetry.trace" not in sys.modules:  # then there is no span, and it need not be installed
        return {}
    from opentelemetry import propagate

    headers: dict[str, str] = {}
    propagate.inject(headers)
    return headers
