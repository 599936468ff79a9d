"""Time the Open Inference Protocol over gRPC and over HTTP, by payload size: `python benchmarks/rpc.py`.

The same prepared inferences go to one `flashpoint serve` over one connection of each kind, in turn: large keys and
values with one query, and large queries with one key, so that almost nothing is computed. The medians go to
benchmarks/results/rpc-<device>.json. Takes about a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import time
from typing import Any

import grpc
import numpy as np
from protocol import PATH, infer
from runner import SERVICE, Measured, Option, run
from serving import MIB, Connection, service

from flashpoint_server.oip.datatypes import DATATYPE_OF
from flashpoint_server.oip.grpc import protos

METHOD = "/inference.GRPCInferenceService/ModelInfer"
DIM = 64
SIZES = (4096, 65536, MIB, 16 * MIB, 64 * MIB)  # bytes of a request in, or of an answer out
CALLS = {4096: 60, 65536: 60, MIB: 20}  # calls of a size in a round; 2 of larger sizes


def requests(nbytes: int) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
    """Return a request with `nbytes` bytes in, and one with `nbytes` bytes out. Only one row is computed."""
    one = np.ones((1, 1, 1, DIM), np.float32)
    keys = np.ones((1, 1, nbytes // (8 * DIM), DIM), np.float32)  # k and v
    rows = np.ones((1, 1, nbytes // (4 * DIM), DIM), np.float32)  # of o
    single = np.ones(1, np.int64)
    return {
        "in": {"q": one, "k": keys, "v": keys, "kv_lengths": single},
        "out": {"q": rows[..., :1], "k": one[..., :1], "v": one, "q_lengths": single},
    }


def message(tensors: dict[str, np.ndarray[Any, Any]]) -> bytes:
    request = protos.message("inference.ModelInferRequest")(model_name="attention")
    for name, t in tensors.items():
        request.inputs.add(name=name, datatype=DATATYPE_OF[t.dtype.name], shape=t.shape)
        request.raw_input_contents.append(t.tobytes())
    return bytes(request.SerializeToString())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    measured, port = Measured(), free_port()
    os.environ["FLASHPOINT_GRPC_PORT"] = str(port)
    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with contextlib.ExitStack() as inside:
        _, http_port, _ = inside.enter_context(service())
        http = inside.enter_context(contextlib.closing(Connection(http_port)))
        channel = inside.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}", options=unlimited))
        call = channel.unary_unary(METHOD)
        for counts in range(args.rounds + 1):
            for size in SIZES:
                for way, tensors in requests(size).items():
                    (body, fields), other = infer(tensors), message(tensors)
                    for _ in range(CALLS.get(size, 2)):
                        over_http = http.post(PATH, body, **fields).whole
                        began = time.perf_counter()
                        call(other)
                        over_grpc = time.perf_counter() - began
                        if counts:
                            measured.add(f"{size} {way} http", over_http)
                            measured.add(f"{size} {way} grpc", over_grpc)
    rows = []
    for way in ("in", "out"):
        for size in SIZES:
            medians = {kind: round(measured.median(f"{size} {way} {kind}") * 1e6) for kind in ("http", "grpc")}
            rows.append({"bytes": size, "way": way} | {f"{kind}_microseconds": us for kind, us in medians.items()})
            print(rows[-1])
    return {"rounds": args.rounds, "medians": rows}


if __name__ == "__main__":
    rounds = Option(10, "rounds of all sizes; an additional first round does not count")
    run(measure, "rpc", packages=(*SERVICE, "grpcio"), rounds=rounds)
