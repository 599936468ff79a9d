"""Time decoding over caches that the service holds: `python benchmarks/decode.py [forks|sharded-cache]`.

By default, each of eight callers decodes over its own cache: at first 4,096 keys, 8 heads, D 64, float32. Each call
brings q, k and v of one token, attends, and makes the cache one token longer. A separate process sends the requests
over eight connections in a closed loop (load.py); threads with the SDK do the same. Each round also times: torch's
operator over as many keys in a process; eight callers that send all keys and values with each call; one request for all
eight caches; and bare uvicorn that echoes as many bytes. The operator is timed at the start and end of each round; if a
time deviates from the median, the round does not count. At the end, the benchmark measures the memory of 64 forks
without writes. Writes medians, and ratios within a round, to cached-decode-<cpu>.json, and takes two minutes.

`forks` times calls over forks of one cache, which read their common keys once, with one query for each fork. Each round
times, in turn:

    one request     with q alone: 16 and 64 forks of a cache of 16,384 keys, against as many queries over that cache;
                    64 forks of a cache of 4,096 keys, against 64 separate caches of 4,096 keys
    eight callers   with q, k and v of one token in each call: each with its own fork, against each with its own cache,
                    at 16,384 and 65,536 keys

Writes medians of the ratios within a round to forks-<cpu>.json, and takes four minutes.

`sharded-cache` times one query over a cache of a million tokens (8 key heads, D 64, bfloat16: 2 GiB) at four servers on
this CPU, each of which holds a quarter. Calls with `flashpoint.sharded.cache` alternate with calls of our operator and
torch's in this process on the same tensors. Writes medians, and the largest errors against float64, to
sharded-cache-<cpu>.json. Needs 6 GiB of memory and about two minutes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from forms import SAFETENSORS, Message, post
from load import drive, rate, repeated
from runner import Args, apart, in_turn, medians, option, rate_of, ratio, run, run_named, seconds, target, undisturbed
from serving import bare_uvicorn, engine_variables, service

import flashpoint
from flashpoint import sharded

CALLERS, HEADS, KEYS, DIM = 8, 8, 4096, 64
FORKS = 64
OURS, ALL, ECHO = "flashpoint", "one request for all caches", "echo of as many bytes"
SDK, STATELESS = "flashpoint, SDK", "flashpoint without caches"
OPERATOR, APART = "torch's operator, all cores", "torch's operator, a caller a core"
Ways = Mapping[str, Callable[[int], float]]  # functions that make a number of calls and return the tokens per second
FORKED, LONG = 16384, 65536  # keys of the caches that are forked
COUNTS = (16, 64)
APART_KEYS = 4096  # keys of each of 64 caches, which take the memory of one cache with 262,144 keys
SERVERS = 4
PIECE = 1 << 15  # number of tokens in one append to a sharded cache
UNIT = 2.0**-8  # unit roundoff of bfloat16
Caches = Sequence[flashpoint.Cache]


def draw(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def message(batch: int = 1, keys: int = 1, **options: Any) -> Message:
    """Return a request with q of one token for each sequence, and with k and v of `keys` tokens."""
    tensors = {"q": draw(batch, HEADS, 1, DIM), **dict.fromkeys("kv", draw(batch, HEADS, keys, DIM))}
    return SAFETENSORS.write(tensors, **options)


def loads(port: int, bare: int, ids: Sequence[str]) -> Ways:
    """Return functions that send requests to the service, or to bare uvicorn for ECHO, and return tokens per second."""
    requests = [post("/attention", message(caches=[one])) for one in ids]
    all_caches = message(len(ids), caches=list(ids))
    all_keys = post("/attention", message(keys=KEYS))
    return {
        OURS: lambda calls: repeated(port, requests, calls),
        ALL: lambda calls: CALLERS * repeated(port, [post("/attention", all_caches)], calls),
        ECHO: lambda calls: CALLERS * repeated(bare, [post("/echo", all_caches)], calls),
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
        return CALLERS * calls / seconds(lambda: [attend(q, k, v) for _ in range(calls)])

    def a_caller_a_core(calls: int) -> float:
        torch.set_num_threads(1)
        single = {"initializer": torch.set_num_threads, "initargs": (1,)}
        return rate_of(one, [*range(CALLERS)] * calls, cores, **single)

    return {OPERATOR: all_cores, APART: a_caller_a_core}


def from_threads(caches: Caches, calls: int) -> float:
    """Return the tokens per second of callers that use the SDK, each in its own thread."""
    q, k, v = (draw(1, HEADS, 1, DIM) for _ in range(3))

    def decode(cache: flashpoint.Cache) -> None:
        for _ in range(calls):
            cache.attention(q, k, v)

    return calls * rate_of(decode, caches, len(caches))


def memory_of_forks(client: flashpoint.Client, cache: flashpoint.Cache) -> float:
    """Return the memory of a cache and FORKS copies of it, divided by that of the cache alone."""

    def cache_bytes() -> int:
        return client.info()["caches"]["bytes"]

    cache.refresh()
    others = cache_bytes() - cache.bytes
    copies = client.fork_caches([cache] * FORKS)
    share = (cache_bytes() - others) / cache.bytes
    client.delete_caches(copies)
    return share


def timed(rounds: int, calls: int) -> tuple[list[dict[str, Any]], float]:
    """Return, for each round, the tokens per second of each measured function, and the result of `memory_of_forks`."""
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

        ways = {
            OPERATOR: partial(operator, OPERATOR, calls),
            OURS: partial(cut, caches, KEYS, load, OURS, calls),
            ALL: partial(cut, caches, KEYS, load, ALL, calls),
            ECHO: partial(load, ECHO, calls),
            SDK: partial(cut, caches, KEYS, from_threads, caches, calls),
            STATELESS: partial(load, STATELESS, 2 * CALLERS),
            APART: partial(alone, APART, calls),
        }
        return list(in_turn(ways, rounds, ends=OPERATOR, log="decode")), forks


def cut(caches: Caches, keys: int, way: Callable[..., float], *arguments: Any) -> float:
    """Call `way(*arguments)`, truncate the caches to `keys` keys, and return the tokens per second from the call."""
    rate_of_way = way(*arguments)
    for cache in caches:
        cache.truncate(keys)
    return rate_of_way


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
    """Return a function that sends one request `calls` times, and returns the shortest time in seconds.

    The request has `queries` queries for each cache in `caches`.
    """
    q = draw(len(caches), HEADS, queries, DIM)
    request = post("/attention", SAFETENSORS.write({"q": q}, caches=ids_of(caches)))
    return lambda: min(seconds(lambda: drive(port, [request], 1)) for _ in range(calls))


def decoding(port: int, caches: Caches, keys: int, calls: int) -> Callable[[], float]:
    """Return a function that measures the tokens per second of one caller per cache, then truncates to `keys` keys."""
    requests = [post("/attention", message(caches=[cache_id])) for cache_id in ids_of(caches)]
    return partial(cut, caches, keys, repeated, port, requests, calls)


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
    """Yield each comparison: its name, two functions, and a bound of the first result divided by the second."""
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


def exact(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """Return o in float64, and Σ p·|v|, which gives the size of rounding errors. q has one query for each head."""
    o, size = (q.double().new_empty(q.shape) for _ in range(2))
    for head in range(HEADS):
        scores = (k[0, head].double() @ q[0, head, 0].double()) * DIM**-0.5
        p, values = scores.softmax(0), v[0, head].double()
        o[0, head, 0], size[0, head, 0] = p @ values, p @ values.abs()
    return o, size


def sharded_cache(args: Args) -> dict[str, Any]:
    import torch
    from peers.in_process import computed

    generator = torch.Generator().manual_seed(0)
    q = torch.randn((1, HEADS, 1, DIM), generator=generator).bfloat16()
    k, v = (torch.empty((1, HEADS, args.tokens, DIM), dtype=torch.bfloat16) for _ in range(2))
    for t in (k, v):
        for head in range(HEADS):
            t[0, head] = torch.randn((args.tokens, DIM), generator=generator)
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(service())[1] for _ in range(SERVERS)]
        clients = [stack.enter_context(flashpoint.Client(f"http://127.0.0.1:{port}", timeout=600)) for port in ports]
        span = -(-args.tokens // SERVERS)
        cache = stack.enter_context(sharded.cache(clients, kv_heads=HEADS, head_dim=DIM, dtype="bfloat16", span=span))
        for first in range(0, args.tokens, PIECE):
            cache.append(k[:, :, first : first + PIECE], v[:, :, first : first + PIECE])
        ways: dict[str, Callable[[], torch.Tensor]] = {
            "operator": lambda: computed({"q": q, "k": k, "v": v})["o"],
            "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v),
            "sharded": lambda: cache.attention(q),
        }
        answers = {name: call() for name, call in ways.items()}
        timed = {name: lambda call=call: 1e3 * seconds(call) for name, call in ways.items()}
        milliseconds = medians(list(in_turn(timed, args.rounds, warm=0)))
    o, size = exact(q, k, v)
    bound = UNIT * (size + o.abs()) + 1e-6
    errors = {name: float(((answer.double() - o).abs() / bound).max()) for name, answer in answers.items()}
    faster = min(milliseconds["operator"], milliseconds["sdpa"]) / milliseconds["sharded"]
    return {
        "tokens": args.tokens, "kv_heads": HEADS, "head_dim": DIM,
        "dtype": "bfloat16", "servers": SERVERS, "bytes": k.nbytes + v.nbytes, "rounds": args.rounds,
        "targets": [
            target("the faster operator's time / the four servers'", faster, "time", least=0.8),
            target("largest error / the bound for bfloat16", errors["sharded"], "error", most=1.0),
        ],
        "median_milliseconds": {name: round(time, 1) for name, time in milliseconds.items()},
        "errors": {name: round(error, 3) for name, error in errors.items()},
    }  # fmt: skip


if __name__ == "__main__":
    deviation = option(0.15, "largest deviation of the operator from its median in a round that counts")
    calls, fork_calls = option(60, "calls of each caller in a round"), option(20, "calls of each way in a round")
    run_named(
        cached_decode=partial(run, cached_decode, rounds=option(12), calls=calls, deviation=deviation),
        forks=partial(run, forks, rounds=option(9), calls=fork_calls),
        sharded_cache=partial(run, sharded_cache, packages=("torch",), rounds=option(15), tokens=option(1 << 20)),
    )
