"""Time the Open Inference Protocol beside safetensors and the operator alone: `python benchmarks/protocol.py`.

The same requests go to `flashpoint serve` in both encodings over one connection. A large request with its tensors in
shared memory is compared with the operator in a process without HTTP. Each round times every way in turn. The medians
and their targets go to benchmarks/results/protocol-<device>.json. Takes about a minute. Exits with 1 if a target is
missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from multiprocessing import shared_memory
from typing import Any

import numpy as np
from runner import Measured, Option, run, target
from serving import MIB, SMALL, Connection, message, operator, service

from flashpoint_server.oip.datatypes import DATATYPE_OF

SHAPES = {"small": SMALL, "16 MiB": (1, 16, 1024, 256)}  # of each of q, k and v
LARGE = (8, 16, 1024, 64)  # 32 MiB each
PATH = "/v2/models/attention/infer"


def infer(tensors: dict[str, np.ndarray[Any, Any]], **options: Any) -> tuple[bytes, dict[str, str]]:
    """Return the body of a request, and its header fields."""
    inputs = [
        {
            "name": name,
            "shape": t.shape,
            "datatype": DATATYPE_OF[t.dtype.name],
            "parameters": {"binary_data_size": t.nbytes},
        }
        for name, t in tensors.items()
    ]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True, **options}}).encode()
    return head + b"".join(t.tobytes() for t in tensors.values()), {"inference_header_content_length": str(len(head))}


def encodings(ours: Connection, rounds: int, calls: int, measured: Measured) -> None:
    """Time both encodings in alternating order, call by call. The first round does not count."""
    ways = ["safetensors", "protocol"]
    for name, shape in SHAPES.items():
        t = np.random.default_rng(0).random(shape, np.float32)
        tensors = {"q": t[:, :, :1] if name != "small" else t, "k": t, "v": t}  # large ones: transfer, little work
        (body, fields), other = infer(tensors), message(tensors)
        for counts in range(rounds + 1):
            for _ in range(calls if name == "small" else 4):
                ways.reverse()
                for way in ways:
                    call = ours.post("/attention", other) if way == "safetensors" else ours.post(PATH, body, **fields)
                    if counts:
                        measured.add(f"{name}, {way}", call.whole)


def moves_nothing(ours: Connection, rounds: int, measured: Measured) -> None:
    """Time `LARGE` in shared memory, and the operator in its own process."""
    nbytes = 4 * int(np.prod(LARGE))
    memory = shared_memory.SharedMemory(create=True, size=4 * nbytes)
    with contextlib.ExitStack() as inside:
        inside.callback(memory.unlink)
        inside.callback(memory.close)
        for i in range(3):
            t = np.random.default_rng(i).random(LARGE, np.float32)
            memory.buf[i * nbytes : (i + 1) * nbytes] = t.tobytes()
        region = {"key": memory.name, "offset": 0, "byte_size": 4 * nbytes}
        ours.post("/v2/systemsharedmemory/region/large/register", json.dumps(region).encode(), accept="*/*")

        def place(i: int) -> dict[str, Any]:
            where = {"shared_memory_region": "large", "shared_memory_byte_size": nbytes}
            return {"parameters": {**where, "shared_memory_offset": i * nbytes}}

        inputs = [{"name": n, "shape": LARGE, "datatype": "FP32", **place(i)} for i, n in enumerate("qkv")]
        body = json.dumps({"inputs": inputs, "outputs": [{"name": "o", **place(3)}]}).encode()
        alone = inside.enter_context(operator(LARGE))
        for counts in range(rounds + 1):
            call, seconds = ours.post(PATH, body, accept="*/*").whole, alone(1)
            if counts:
                measured.add("shared memory", call)
                measured.add("operator", *seconds)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    measured = Measured()
    os.environ["FLASHPOINT_SHARED_MEMORY_BYTES"] = str(256 * MIB)
    with service() as (_, port, _), contextlib.closing(Connection(port)) as ours:
        encodings(ours, args.rounds, args.calls, measured)
        moves_nothing(ours, args.rounds, measured)
    pairs = {f"{n}: protocol / safetensors": (f"{n}, protocol", f"{n}, safetensors") for n in SHAPES}
    pairs["shared memory / operator"] = ("shared memory", "operator")
    microseconds = {name: round(measured.median(name) * 1e6) for pair in pairs.values() for name in reversed(pair)}
    print(microseconds)
    return {
        "rounds": args.rounds,
        "calls": args.calls,
        "shapes": {**SHAPES, "shared memory": LARGE},
        "targets": [
            target(what, measured.median(first) / measured.median(second), "time", most=1.1)
            for what, (first, second) in pairs.items()
        ],
        "median_microseconds": microseconds,
    }


if __name__ == "__main__":
    calls = Option(60, "small calls of each way in a round")
    run(measure, "protocol", rounds=Option(15, "rounds of each comparison"), calls=calls)
