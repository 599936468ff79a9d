"""The server sends the right trace spans to an OpenTelemetry (OTLP) receiver."""

import concurrent.futures
import os
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace import TracerProvider

import flashpoint
from flashpoint_server.http.request import Request
from flashpoint_server.observability import traces
from tests.support.messages import ask, message, normal, post
from tests.support.servers import wait_for
from tests.support.sockets import send

PARTS = ["decode", "queue", "compute", "encode"]


SHARED = message(dict.fromkeys("qkv", normal(1, 1, 4, 16)), backend="triton")


@pytest.fixture
def server(gated):
    return gated.server


def attributes(span):
    return {a.key: a.value.string_value or a.value.int_value for a in span.attributes}


@pytest.mark.slow
def test_a_request_and_the_parts_of_its_way_are_in_the_callers_trace(server, receiver):
    q = normal(1, 2, 5, 8).numpy()
    tracer = TracerProvider().get_tracer("test")
    with tracer.start_as_current_span("caller") as caller, flashpoint.Client(server.url) as client:
        client.attention(q, q, q, request_id="traced")
    trace, above = f"{caller.get_span_context().trace_id:032x}", f"{caller.get_span_context().span_id:016x}"
    (span,) = receiver.wait("POST /attention", trace)
    assert (span.parent_span_id.hex(), span.kind) == (above, Span.SPAN_KIND_SERVER)
    values = attributes(span)
    assert values["flashpoint.request_id"] == "traced"
    assert values["flashpoint.backend"] == "cpu"
    assert (values["http.response.status_code"], values["http.route"]) == (200, "/attention")
    parts = [receiver.wait(name, trace)[0] for name in PARTS]
    assert {part.parent_span_id for part in parts} == {span.span_id}
    edges = [span.start_time_unix_nano]
    for part in parts:
        assert part.start_time_unix_nano == edges[-1]
        edges.append(part.end_time_unix_nano)
    assert edges == sorted(edges)
    assert edges[-1] <= span.end_time_unix_nano
    assert abs(span.start_time_unix_nano - caller.start_time) < 3600e9  # both in nanoseconds since the epoch


def test_requests_that_share_a_launch_link_to_its_span(gated, receiver):
    ids = [os.urandom(16).hex() for _ in range(2)]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        with gated.busy(pool, SHARED):
            answers = [gated.post(pool, "shares", SHARED, traceparent=f"00-{trace}-{1:016x}-01") for trace in ids]
        assert {answer.result().headers["x-batch-size"] for answer in answers} == {"2"}
    links = [receiver.wait("POST /attention", trace)[0].links for trace in ids]
    assert links[0] == links[1]
    (link,) = links[0]
    (launch,) = receiver.wait("launch", link.trace_id.hex())
    assert launch.span_id == link.span_id
    assert attributes(launch)["flashpoint.batch_size"] == 2
    assert attributes(launch)["flashpoint.flops"] > 0
    (compute,) = receiver.wait("compute", ids[0])
    assert launch.start_time_unix_nano == compute.start_time_unix_nano


def test_what_its_caller_did_not_choose_is_not_told_and_what_is_refused_is(server, receiver):
    q = dict.fromkeys("qkv", normal(1, 1, 3, 8))
    unchosen, refused, last, watched = (os.urandom(16).hex() for _ in range(4))
    assert post(server, "/attention", message(q), traceparent=f"00-{unchosen}-{1:016x}-00").status == 200
    name = f"untraced-{refused}"  # its `traceparent` is invalid, so it gets a new trace
    assert post(server, "/attention", message(q), traceparent="nonsense", x_request_id=name).status == 200
    wrong = message(q, causal="perhaps")
    assert post(server, "/attention/grad", wrong, traceparent=f"00-{refused}-{1:016x}-01").status == 422
    (span,) = receiver.wait("POST /attention/grad", refused)
    assert attributes(span)["error.type"] == "invalid_request"
    assert span.status.code == Status.STATUS_CODE_UNSET  # a caller's error is not a server error
    for path in ("/health/ready", "/metrics", "/info"):
        assert ask(server, path, traceparent=f"00-{watched}-{1:016x}-01").status == 200
    assert post(server, "/attention", message(q), traceparent=f"00-{last}-{1:016x}-01").status == 200
    receiver.wait("encode", last)  # spans are sent in the order in which they end
    assert [s.name for s in receiver.spans if s.trace_id.hex() == unchosen] == []
    assert [s.name for s in receiver.spans if s.trace_id.hex() == refused] == ["POST /attention/grad"]
    (untraced,) = [s for s in receiver.spans if attributes(s).get("flashpoint.request_id") == name]
    assert not untraced.parent_span_id
    assert [s.name for s in receiver.spans if s.trace_id.hex() == watched] == []


