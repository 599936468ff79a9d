"""Time decoding over caches that the service holds, beside torch's operator and beside the service without caches.

`python benchmarks/decode.py`. Each of eight callers decodes over its own cache: at first 4,096 keys, 8 heads, D 64,
float32. Each call brings q, k and v of one token, attends, and makes the cache one token longer. A separate process
sends the requests over eight connections in a closed loop (load.py); threads with the SDK do the same. Each round also
times: torch's operator over as many keys in a process; eight callers that send all keys and values with each call; one
request for all eight caches; and bare uvicorn that echoes as many bytes. The operator is timed at the start and end of
each round; if a time deviates from the median, the round does not count. At the end, the benchmark measures the memory
of 64 forks without writes. Medians, and ratios within a round, go to benchmarks/results/cached-decode-<cpu>.json. Takes
two minutes. Exits with 1 if a target is missed.

`python benchmarks/decode.py forks` times calls over forks of one cache, which read their common keys once, with one
query for each fork. Each round times, in turn:

    one request     with q alone: 16 and 64 forks of a cache of 16,384 keys, beside as many queries over that cache;
                    64 forks of a cache of 4,096 keys, beside 64 separate caches of 4,096 keys
    eight callers   with q, k and v of one token in each call: each with its own fork, beside each with its own cache,
                    at 16,384 and 65,536 keys

Medians of the ratios within a round go to benchmarks/results/forks-<cpu>.json. Takes four minutes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from forms import SAFETENSORS, Message, Request
from load import drive, rate, repeated
from runner import Args, apart, in_turn, medians, option, ratio, run, run_named, seconds, target, undisturbed
from serving import bare_uvicorn, engine_variables, service

import flashpoint

CALLERS, HEADS, KEYS, DIM = 8, 8, 4096, 64
FORKS = 64
OURS, ALL, ECHO = "flashpoint", "one request for all caches", "echo of as many bytes"
SDK, STATELESS = "flashpoint, SDK", "flashpoint without caches"
OPERATOR, APART = "torch's operator, all cores", "torch's operator, a caller a core"
Ways = Mapping[str, Callable[[int], float]]  # functions that make a number of calls and return the tokens per second
FORKED, LONG = 16384, 65536  # keys of the caches that are forked
COUNTS = (16, 64)
APART_KEYS = 4096  # keys of each of 64 caches, which take the memory of one cache with 262,144 keys
Caches = Sequence[flashpoint.Cache]


def draw(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def message(batch: int = 1, keys: int = 1, **options: Any) -> Message:
    """Return a request with q of one token for each sequence, and with k and v of `keys` tokens."""
    tensors = {"q": draw(batch, HEADS, 1, DIM), **dict.fromkeys("kv", draw(batch, HEADS, keys, DIM))}
    return SAFETENSORS.write(tensors, **options)


def loads(port: int, bare: int, ids: Sequence[str]) -> Ways:
    """Return functions that send requests to the service."""
    requests = [Request.post("/attention", message(caches=[one])) for one in ids]
    all_caches = message(len(ids), caches=list(ids))
    all_keys = Request.post("/attention", message(keys=KEYS))
    return {
        OURS: lambda calls: repeated(port, requests, calls),
        ALL: lambda calls: CALLERS * repeated(port, [Request.post("/attention", all_caches)], calls),
        ECHO: lambda calls: CALLERS * repeated(bare, [Request.post("/echo", all_caches)], calls),
        STATELESS: lambda calls: rate(drive(port, [all_keys] * calls, CALLERS)),
    }


def operates() -> Ways:
    """Return functions that call torch's operator, with as many keys and values as the requests of `loads`."""
    import torch

    q, k, v = (torch.randn(CALLERS, HEADS, count, DIM) for count in (1, KEYS, KEYS))
    attend = torch.nn.functional.scaled_dot_product_attention
    cores = torch.get_num_threads()

    def one(caller: int) -> None:
        rows = slice(caller, caller + 1)
        attend(q[rows], k[rows], v[rows])

    def all_cores(calls: int) -> float:
        torch.set_num_threads(cores)
        began = time.perf_counter()
        for _ in range(calls):
            attend(q, k, v)
        return CALLERS * calls / (time.perf_counter() - began)

    def a_caller_a_core(calls: int) -> float:
        torch.set_num_threads(1)
        with ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            began = time.perf_counter()
            list(pool.map(one, [*range(CALLERS)] * calls))
            return CALLERS * calls / (time.perf_counter() - began)

    return {OPERATOR: all_cores, APART: a_caller_a_core}


def from_threads(caches: Sequence[flashpoint.Cache], calls: int) -> float:
    """Return the tokens per second of callers that use the SDK, each in its own thread."""
    q, k, v = (draw(1, HEADS, 1, DIM) for _ in range(3))

    def decode(cache: flashpoint.Cache) -> None:
        for _ in range(calls):
            cache.attention(q, k, v)

    with ThreadPoolExecutor(len(caches)) as pool:
        began = time.perf_counter()
        list(pool.map(decode, caches))
        return len(caches) * calls / (time.perf_counter() - began)


def memory_of_forks(client: flashpoint.Client, cache: flashpoint.Cache) -> float:
    """Return the memory of a cache and FORKS copies of it, divided by that of the cache alone."""

    def cache_bytes() -> int:
        nbytes: int = client.info()["caches"]["bytes"]
        return nbytes

    cache.refresh()
    others = cache_bytes() - cache.bytes
    copies = client.fork_caches([cache] * FORKS)
    share = (cache_bytes() - others) / cache.bytes
    client.delete_caches(copies)
    return share


