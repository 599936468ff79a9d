"""A receiver of spans by OTLP over HTTP."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.support.servers import wait_for


class Receiver:
    """A receiver of OTLP over HTTP on a port of 127.0.0.1.

    `spans` has the received spans, and `resources` the attributes of the resource of each, by span id.
    """

    def __init__(self):
        self.spans = []
        self.resources = {}
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    names = {a.key: a.value.string_value for a in resource.resource.attributes}
                    spans = [span for scope in resource.scope_spans for span in scope.spans]
                    receiver.resources.update((span.span_id, names) for span in spans)
                    receiver.spans += spans
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

    def wait(self, name, trace):
        """Wait for a span with this name and trace; return all such spans."""

        def matching():
            return [s for s in list(self.spans) if s.name == name and s.trace_id.hex() == trace]

        return wait_for(matching, lambda: f"{name} of {trace} never came")

    def stop(self):
        self.http.shutdown()
        self.http.server_close()
