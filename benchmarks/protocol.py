"""Time the Open Inference Protocol beside safetensors and the operator alone: `python benchmarks/protocol.py`.

The same requests go to `flashpoint serve` in both encodings over one connection; a large one, with its tensors in
shared memory, stands beside the operator in a process without HTTP. Each round times every way in turn; the medians,
and what they were to reach, go to benchmarks/results/protocol-<device>.json. Takes about a minute. Exits with 1 where
a target is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
from record import write
from serving import (
    MIB,
    OPERATOR,
    ROOT,
    SMALL,
    Connection,
    Measured,
    environment,
    environment_of_the_engine,
    message,
    process,
    service,
    target,
)

from flashpoint_server.oip.datatypes import DATATYPE_OF

SHAPES = {"small": SMALL, "16 MiB": (1, 16, 1024, 256)}  # of each of q, k and v
LARGE = (8, 16, 1024, 64)  # 32 MiB each
PATH = "/v2/models/attention/infer"


def infer(tensors: dict[str, np.ndarray[Any, Any]], **options: Any) -> tuple[bytes, dict[str, str]]:
    """Return a request in bytes, and its header fields."""
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
    """Both, call by call in turn, each first as often as second. The first round does not count."""
    ways = ["safetensors", "protocol"]
    for name, shape in SHAPES.items():
        t = np.random.default_rng(0).random(shape, np.float32)
        tensors = {"q": t[:, :, :1] if name != "small" else t, "k": t, "v": t}  # a large one is there to be carried
        (body, fields), other = infer(tensors), message(tensors)
        for counts in range(rounds + 1):
            for _ in range(calls if name == "small" else 4):
                ways.reverse()
                for way in ways:
                    call = ours.post("/attention", other) if way == "safetensors" else ours.post(PATH, body, **fields)
                    if counts:
                        measured.add(f"{name}, {way}", call.whole)


def moves_nothing(ours: Connection, rounds: int, measured: Measured) -> None:
    """`LARGE` in shared memory, and the operator on memory of its own."""
    nbytes = 4 * int(np.prod(LARGE))
    memory = shared_memory.SharedMemory(create=True, size=4 * nbytes)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
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
        inside.enter_context(environment_of_the_engine())
        operator = inside.enter_context(process([sys.executable, "-c", OPERATOR, json.dumps(LARGE), "cpu"], **pipes))
        assert operator.stdin is not None
        assert operator.stdout is not None
        for counts in range(rounds + 1):
            call = ours.post(PATH, body, accept="*/*").whole
            operator.stdin.write("1\n")
            operator.stdin.flush()
            seconds = json.loads(operator.stdout.readline())
            if counts:
                measured.add("shared memory", call)
                measured.add("operator", *seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--rounds", type=int, default=15, help="of each comparison")
    parser.add_argument("--calls", type=int, default=60, help="small calls of each way in a round")
    asked = parser.parse_args()
    measured = Measured()
    about = environment()
    os.environ["FLASHPOINT_SHARED_MEMORY_BYTES"] = str(256 * MIB)
    with service() as (_, port, _), contextlib.closing(Connection(port)) as ours:
        encodings(ours, asked.rounds, asked.calls, measured)
        moves_nothing(ours, asked.rounds, measured)
    median = measured.median
    ways = [f"{name}, {way}" for name in SHAPES for way in ("safetensors", "protocol")] + ["shared memory", "operator"]
    result = {
        "environment": about,
        "rounds": asked.rounds,
        "calls": asked.calls,
        "shapes": {**SHAPES, "shared memory": LARGE},
        "targets": [
            *(
                target(
                    f"{n}: protocol / safetensors",
                    median(f"{n}, protocol") / median(f"{n}, safetensors"),
                    "time",
                    most=1.1,
                )
                for n in SHAPES
            ),
            target("shared memory / operator", median("shared memory") / median("operator"), "time", most=1.1),
        ],
        "median_microseconds": {name: round(median(name) * 1e6) for name in ways},
    }
    for row in result["targets"]:
        print(f"{row['what']:<40} {row['value']:>7} at most {row['at_most']} {'met' if row['met'] else 'MISSED'}")
    print(result["median_microseconds"])
    write(asked.out, "protocol", result)
    return 0 if all(row["met"] for row in result["targets"]) else 1


if __name__ == "__main__":
    sys.exit(main())