def timed(rounds: int, calls: int) -> tuple[list[dict[str, Any]], float]:
    """Return the tokens per second in each round, by way of computing, and `memory_of_forks`."""
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        bare = enter(bare_uvicorn())
        _, port, _ = enter(service())
        client = enter(flashpoint.Client(f"http://127.0.0.1:{port}"))
        caches = filled(client, CALLERS, KEYS)
        forks = memory_of_forks(client, caches[0])
        load = enter(apart(loads, port, bare, ids_of(caches)))
        operator = enter(apart(operates))
        alone = enter(apart(operates, **engine_variables()))

        def cut(way: Callable[..., float], *arguments: Any) -> float:
            """Measure one way of computing, then cut the caches to their first length."""
            rate_of_way = way(*arguments)
            for cache in caches:
                cache.truncate(KEYS)
            return rate_of_way

        ways: dict[str, Callable[[], float]] = {
            OPERATOR: partial(operator, OPERATOR, calls),
            OURS: partial(cut, load, OURS, calls),
            ALL: partial(cut, load, ALL, calls),
            ECHO: partial(load, ECHO, calls),
            SDK: partial(cut, from_threads, caches, calls),
            STATELESS: partial(load, STATELESS, 2 * CALLERS),
            APART: partial(alone, APART, calls),
        }
        every = []
        for each in in_turn(ways, rounds, ends=OPERATOR):
            every.append(each)
            print(f"round {len(every)} of {rounds}: {each}", flush=True)
        return every, forks


def cached_decode(args: Args) -> dict[str, Any] | None:
    every, share = timed(args.rounds, args.calls)
    rounds = undisturbed(every, OPERATOR, args.deviation)
    if not rounds:
        print("not measured: another program used the machine in every round")
        return None
    at_once = median(each[ALL] * (1 / each[ECHO] + 1 / each[OPERATOR]) for each in rounds)
    return {
        "callers": CALLERS, "keys": KEYS, "calls": args.calls,
        "rounds": len(rounds), "thrown_away": len(every) - len(rounds), "tokens_per_second": medians(rounds, digits=1),
        "targets": [
            target("eight callers over the operator", ratio(rounds, OURS, OPERATOR), "times", least=0.55),
            target("eight callers over the service without caches", ratio(rounds, OURS, STATELESS), "times", least=8.0),
            target("one request for eight caches over (echo of its bytes + operator)", at_once, "times", least=0.95),
            target(f"memory of a cache and {FORKS} forks over the cache's", share, "times", most=1.1),
        ],
    }  # fmt: skip


def reading(port: int, queries: int, caches: Caches, calls: int) -> Callable[[], float]:
    """Return a function that times requests with `queries` queries over each cache, and returns the fastest time."""
    q = draw(len(caches), HEADS, queries, DIM)
    request = Request.post("/attention", SAFETENSORS.write({"q": q}, caches=ids_of(caches)))
    return lambda: min(seconds(lambda: drive(port, [request], 1)) for _ in range(calls))


def decoding(port: int, caches: Caches, keys: int, calls: int) -> Callable[[], float]:
    """Return a function: the tokens per second of one caller for each cache. It then cuts the caches to `keys` keys."""
    requests = [Request.post("/attention", message(caches=[cache_id])) for cache_id in ids_of(caches)]

    def tokens_per_second() -> float:
        a_second = repeated(port, requests, calls)
        for cache in caches:
            cache.truncate(keys)
        return a_second

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
        root, forks = forked(client, FORKED, count)
        name = f"{count} forks of {FORKED} keys beside as many rows over one cache"
        yield name, reading(port, 1, forks, calls), reading(port, count, [root], calls), {"most": 1.15}
        client.delete_caches([root, *forks])
    separate, (root, forks) = filled(client, COUNTS[-1], APART_KEYS), forked(client, APART_KEYS, COUNTS[-1])
    name = f"{COUNTS[-1]} caches of {APART_KEYS} keys beside as many forks"
    yield name, reading(port, 1, separate, calls), reading(port, 1, forks, calls), {"least": 4.0}
    client.delete_caches([root, *forks, *separate])
    for keys, least in ((FORKED, 2.0), (LONG, 2.5)):
        separate, (root, forks) = filled(client, CALLERS, keys), forked(client, keys, CALLERS)
        name = f"tokens of {CALLERS} callers, forks of {keys} keys beside caches apart"
        yield name, decoding(port, forks, keys, calls), decoding(port, separate, keys, calls), {"least": least}
        client.delete_caches([root, *forks, *separate])


def forks(args: Args) -> dict[str, Any]:
    targets = []
    with service() as (_, port, _), flashpoint.Client(f"http://127.0.0.1:{port}") as client:
        for name, first, second, bound in compared(client, port, args.calls):
            rounds = list(in_turn({"first": first, "second": second}, args.rounds))
            ratios = [each["first"] / each["second"] for each in rounds]
            row = target(name, median(ratios), "times", **bound)
            targets.append(row | {"rounds": [round(each, 3) for each in ratios]})
            print(targets[-1], flush=True)
    return {"heads": HEADS, "head_dim": DIM, "calls": args.calls, "targets": targets}


if __name__ == "__main__":
    deviation = option(0.15, "largest deviation of the operator from its median in a round that counts")
    run_named(
        cached_decode=partial(
            run,
            cached_decode,
            rounds=option(12),
            calls=option(60, "calls of each caller in a round"),
            deviation=deviation,
        ),
        forks=partial(run, forks, rounds=option(9), calls=option(20, "calls of each way in a round")),
    )
