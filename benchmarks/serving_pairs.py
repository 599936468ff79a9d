"""Compare the service with that of another commit: `python benchmarks/serving_pairs.py --beside CHECKOUT`.

Each pair starts both services with their defaults, sends them the same calls in turns over one connection each, and
ends them. A row has the median over the pairs of this commit's time divided by the other's, and its 95% interval. The
other checkout needs compiled kernels: `python kernels/flashpoint_kernels/native/build.py`, run there.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
from forms import SAFETENSORS
from record import commit
from runner import ROOT, SERVICE, Args, in_turn, option, run, target
from serving import BIG, Connection, exchanges, service

PACKAGES = ("contract", "client", "kernels", "server")
SLOWER = 1.03  # largest ratio that the lower end of an interval may have
Message = tuple[str, Mapping[str, str], bytes]


def messages() -> dict[str, Message]:
    """Return the path, the headers and the body of each call, by name."""
    rng = np.random.default_rng(0)

    def tensors(names: str, *shape: int) -> dict[str, Any]:
        return {"do" if name == "d" else name: rng.standard_normal(shape, np.float32) for name in names}

    row = tensors("qkv", 1, 8, 1, 64)
    small, text = tensors("qkv", 1, 8, 128, 64), tensors("qkv", 1, 2, 32, 16)
    body = json.dumps({name: t.tolist() for name, t in text.items()}).encode()
    return {
        "one row": ("/attention", *SAFETENSORS.whole(row)),
        "small call": ("/attention", *SAFETENSORS.whole(small)),
        "small call, causal, with sinks and lse": (
            "/attention",
            *SAFETENSORS.whole({**small, "sinks": np.ones(8, np.float32)}, causal=True, return_lse=True),
        ),
        "small gradient": ("/attention/grad", *SAFETENSORS.whole(tensors("dqkv", 1, 8, 128, 64))),
        "1,024 keys": ("/attention", *SAFETENSORS.whole(tensors("qkv", 1, 8, 1024, 64), causal=True)),
        "JSON": ("/attention", {"Content-Type": "application/json"}, body),
        "64 MiB in": ("/attention", *SAFETENSORS.whole(exchanges(BIG)["in"])),
        "64 MiB out": ("/attention", *SAFETENSORS.whole(exchanges(BIG)["out"])),
    }


def decoding(connection: Connection) -> Message:
    """Fill a cache with 1,024 tokens, and return a call that attends over it with one query."""
    made = {"layers": 1, "kv_heads": 8, "head_dim": 64}
    connection.request("POST", "/caches", json.dumps(made), {"Content-Type": "application/json"})
    (cache,) = json.load(connection.getresponse())["caches"]
    filled = np.ones((1, 8, 1024, 64), np.float32)
    connection.post("/attention", *SAFETENSORS.whole(dict.fromkeys("qkv", filled), caches=[cache["id"]]))
    return "/attention", *SAFETENSORS.whole({"q": filled[:, :, :1]}, caches=[cache["id"]])


def timed(connection: Connection, message: Message, seconds: float) -> float:
    """Return the median seconds of as many calls as fill `seconds`, at least one."""
    taken = [connection.post(*message).whole]
    while sum(taken) < seconds:
        taken.append(connection.post(*message).whole)
    return median(taken)


@contextlib.contextmanager
def of_checkout(tree: Path) -> Any:
    """Run the service of a checkout, and yield a connection to it."""
    path = os.pathsep.join(str(tree / name) for name in PACKAGES)
    with (
        mock.patch.dict(os.environ, PYTHONPATH=path),
        service() as (_, port, _taken),
        contextlib.closing(Connection(port)) as connection,
    ):
        yield connection


def one_pair(trees: Mapping[str, Path], rounds: int, seconds: float) -> dict[str, float]:
    """Return this commit's time divided by the other's, by the name of the call."""
    calls = messages()
    ratios = {}
    with contextlib.ExitStack() as stack:
        sides = {side: stack.enter_context(of_checkout(tree)) for side, tree in trees.items()}
        own = {side: decoding(connection) for side, connection in sides.items()}
        for name in [*calls, "decode over a cache"]:
            ways: dict[str, Callable[[], float]] = {
                side: partial(timed, connection, calls.get(name, own[side]), seconds)
                for side, connection in sides.items()
            }
            times = list(in_turn(ways, rounds))
            ratios[name] = median(each["ours"] / each["beside"] for each in times)
    return ratios


def interval(values: list[float], draws: int = 10_000) -> tuple[float, float]:
    """Return the 95% interval of the median, by the bootstrap (Efron 1979)."""
    rng = random.Random(0)
    medians = sorted(median(rng.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def measure(args: Args) -> dict[str, Any]:
    trees = {"ours": ROOT, "beside": args.beside.resolve()}
    pairs = []
    for number in range(args.pairs):
        order = dict(sorted(trees.items(), reverse=bool(number % 2)))
        pairs.append(one_pair(order, args.rounds, args.seconds))
        print(f"pair {number + 1} of {args.pairs}: { {name: round(value, 3) for name, value in pairs[-1].items()} }")
    rows = []
    for name in pairs[0]:
        values = [each[name] for each in pairs]
        low, high = interval(values)
        rows.append({"call": name, "ratio": round(median(values), 3), "low": round(low, 3), "high": round(high, 3)})
    slowest = max(rows, key=lambda row: row["low"])
    return {
        "environment": {"beside": commit(args.beside)}, "pairs": args.pairs, "rounds": args.rounds, "rows": rows,
        "targets": [target(f"{slowest['call']}, lower end", slowest["low"], "of the time", most=SLOWER)],
    }  # fmt: skip


if __name__ == "__main__":
    run(
        measure,
        "pairs",
        packages=SERVICE,
        beside=option(None, "a checkout of another commit", type=Path),
        pairs=option(9, "pairs of services"),
        rounds=option(7, "rounds of each call in a pair"),
        seconds=option(0.1, "of calls in a round"),
    )
