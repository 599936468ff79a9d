"""Compare the capacity calculator's predictions with measured times.

Starts `flashpoint serve`. Each round measures the rates with `flashpoint.capacity.measure`, then times calls of other
shapes, with one caller and with four: forwards, gradients, decoding, grouped heads and batches. The result is the
median over the rounds of measured time / predicted time. Client, server and device share this machine's cores
(`shared`).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

import numpy as np
from runner import Args, medians, option, rate_of, run, seconds
from serving import service

import flashpoint
from flashpoint import capacity
from flashpoint_contract.schemas.shapes import Shape

CALLERS = 4
# `capacity.measure` times other shapes, so that no prediction is compared with a time that it was made from.
CASES: dict[str, tuple[dict[str, int], capacity.Side, bool]] = {
    "small": ({"q_heads": 8, "q_len": 128, "head_dim": 64}, "forward", False),
    "512": ({"q_heads": 8, "q_len": 512, "head_dim": 64}, "forward", False),
    "2048": ({"q_heads": 8, "q_len": 2048, "head_dim": 64}, "forward", False),
    "2048, causal": ({"q_heads": 8, "q_len": 2048, "head_dim": 64}, "forward", True),
    "a batch of 16": ({"batch": 16, "q_heads": 8, "q_len": 256, "head_dim": 64}, "forward", False),
    "grouped heads": ({"q_heads": 8, "kv_heads": 2, "q_len": 1024, "head_dim": 64}, "forward", False),
    "wide heads": ({"q_heads": 4, "q_len": 1024, "head_dim": 128}, "forward", False),
    "decode, 8192 keys": ({"q_heads": 8, "q_len": 1, "kv_len": 8192, "head_dim": 64}, "forward", False),
    "decode, 32768 keys": ({"q_heads": 8, "q_len": 1, "kv_len": 32768, "head_dim": 64}, "forward", False),
    "gradient, 512": ({"q_heads": 8, "q_len": 512, "head_dim": 64}, "backward", False),
    "gradient, 2048": ({"q_heads": 8, "q_len": 2048, "head_dim": 64}, "backward", False),
    "gradient, 2048, causal": ({"q_heads": 8, "q_len": 2048, "head_dim": 64}, "backward", True),
}


def call(client: flashpoint.Client, shape: Shape, side: capacity.Side, causal: bool) -> Any:
    """Return a function that sends one request: attention of `shape`, or its gradients if `side` is "backward"."""
    rng = np.random.default_rng(0)

    def normal(heads: int, length: int, dim: int) -> Any:
        return rng.standard_normal((shape.batch, heads, length, dim), dtype=np.float32)

    q, do = normal(shape.q_heads, shape.q_len, shape.head_dim), normal(shape.q_heads, shape.q_len, shape.value_dim)
    k, v = normal(shape.kv_heads, shape.kv_len, shape.head_dim), normal(shape.kv_heads, shape.kv_len, shape.value_dim)
    if side == "forward":
        return lambda: client.attention(q, k, v, causal=causal)
    o, lse = client.attention(q, k, v, causal=causal, return_lse=True)
    return lambda: client.attention_grad(do, q, k, v, o=o, lse=lse, causal=causal)


def compare(client: flashpoint.Client, rounds: int, calls: int) -> dict[str, Any]:
    ways = {name: (Shape(**sizes), side, causal) for name, (sizes, side, causal) in CASES.items()}
    functions = {name: call(client, *way) for name, way in ways.items()}
    rates: list[dict[str, float]] = []
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
    for _ in range(rounds):
        rates_now = capacity.measure(client, shared=True)
        rates.append(dataclasses.asdict(rates_now))
        for name, (shape, side, causal) in ways.items():
            predicted = capacity.predict(capacity.need(shape, side=side, causal=causal), rates_now)
            functions[name]()
            took = statistics.median(seconds(functions[name]) for _ in range(calls))
            a_second = rate_of(lambda function: function(), [functions[name]] * CALLERS * max(1, calls // 2), CALLERS)
            rows[name].append({
                "predicted_ms": predicted.seconds * 1e3, "measured_ms": took * 1e3, "ratio": took / predicted.seconds,
                "predicted_rps": predicted.requests_per_second, "measured_rps": a_second,
                "rps_ratio": a_second / predicted.requests_per_second,
            })  # fmt: skip
    middle = {name: statistics.median(each[name] for each in rates) for name in rates[0]}
    return {
        "rates": {name: value if math.isfinite(value) else None for name, value in middle.items() if name != "shared"},
        "cases": [{"case": name, **medians(samples)} for name, samples in rows.items()],
    }


def measure(args: Args) -> dict[str, Any]:
    with service() as (_, port, _), flashpoint.Client(f"http://127.0.0.1:{port}") as client:
        result = compare(client, args.rounds, args.calls)
    return {"rounds": args.rounds, "calls": args.calls, "callers": CALLERS, **result}


if __name__ == "__main__":
    run(measure, "capacity", rounds=option(9), calls=option(5, "of each case in a round"))
