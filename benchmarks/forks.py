"""Time calls over forks of one cache, which read their common keys once: `python benchmarks/forks.py`, four minutes.

8 heads, D 64, float32, one query for each fork. Each round times, in turn:

    one request     with q alone: 16 and 64 forks of a cache of 16,384 keys, beside as many queries over that cache;
                    64 forks of a cache of 4,096 keys, beside 64 separate caches of 4,096 keys
    eight callers   with q, k and v of one token in each call: each with its own fork, beside each with its own cache,
                    at 16,384 and 65,536 keys

Medians of the ratios within a round go to benchmarks/results/forks-<cpu>.json. Exits with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from decode import CALLERS, DIM, HEADS, draw, message, post
from load import drive, repeated
from runner import Option, run, target
from serving import service

import flashpoint
from flashpoint_contract import wire

KEYS, LONG = 16384, 65536
COUNTS = (16, 64)
APART_KEYS = 4096  # keys of each of 64 caches, which take the memory of one cache with 262,144 keys
Way = Callable[[int], float]


def reading(port: int, queries: int, ids: list[str]) -> Way:
    """Return a function: the milliseconds of the fastest of some requests with `queries` queries over each cache."""
    q = draw(len(ids), HEADS, queries, DIM)
    body = wire.build_head([("q", "float32", q.shape)], wire.encode_options({"caches": ids})) + q.tobytes()
    request = post("/attention", body)

    def calls(count: int) -> float:
        milliseconds = []
        for _ in range(count):
            began = time.perf_counter()
            drive(port, [request], 1)
            milliseconds.append(1000 * (time.perf_counter() - began))
        return min(milliseconds)

    return calls


def decoding(port: int, ids: list[str]) -> Way:
    """Return a function: the tokens per second of callers, one for each cache."""
    requests = [post("/attention", message(caches=[cache_id])) for cache_id in ids]
    return lambda calls: repeated(port, requests, calls)


def filled(client: flashpoint.Client, count: int, keys: int) -> list[flashpoint.Cache]:
    caches = list(client.caches(count, kv_heads=HEADS, head_dim=DIM))
    for cache in caches:
        cache.append(draw(1, HEADS, keys, DIM), draw(1, HEADS, keys, DIM))
    return caches


def forked(client: flashpoint.Client, keys: int, count: int) -> tuple[flashpoint.Cache, list[flashpoint.Cache]]:
    (root,) = filled(client, 1, keys)
    return root, list(client.fork_caches([root] * count))


def ids_of(caches: list[flashpoint.Cache]) -> list[str]:
    return [cache.id for cache in caches]


def cut(caches: list[flashpoint.Cache], keys: int) -> None:
    for cache in caches:
        cache.truncate(keys)


def rounds_of(ways: Mapping[str, Way], rounds: int, calls: int, after: Callable[[], None]) -> list[dict[str, float]]:
    """Return each way's measurement in each round; the first round does not count. Call `after` after each way."""
    results = []
    for number in range(-1, rounds):
        names = list(ways)
        turn = number % len(names)
        values = {}
        for name in names[turn:] + names[:turn]:
            values[name] = ways[name](calls)
            after()
        if number >= 0:
            results.append(values)
            print({name: round(value, 2) for name, value in values.items()}, flush=True)
    return results


def ratios(client: flashpoint.Client, port: int, rounds: int, calls: int) -> Iterator[tuple[str, list[float], Any]]:
    for count in COUNTS:
        root, forks = forked(client, KEYS, count)
        ways = {"forks": reading(port, 1, ids_of(forks)), "rows": reading(port, count, [root.id])}
        results = rounds_of(ways, rounds, calls, lambda: None)
        name = f"{count} forks of {KEYS} keys beside as many rows over one cache"
        yield name, [values["forks"] / values["rows"] for values in results], {"most": 1.15}
        client.delete_caches([root, *forks])
    apart, (root, forks) = filled(client, COUNTS[-1], APART_KEYS), forked(client, APART_KEYS, COUNTS[-1])
    ways = {"forks": reading(port, 1, ids_of(forks)), "apart": reading(port, 1, ids_of(apart))}
    results = rounds_of(ways, rounds, calls, lambda: None)
    name = f"{COUNTS[-1]} caches of {APART_KEYS} keys beside as many forks"
    yield name, [values["apart"] / values["forks"] for values in results], {"least": 4.0}
    client.delete_caches([root, *forks, *apart])
    for keys, target_ratio in ((KEYS, 2.0), (LONG, 2.5)):
        apart, (root, forks) = filled(client, CALLERS, keys), forked(client, keys, CALLERS)

        ways = {"forks": decoding(port, ids_of(forks)), "apart": decoding(port, ids_of(apart))}
        results = rounds_of(ways, rounds, calls, partial(cut, [*apart, *forks], keys))
        name = f"tokens of {CALLERS} callers, forks of {keys} keys beside caches apart"
        yield name, [values["forks"] / values["apart"] for values in results], {"least": target_ratio}
        client.delete_caches([root, *forks, *apart])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with service() as (_, port, _), flashpoint.Client(f"http://127.0.0.1:{port}") as client:
        targets = []
        for name, values, bound in ratios(client, port, args.rounds, args.calls):
            row = target(name, statistics.median(values), "times", **bound)
            targets.append(row | {"rounds": [round(ratio, 3) for ratio in values]})
            print(targets[-1], flush=True)
    return {"heads": HEADS, "head_dim": DIM, "calls": args.calls, "targets": targets}


if __name__ == "__main__":
    run(measure, "forks", rounds=Option(9), calls=Option(20, "calls of each way in a round"))
