"""Time calls over forks of one cache, which read their common keys once: `python benchmarks/forks.py`, four minutes.

8 heads, D 64, float32, one query for each fork; requests bring q alone. In turn, each round:

    one request     16 and 64 forks of a cache of 16,384 keys, beside as many queries over that cache itself, and beside
                    as many caches of 4,096 keys with forks of such a cache
    eight callers   each with a fork of its own, beside each with a cache of its own, at 16,384 and 65,536 keys: each
                    call brings q, k and v of one token

Medians of the ratios within a round go to benchmarks/results/forks-<cpu>.json. Exits with 1 where a target is missed.
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
APART_KEYS = 4096  # of each of 64 caches, whose memory is that of one with 262,144 keys
Way = Callable[[int], float]


def reading(port: int, queries: int, ids: list[str]) -> Way:
    """Return the milliseconds of a request of `queries` queries over each cache, the fastest of some calls."""
    q = draw(len(ids), HEADS, queries, DIM)
    body = wire.build_head([("q", "float32", q.shape)], wire.encode_options({"caches": ids})) + q.tobytes()
    request = post("/attention", body)

    def calls(count: int) -> float:
        taken = []
        for _ in range(count):
            began = time.perf_counter()
            drive(port, [request], 1)
            taken.append(1000 * (time.perf_counter() - began))
        return min(taken)

    return calls


def decoding(port: int, ids: list[str]) -> Way:
    """Return the tokens a second of callers with a cache each."""
    steps = [post("/attention", message(caches=[one])) for one in ids]
    return lambda calls: repeated(port, steps, calls)


def filled(client: flashpoint.Client, count: int, keys: int) -> list[flashpoint.Cache]:
    made = list(client.caches(count, kv_heads=HEADS, head_dim=DIM))
    for cache in made:
        cache.append(draw(1, HEADS, keys, DIM), draw(1, HEADS, keys, DIM))
    return made


def forked(client: flashpoint.Client, keys: int, count: int) -> tuple[flashpoint.Cache, list[flashpoint.Cache]]:
    (root,) = filled(client, 1, keys)
    return root, list(client.fork_caches([root] * count))


def ids_of(caches: list[flashpoint.Cache]) -> list[str]:
    return [cache.id for cache in caches]


def cut(caches: list[flashpoint.Cache], keys: int) -> None:
    for cache in caches:
        cache.truncate(keys)


def rounds_of(ways: Mapping[str, Way], rounds: int, calls: int, after: Callable[[], None]) -> list[dict[str, float]]:
    """Return what each way takes in each round; the first round does not count."""
    found = []
    for number in range(-1, rounds):
        names = list(ways)
        turn = number % len(names)
        one = {}
        for name in names[turn:] + names[:turn]:
            one[name] = ways[name](calls)
            after()
        if number >= 0:
            found.append(one)
            print({name: round(value, 2) for name, value in one.items()}, flush=True)
    return found


def ratios(client: flashpoint.Client, port: int, rounds: int, calls: int) -> Iterator[tuple[str, list[float], Any]]:
    for count in COUNTS:
        root, forks = forked(client, KEYS, count)
        ways = {"forks": reading(port, 1, ids_of(forks)), "rows": reading(port, count, [root.id])}
        found = rounds_of(ways, rounds, calls, lambda: None)
        name = f"{count} forks of {KEYS} keys beside as many rows over one cache"
        yield name, [one["forks"] / one["rows"] for one in found], {"most": 1.15}
        client.delete_caches([root, *forks])
    apart, (root, forks) = filled(client, COUNTS[-1], APART_KEYS), forked(client, APART_KEYS, COUNTS[-1])
    ways = {"forks": reading(port, 1, ids_of(forks)), "apart": reading(port, 1, ids_of(apart))}
    found = rounds_of(ways, rounds, calls, lambda: None)
    name = f"{COUNTS[-1]} caches of {APART_KEYS} keys beside as many forks"
    yield name, [one["apart"] / one["forks"] for one in found], {"least": 4.0}
    client.delete_caches([root, *forks, *apart])
    for keys, least in ((KEYS, 2.0), (LONG, 2.5)):
        apart, (root, forks) = filled(client, CALLERS, keys), forked(client, keys, CALLERS)

        ways = {"forks": decoding(port, ids_of(forks)), "apart": decoding(port, ids_of(apart))}
        found = rounds_of(ways, rounds, calls, partial(cut, [*apart, *forks], keys))
        name = f"tokens of {CALLERS} callers, forks of {keys} keys beside caches apart"
        yield name, [one["forks"] / one["apart"] for one in found], {"least": least}
        client.delete_caches([root, *forks, *apart])


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    with service() as (_, port, _), flashpoint.Client(f"http://127.0.0.1:{port}") as client:
        targets = []
        for name, found, bound in ratios(client, port, asked.rounds, asked.calls):
            row = target(name, statistics.median(found), "times", **bound)
            targets.append(row | {"rounds": [round(ratio, 3) for ratio in found]})
            print(targets[-1], flush=True)
    return {"heads": HEADS, "head_dim": DIM, "calls": asked.calls, "targets": targets}


if __name__ == "__main__":
    run(measure, "forks", rounds=Option(9), calls=Option(20, "of each way in a round"))
