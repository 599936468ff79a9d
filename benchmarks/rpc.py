"""Time the Open Inference Protocol over gRPC and over HTTP, by payload size: `python benchmarks/rpc.py`.

The same prepared requests go to one `flashpoint serve` over gRPC and HTTP alternately, one connection each: large keys
and values with one query, and large queries with one key, so that almost nothing is computed. The medians go to
benchmarks/results/rpc-<device>.json. Takes about a minute.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import grpc
from forms import DATATYPES, OIP_BINARY, Tensors
from protocol import PATH
from runner import SERVICE, Args, Option, in_turn, medians, run, seconds
from serving import MIB, Connection, exchanges, free_ports, service

from flashpoint_server.oip.grpc import protos

METHOD = "/inference.GRPCInferenceService/ModelInfer"
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
SIZES = (4096, 65536, MIB, 16 * MIB, 64 * MIB)  # bytes of the large body: the request ("in") or the answer ("out")
CALLS = {4096: 60, 65536: 60, MIB: 20}  # calls of each size in a round; 2 calls for larger sizes


def message(tensors: Tensors) -> Any:
    """Return the request as a gRPC message."""
    made = protos.message("inference.ModelInferRequest")(model_name="attention")
    for name, t in tensors.items():
        made.inputs.add(name=name, datatype=DATATYPES[t.dtype.name], shape=t.shape)
        made.raw_input_contents.append(t.tobytes())
    return made


def measure(args: Args) -> dict[str, Any]:
    (port,) = free_ports(1)
    os.environ["FLASHPOINT_GRPC_PORT"] = str(port)
    rows = []
    with contextlib.ExitStack() as inside:
        _, http_port, _ = inside.enter_context(service())
        http = inside.enter_context(contextlib.closing(Connection(http_port)))
        channel = inside.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}", options=UNLIMITED))
        call = channel.unary_unary(METHOD)
        for way in ("in", "out"):
            for size in SIZES:
                tensors, calls = exchanges(size)[way], CALLS.get(size, 2)
                over_http, over_grpc = OIP_BINARY.whole(tensors), message(tensors).SerializeToString()
                ways = {
                    "http_microseconds": lambda sent=over_http: http.post(PATH, *sent).whole * 1e6,
                    "grpc_microseconds": lambda sent=over_grpc: seconds(lambda: call(sent)) * 1e6,
                }
                taken = medians(list(in_turn(ways, args.rounds * calls, warm=calls)), digits=0)
                rows.append({"bytes": size, "way": way, **{name: round(us) for name, us in taken.items()}})
    return {"rounds": args.rounds, "medians": rows}


if __name__ == "__main__":
    rounds = Option(10, "rounds of all sizes; an additional first round does not count")
    run(measure, "rpc", packages=(*SERVICE, "grpcio"), rounds=rounds)
