"""The Open Inference Protocol over gRPC: oip/ in protobuf's framing, on a port of its own (`--grpc-port`).

A call becomes a request to the ASGI application beside it, so that all there is to a request (keys, limits, admission,
deadlines, metrics, log line, traces, errors) is there once.

    inference.proto, health.proto              the messages
    descriptors.binpb, protos.py               compiled by `make protos`; their classes
    framing.py                                 tensors taken out of a message, and put into one, without protobuf
    request.py, answer.py, infer.py            inference: what is asked, what is answered, and the way between
    arrivals.py                                the memory of messages and answers, and who may read the next
    methods.py                                 all other methods, as the addresses under /v2 that they are
    server.py                                  the port, refusals' statuses, what is between gRPC and the application
"""

import os

# Before gRPC is imported: what its core would write to stderr, where the log is, concerns one connection or another,
# and the forks that it handles are those of processes that go on in Python; ours start another program at once.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
