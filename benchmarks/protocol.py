"""Time the Open Inference Protocol beside safetensors and the operator alone: `python benchmarks/protocol.py`.

The same requests go to `flashpoint serve` in both encodings over one connection. A large request with its tensors in
shared memory is compared with the operator in a process without HTTP. Each round times every variant once. The medians
and their targets go to benchmarks/results/protocol-<device>.json. Takes about a minute. Exits with 1 if a target is
missed.
"""

from __future__ import annotations

import contextlib
import json
import os
from multiprocessing import shared_memory
from typing import Any

import numpy as np
from forms import DATATYPES, OIP_BINARY, SAFETENSORS
from runner import Args, Option, apart, in_turn, medians, run, target
from serving import MIB, SMALL, Connection, engine_variables, operator, service

SHAPES = {"small": SMALL, "16 MiB": (1, 16, 1024, 256)}  # shape of each of q, k and v
LARGE = (8, 16, 1024, 64)  # 32 MiB each
PATH = "/v2/models/attention/infer"


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
    """Return the median seconds of `LARGE` in shared memory, and of the operator in a separate process."""
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


def measure(args: Args) -> dict[str, Any]:
    os.environ["FLASHPOINT_SHARED_MEMORY_BYTES"] = str(256 * MIB)
    seconds: dict[str, float] = {}
    with service() as (_, port, _), contextlib.closing(Connection(port)) as ours:
        for name in SHAPES:
            seconds |= encodings(ours, name, args.rounds, args.calls)
        seconds |= moves_nothing(ours, args.rounds)
    pairs = {f"{n}: protocol / safetensors": (f"{n}, protocol", f"{n}, safetensors") for n in SHAPES}
    pairs["shared memory / operator"] = ("shared memory", "operator")
    microseconds = {name: round(seconds[name] * 1e6) for pair in pairs.values() for name in reversed(pair)}
    return {
        "rounds": args.rounds,
        "calls": args.calls,
        "shapes": {**SHAPES, "shared memory": LARGE},
        "targets": [
            target(what, seconds[first] / seconds[second], "time", most=1.1) for what, (first, second) in pairs.items()
        ],
        "median_microseconds": microseconds,
    }


if __name__ == "__main__":
    calls = Option(60, "small calls of each way in a round")
    run(measure, "protocol", rounds=Option(15, "rounds of each comparison"), calls=calls)
