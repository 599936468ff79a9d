"""Spans as a receiver of OTLP gets them, decoded by OpenTelemetry's own messages."""

import concurrent.futures
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace import TracerProvider

import flashpoint
from tests.support.messages import message, normal, post
from tests.support.servers import wait_for

PARTS = ["decode", "queue", "compute", "encode"]


class Receiver:
    """OTLP over HTTP on a port of 127.0.0.1; `spans` are those that have come."""

    def __init__(self):
        self.spans = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    names = {a.key: a.value.string_value for a in resource.resource.attributes}
                    assert names["service.name"] == "flashpoint"
                    receiver.spans += [span for scope in resource.scope_spans for span in scope.spans]
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1/traces"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def wait(self, name, trace=None, count=1):
        """The spans of that name, of that trace, once there are so many."""

        def found():
            spans = [s for s in list(self.spans) if s.name == name and trace in (None, s.trace_id.hex())]
            return spans if len(spans) >= count else None

        return wait_for(found, lambda: f"{name} of {trace} never came")


@pytest.fixture(scope="module")
def receiver():
    receiver = Receiver()
    yield receiver
    receiver.http.shutdown()
    receiver.http.server_close()


@pytest.fixture(scope="module")
def server(start_server, receiver):
    soon = {"OTEL_BSP_SCHEDULE_DELAY": "50"}  # milliseconds
    return start_server(interpret=True, max_queue_delay=1.0, otlp_endpoint=receiver.url, environment=soon)


def attributes(span):
    return {a.key: a.value.string_value or a.value.int_value for a in span.attributes}


def test_a_request_and_the_parts_of_its_way_are_in_the_callers_trace(server, receiver):
    q = normal(1, 2, 5, 8).numpy()
    tracer = TracerProvider().get_tracer("test")
    with tracer.start_as_current_span("caller") as caller, flashpoint.Client(server.url) as client:
        client.attention(q, q, q, request_id="traced")
    trace, above = f"{caller.get_span_context().trace_id:032x}", f"{caller.get_span_context().span_id:016x}"
    (span,) = receiver.wait("POST /attention", trace)
    assert (span.parent_span_id.hex(), span.kind) == (above, Span.SPAN_KIND_SERVER)
    said = attributes(span)
    assert said["flashpoint.request_id"] == "traced"
    assert said["flashpoint.backend"] == "torch"
    assert (said["http.response.status_code"], said["http.route"]) == (200, "/attention")
    parts = [receiver.wait(name, trace)[0] for name in PARTS]
    assert {part.parent_span_id for part in parts} == {span.span_id}
    edges = [span.start_time_unix_nano]
    for part in parts:
        assert part.start_time_unix_nano == edges[-1]
        edges.append(part.end_time_unix_nano)
    assert edges == sorted(edges)
    assert edges[-1] <= span.end_time_unix_nano
    assert caller.start_time <= span.start_time_unix_nano <= span.end_time_unix_nano <= caller.end_time + 1e9


def test_requests_that_share_a_launch_link_to_its_span(server, receiver):
    tensors = dict.fromkeys("qkv", normal(1, 1, 4, 16))
    traces = [f"{n:032x}" for n in (71, 72)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        answers = [
            pool.submit(
                post, server, "/attention", message(tensors, backend="triton"), traceparent=f"00-{trace}-{1:016x}-01"
            )
            for trace in traces
        ]
        assert {answer.result().headers["x-batch-size"] for answer in answers} == {"2"}
    links = [receiver.wait("POST /attention", trace)[0].links for trace in traces]
    assert links[0] == links[1]
    (link,) = links[0]
    (launch,) = receiver.wait("launch", link.trace_id.hex())
    assert launch.span_id == link.span_id
    assert attributes(launch)["flashpoint.batch_size"] == 2
    assert attributes(launch)["flashpoint.flops"] > 0
    (compute,) = receiver.wait("compute", traces[0])
    assert (launch.start_time_unix_nano, launch.end_time_unix_nano) == pytest.approx(
        (compute.start_time_unix_nano, compute.end_time_unix_nano), abs=1e9
    )


def test_what_its_caller_did_not_choose_is_not_told_and_what_is_refused_is(server, receiver):
    q = dict.fromkeys("qkv", normal(1, 1, 3, 8))
    unchosen, refused = f"{81:032x}", f"{82:032x}"
    assert post(server, "/attention", message(q), traceparent=f"00-{unchosen}-{1:016x}-00").status == 200
    wrong = message(q, causal="perhaps")
    assert post(server, "/attention/grad", wrong, traceparent=f"00-{refused}-{1:016x}-01").status == 422
    (span,) = receiver.wait("POST /attention/grad", refused)
    assert attributes(span)["error.type"] == "invalid_request"
    assert span.status.code == Status.STATUS_CODE_UNSET  # a caller's error is none of the server's
    assert post(server, "/attention", message(q), traceparent="nonsense").status == 200  # a trace of its own
    receiver.wait("POST /attention", count=4)
    told = [s.name for s in receiver.spans if s.trace_id.hex() == unchosen]
    assert told == []
    assert [s.name for s in receiver.spans if s.trace_id.hex() == refused] == ["POST /attention/grad"]
    assert not any(s.name.startswith("GET") for s in receiver.spans)


def test_what_was_not_sent_is_sent_when_the_server_stops(start_server, receiver):
    late = {"OTEL_BSP_SCHEDULE_DELAY": "600000"}
    server = start_server(otlp_endpoint=receiver.url, environment=late)
    trace = f"{91:032x}"
    q = dict.fromkeys("qkv", normal(1, 1, 3, 8))
    assert post(server, "/attention", message(q), traceparent=f"00-{trace}-{1:016x}-01").status == 200
    server.stop()
    assert sorted(s.name for s in receiver.spans if s.trace_id.hex() == trace) == sorted([*PARTS, "POST /attention"])
