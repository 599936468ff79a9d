"""Time calls over forks of one cache, which read their common keys once: `python benchmarks/forks.py`, four minutes.

8 heads, D 64, float32, one query for each fork. Each round times, in turn:

    one request     with q alone: 16 and 64 forks of a cache of 16,384 keys, beside as many queries over that cache;
                    64 forks of a cache of 4,096 keys, beside 64 separate caches of 4,096 keys
    eight callers   with q, k and v of one token in each call: each with its own fork, beside each with its own cache,
                    at 16,384 and 65,536 keys

Medians of the ratios within a round go to benchmarks/results/forks-<cpu>.json. Exits with 1 if a target is missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

from decode import CALLERS, DIM, HEADS, draw, message
from forms import SAFETENSORS, Request
from load import drive, repeated
from runner import Args, Option, in_turn, run, seconds, target
from serving import service

import flashpoint

KEYS, LONG = 16384, 65536
COUNTS = (16, 64)
APART_KEYS = 4096  # keys of each of 64 caches, which take the memory of one cache with 262,144 keys
Caches = Sequence[flashpoint.Cache]


def reading(port: int, queries: int, caches: Caches, calls: int) -> Callable[[], float]:
    """Return a function that times requests with `queries` queries over each cache, and returns the fastest time."""
    q = draw(len(caches), HEADS, queries, DIM)
    request = Request.post("/attention", SAFETENSORS.write({"q": q}, caches=ids_of(caches)))
    return lambda: min(seconds(lambda: drive(port, [request], 1)) for _ in range(calls))


def decoding(port: int, caches: Caches, keys: int, calls: int) -> Callable[[], float]:
    """Return a function: the tokens per second of one caller for each cache. It then cuts the caches to `keys` keys."""
    requests = [Request.post("/attention", message(caches=[cache_id])) for cache_id in ids_of(caches)]

    def tokens_per_second() -> float:
        rate = repeated(port, requests, calls)
        for cache in caches:
            cache.truncate(keys)
        return rate

    return tokens_per_second


def filled(client: flashpoint.Client, count: int, keys: int) -> Caches:
    caches = client.caches(count, kv_heads=HEADS, head_dim=DIM)
    for cache in caches:
        cache.append(draw(1, HEADS, keys, DIM), draw(1, HEADS, keys, DIM))
    return caches


def forked(client: flashpoint.Client, keys: int, count: int) -> tuple[flashpoint.Cache, Caches]:
    (root,) = filled(client, 1, keys)
    return root, client.fork_caches([root] * count)


def ids_of(caches: Caches) -> list[str]:
    return [cache.id for cache in caches]


def compared(client: flashpoint.Client, port: int, calls: int) -> Iterator[tuple[str, Any, Any, dict[str, float]]]:
    """Yield each comparison: its name, two functions, and a bound of the ratio of their values, first to second."""
    for count in COUNTS:
        root, forks = forked(client, KEYS, count)
        name = f"{count} forks of {KEYS} keys beside as many rows over one cache"
        yield name, reading(port, 1, forks, calls), reading(port, count, [root], calls), {"most": 1.15}
        client.delete_caches([root, *forks])
    apart, (root, forks) = filled(client, COUNTS[-1], APART_KEYS), forked(client, APART_KEYS, COUNTS[-1])
    name = f"{COUNTS[-1]} caches of {APART_KEYS} keys beside as many forks"
    yield name, reading(port, 1, apart, calls), reading(port, 1, forks, calls), {"least": 4.0}
    client.delete_caches([root, *forks, *apart])
    for keys, least in ((KEYS, 2.0), (LONG, 2.5)):
        apart, (root, forks) = filled(client, CALLERS, keys), forked(client, keys, CALLERS)
        name = f"tokens of {CALLERS} callers, forks of {keys} keys beside caches apart"
        yield name, decoding(port, forks, keys, calls), decoding(port, apart, keys, calls), {"least": least}
        client.delete_caches([root, *forks, *apart])


def measure(args: Args) -> dict[str, Any]:
    targets = []
    with service() as (_, port, _), flashpoint.Client(f"http://127.0.0.1:{port}") as client:
        for name, first, second, bound in compared(client, port, args.calls):
            rounds = list(in_turn({"first": first, "second": second}, args.rounds))
            ratios = [each["first"] / each["second"] for each in rounds]
            row = target(name, median(ratios), "times", **bound)
            targets.append(row | {"rounds": [round(ratio, 3) for ratio in ratios]})
            print(targets[-1], flush=True)
    return {"heads": HEADS, "head_dim": DIM, "calls": args.calls, "targets": targets}


if __name__ == "__main__":
    run(measure, "forks", rounds=Option(9), calls=Option(20, "calls of each way in a round"))
