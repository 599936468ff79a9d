"""The Open Inference Protocol over gRPC: the content of oip/ as protobuf messages, on its own port (`--grpc-port`).

A call becomes a request to the ASGI application of this process. So keys, limits, admission, deadlines, metrics, log
lines, traces and errors have only one implementation.

    inference.proto, health.proto              the messages
    descriptors.binpb, protos.py               the messages compiled by `make protos`; their classes
    framing.py                                 take tensors out of a message, and put them into one, without protobuf
    request.py, answer.py, infer.py            inference: parse the request, write the answer, and the route
    arrivals.py                                the memory for messages and answers, and which call may read next
    methods.py                                 all other methods, as paths under /v2
    server.py                                  the port, status codes, and the bridge from gRPC to the application
"""

import os

# gRPC reads these when it is imported. Without the first, it writes messages about single connections to stderr. The
# second turns off gRPC's support for forked processes that go on running Python code: this server only starts programs.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
