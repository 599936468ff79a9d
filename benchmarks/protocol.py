"""Compare the protocols of the service with one another: `python benchmarks/protocol.py [rpc|ray]`.

By default, the same requests go to `flashpoint serve` in the format of the Open Inference Protocol and in safetensors,
over one connection. A large request with its tensors in shared memory is compared with the operator in a process
without HTTP. Each round times every variant once. Writes protocol-<device>.json, and takes about a minute.

`rpc` sends the same prepared requests over gRPC and HTTP alternately, one connection each. Almost nothing is computed:
a request brings large keys and values with one query ("in"), or gets a large answer with one computed row ("out").
Writes the medians by payload size to rpc-<device>.json.

`ray` sends the same two kinds of requests in safetensors to `flashpoint serve`, to the same application on uvicorn with
default settings, and to a replica of it on Ray Serve, behind Ray's own proxy and behind HAProxy. All four servers run
at the same time with the same malloc settings, and one of them gets a call at a time. Writes ray-<device>.json, and
takes about three minutes.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from multiprocessing import shared_memory
from typing import Any

import grpc
import numpy as np
import serving
from forms import DATATYPES, OIP_BINARY, SAFETENSORS, Tensors
from runner import MALLOC, ROOT, SERVICE, Args, apart, in_turn, medians, option, run, run_named, seconds, target
from serving import MIB, SMALL, Connection, engine_variables, exchanges, free_ports, operator, service

from flashpoint_server.oip.grpc import protos

SHAPES = {"small": SMALL, "16 MiB": (1, 16, 1024, 256)}  # shape of each of q, k and v
LARGE = (8, 16, 1024, 64)  # 32 MiB each
PATH = "/v2/models/attention/infer"
METHOD = "/inference.GRPCInferenceService/ModelInfer"
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
SIZES = (4096, 65536, MIB, 16 * MIB, 64 * MIB)  # bytes of the large body: the request ("in") or the answer ("out")
CALLS = {4096: 60, 65536: 60, MIB: 20}  # calls of each size in a round; 2 calls for larger sizes
RAY_SIZES = {"16 KiB": 16384, "1 MiB": MIB, "16 MiB": 16 * MIB, "64 MiB": 64 * MIB}
RAY_WAYS = ("flashpoint serve", "uvicorn", "Ray's proxy", "HAProxy")


def encodings(ours: Connection, name: str, rounds: int, calls: int) -> dict[str, float]:
    """Return the median seconds of a call in each encoding; calls with the two encodings alternate."""
    t = np.random.default_rng(0).random(SHAPES[name], np.float32)
    tensors = {"q": t if name == "small" else t[:, :, :1], "k": t, "v": t}  # large bodies: much transfer, little work
    messages = {
        "protocol": (PATH, *OIP_BINARY.whole(tensors)),
        "safetensors": ("/attention", *SAFETENSORS.whole(tensors)),
    }
    ways = {f"{name}, {way}": lambda message=message: ours.post(*message).whole for way, message in messages.items()}
    calls = calls if name == "small" else 4
    return medians(list(in_turn(ways, rounds * calls, warm=calls)), digits=9)


def moves_nothing(ours: Connection, rounds: int) -> dict[str, float]:
    """Return the median seconds of a call at `LARGE` with tensors in shared memory, and of the operator alone."""
    nbytes = 4 * int(np.prod(LARGE))
    memory = shared_memory.SharedMemory(create=True, size=4 * nbytes)
    with contextlib.ExitStack() as inside:
        inside.callback(memory.unlink)
        inside.callback(memory.close)
        for i in range(3):
            t = np.random.default_rng(i).random(LARGE, np.float32)
            memory.buf[i * nbytes : (i + 1) * nbytes] = t.tobytes()
        region = {"key": memory.name, "offset": 0, "byte_size": 4 * nbytes}
        ours.post("/v2/systemsharedmemory/region/large/register", {}, json.dumps(region).encode())

        def place(i: int) -> dict[str, Any]:
            where = {"shared_memory_region": "large", "shared_memory_byte_size": nbytes}
            return {"parameters": {**where, "shared_memory_offset": i * nbytes}}

        inputs = [
            {"name": n, "shape": LARGE, "datatype": DATATYPES["float32"], **place(i)} for i, n in enumerate("qkv")
        ]
        body = json.dumps({"inputs": inputs, "outputs": [{"name": "o", **place(3)}]}).encode()
        alone = inside.enter_context(apart(operator, LARGE, **engine_variables()))
        ways = {"operator": lambda: alone("calls", 1)[0], "shared memory": lambda: ours.post(PATH, {}, body).whole}
        return medians(list(in_turn(ways, rounds)), digits=9)


def protocol(args: Args) -> dict[str, Any]:
    os.environ["FLASHPOINT_SHARED_MEMORY_BYTES"] = str(256 * MIB)
    taken: dict[str, float] = {}
    with service() as (_, port, _), contextlib.closing(Connection(port)) as ours:
        for name in SHAPES:
            taken |= encodings(ours, name, args.rounds, args.calls)
        taken |= moves_nothing(ours, args.rounds)
    pairs = {f"{n}: protocol / safetensors": (f"{n}, protocol", f"{n}, safetensors") for n in SHAPES}
    pairs["shared memory / operator"] = ("shared memory", "operator")
    microseconds = {name: round(taken[name] * 1e6) for pair in pairs.values() for name in reversed(pair)}
    targets = [target(what, taken[first] / taken[second], "time", most=1.1) for what, (first, second) in pairs.items()]
    return {
        "rounds": args.rounds, "calls": args.calls, "shapes": {**SHAPES, "shared memory": LARGE}, "targets": targets,
        "median_microseconds": microseconds,
    }  # fmt: skip


def message(tensors: Tensors) -> Any:
    """Return the request as a gRPC message."""
    made = protos.message("inference.ModelInferRequest")(model_name="attention")
    for name, t in tensors.items():
        made.inputs.add(name=name, datatype=DATATYPES[t.dtype.name], shape=t.shape)
        made.raw_input_contents.append(t.tobytes())
    return made


def rpc(args: Args) -> dict[str, Any]:
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


@contextlib.contextmanager
def plain_uvicorn() -> Iterator[int]:
    """Run the application on uvicorn with default settings, and yield the port."""
    (port,) = free_ports(1)
    command = [sys.executable, "-P", "-m", "uvicorn", "flashpoint_server.app:create_app", "--factory", f"--port={port}"]
    cpu = {"FLASHPOINT_DEVICE": "cpu"}
    with serving.process([*command, "--no-access-log"], cpu, stderr=subprocess.DEVNULL) as child:
        serving.until(lambda: serving.ready(port), child)
        yield port


def ray(args: Args) -> dict[str, Any]:
    sys.path.append(str(ROOT))  # for tests.support, whose functions start Ray
    from tests.support.ray_cluster import deploy

    os.environ.pop("TRITON_INTERPRET", None)  # the tests set this variable; this benchmark interprets no kernel
    milliseconds: dict[str, dict[str, float]] = {}
    with contextlib.ExitStack() as inside:
        ports = [
            inside.enter_context(service())[1],
            inside.enter_context(plain_uvicorn()),
            *(inside.enter_context(deploy(haproxy=h, environment=MALLOC)).port for h in (False, True)),
        ]
        opened = [inside.enter_context(contextlib.closing(Connection(port))) for port in ports]
        for direction in ("in", "out"):
            for size, nbytes in RAY_SIZES.items():
                calls = args.calls if nbytes <= MIB else max(1, args.calls // 10)
                message = SAFETENSORS.whole(exchanges(nbytes)[direction])
                ways = {
                    way: lambda at=connection, sent=message: at.post("/attention", *sent).whole * 1e3
                    for way, connection in zip(RAY_WAYS, opened, strict=True)
                }
                rounds = list(in_turn(ways, args.rounds * calls, warm=calls))
                milliseconds[f"{direction}, {size}"] = medians(rounds, digits=2)
    return {"rounds": args.rounds, "calls": args.calls, "median_milliseconds": milliseconds}


if __name__ == "__main__":
    rounds, calls = option(15, "rounds of each comparison"), option(60, "small calls of each way in a round")
    ray_calls = option(20, "calls of a round up to 1 MiB; a tenth of that above")
    run_named(
        protocol=partial(run, protocol, rounds=rounds, calls=calls),
        rpc=partial(run, rpc, packages=(*SERVICE, "grpcio"), rounds=option(10, "rounds of all sizes")),
        ray=partial(run, ray, packages=(*SERVICE, "ray"), rounds=option(9), calls=ray_calls),
    )