def test_opentelemetrys_variables_apply_and_what_was_not_sent_is_sent_when_the_server_stops(start_server, receiver):
    variables = {
        "OTEL_BSP_SCHEDULE_DELAY": "600000",
        "OTEL_SERVICE_NAME": "mine",
        "OTEL_RESOURCE_ATTRIBUTES": "service.name=lost,service.version=7,deployment.environment.name=test",
        "OTEL_TRACES_SAMPLER": "parentbased_always_off",
    }
    server = start_server(otlp_endpoint=receiver.url, environment=variables)
    trace, name = os.urandom(16).hex(), f"unsampled-{os.urandom(4).hex()}"
    q = dict.fromkeys("qkv", normal(1, 1, 3, 8))
    assert post(server, "/attention", message(q), x_request_id=name).status == 200
    assert post(server, "/attention", message(q), traceparent=f"00-{trace}-{1:016x}-01").status == 200
    server.stop()
    spans = [s for s in receiver.spans if s.trace_id.hex() == trace]
    assert sorted(s.name for s in spans) == sorted([*PARTS, "POST /attention"])
    assert not [s for s in receiver.spans if attributes(s).get("flashpoint.request_id") == name]
    for resource in (receiver.resources[s.span_id] for s in spans):
        assert (resource["service.name"], resource["service.version"]) == ("mine", "7")
        assert resource["deployment.environment.name"] == "test"


ONE_REQUEST = """
import sys
from flashpoint_server.http.request import Request
from flashpoint_server.observability.traces import Traces

traces = Traces(sys.argv[1])
traces.request(Request("POST", "/attention", {"traceparent": sys.argv[2]}, sys.argv[3], status=200), "/attention", 0.0)
traces.close()
"""


@pytest.mark.parametrize(
    ("name", "value", "sent", "joined"),
    [
        ("OTEL_SDK_DISABLED", "True", False, False),
        ("OTEL_TRACES_SAMPLER", "always_off", False, False),
        ("OTEL_PROPAGATORS", "none", True, False),
        ("OTEL_PROPAGATORS", "unknown", True, True),
        ("OTEL_PROPAGATORS", "baggage,tracecontext", True, True),
    ],
)
def test_one_variable_of_opentelemetry_applies(receiver, name, value, sent, joined):
    trace, request_id = os.urandom(16).hex(), os.urandom(8).hex()
    command = [sys.executable, "-c", ONE_REQUEST, receiver.url, f"00-{trace}-{1:016x}-01", request_id]
    subprocess.run(command, env={**os.environ, name: value}, check=True)
    spans = [s for s in receiver.spans if attributes(s).get("flashpoint.request_id") == request_id]
    assert [s.trace_id.hex() == trace for s in spans] == [joined] * sent


def test_spans_follow_a_step_of_the_system_clock(receiver, monkeypatch):
    """A virtual machine that was suspended, or NTP, may set the clock by hours while the server runs."""
    hour, step = 3600 * 10**9, 0
    ours = SimpleNamespace(
        time_ns=lambda: time.time_ns() + step, perf_counter=time.perf_counter, perf_counter_ns=time.perf_counter_ns
    )
    monkeypatch.setattr(traces, "time", ours)
    exporting = traces.Traces(receiver.url)
    ids = [os.urandom(16).hex() for _ in range(2)]
    for trace in ids:
        fields = {"traceparent": f"00-{trace}-{1:016x}-01"}
        exporting.request(Request("POST", "/attention", fields, "stepped", status=200), "/attention", 0.0)
        step = 5 * hour
    exporting.close()
    before, after = (receiver.wait("POST /attention", trace)[0].start_time_unix_nano for trace in ids)
    assert 4 * hour < after - before < 6 * hour


def test_a_collector_that_never_answers_holds_the_end_of_a_server_for_three_seconds(monkeypatch):
    waits = []

    class Thread(threading.Thread):
        def join(self, timeout=None):
            waits.append(timeout)  # without the wait

    with socket.create_server(("127.0.0.1", 0)) as silent:
        exporting = traces.Traces(f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces")
        exporting.request(Request("POST", "/attention", {}, "lost", status=200), "/attention", 0.0)
        monkeypatch.setattr(traces, "threading", SimpleNamespace(Thread=Thread))
        exporting.close()
    assert waits == [3]


ALONE = message({name: normal(2, 3) for name in "qkv"}, backend="reference")


def test_a_client_that_vanishes_from_the_queue_is_499_in_its_trace(gated, receiver):
    trace = os.urandom(16).hex()
    with concurrent.futures.ThreadPoolExecutor(1) as pool, gated.busy(pool, ALONE):
        name = f"leaves-{os.urandom(4).hex()}"
        with send(gated.server, ALONE, request_id=name, traceparent=f"00-{trace}-{1:016x}-01"):
            wait_for(lambda: gated.inside() == 2, lambda: f"{name} never got in")
        gated.server.wait_for_request(name)
    (span,) = receiver.wait("POST /attention", trace)
    said = {a.key: a.value.string_value or a.value.int_value for a in span.attributes}
    assert (said["http.response.status_code"], said["error.type"]) == (499, "client_gone")
