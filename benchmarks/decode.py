"""Time decode over caches that the service holds, beside the operator and beside the service without caches.

`python benchmarks/decode.py`. Each of eight callers decodes over its own cache: at first 4,096 keys, 8 heads, D 64,
float32. Each call brings q, k and v of one token, attends, and makes the cache one token longer. A separate process
sends the requests over eight connections in a closed loop (load.py); threads with the SDK do the same. Each round also
times, in turn: torch's operator over as many keys in a process; eight callers that send all keys and values with each
call; one request for all eight caches; and bare uvicorn that echoes as many bytes. A round does not count if the
operator at its start or end deviates from its median. Last comes the memory of 64 forks without writes. Medians, and
ratios within a round, go to benchmarks/results/cached-decode-<cpu>.json. Takes two minutes. Exits with 1 if a target is
missed.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from load import Request, drive, rate, repeated
from runner import Option, run, target
from serving import bare_uvicorn, environment_of_the_engine, service
from throughput import undisturbed

import flashpoint
from flashpoint_contract import wire

CALLERS, HEADS, KEYS, DIM = 8, 8, 4096, 64
FORKS = 64
OURS, ALL, ECHO = "flashpoint", "one request for all caches", "echo of as many bytes"
SDK, STATELESS = "flashpoint, SDK", "flashpoint without caches"
OPERATOR, APART = "torch's operator, all cores", "torch's operator, a caller a core"
Ask = Callable[..., float]


def draw(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def message(batch: int = 1, keys: int = 1, **options: Any) -> bytes:
    """Return a request with q of one token for each sequence, and with k and v of `keys` tokens."""
    tensors = {"q": draw(batch, HEADS, 1, DIM), **dict.fromkeys("kv", draw(batch, HEADS, keys, DIM))}
    infos = [(name, "float32", t.shape) for name, t in tensors.items()]
    return wire.build_head(infos, wire.encode_options(options)) + b"".join(t.tobytes() for t in tensors.values())


def post(path: str, body: bytes) -> Request:
    return Request.post(path, {"Content-Type": wire.MEDIA_TYPE}, (body,))


def loads(pipe: Connection, port: int, bare: int, ids: Sequence[str]) -> None:
    """Send requests in a separate process: receive (way, calls) from the pipe, send tokens per second back."""
    requests = [post("/attention", message(caches=[one])) for one in ids]
    all_caches = message(len(ids), caches=list(ids))
    all_keys = post("/attention", message(keys=KEYS))
    ways: Mapping[str, Callable[[int], float]] = {
        OURS: lambda calls: repeated(port, requests, calls),
        ALL: lambda calls: CALLERS * repeated(port, [post("/attention", all_caches)], calls),
        ECHO: lambda calls: CALLERS * repeated(bare, [post("/echo", all_caches)], calls),
        STATELESS: lambda calls: rate(drive(port, [all_keys] * calls, CALLERS)),
    }
    answer(pipe, ways)


def operates(pipe: Connection) -> None:
    """Call torch's operator in a separate process, with the same messages as `loads`."""
    from concurrent.futures import ThreadPoolExecutor

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

    answer(pipe, {OPERATOR: all_cores, APART: a_caller_a_core})


def answer(pipe: Connection, ways: Mapping[str, Callable[[int], float]]) -> None:
    with contextlib.suppress(EOFError):
        while True:
            name, calls = pipe.recv()
            pipe.send(ways[name](calls))


@contextlib.contextmanager
def child(run: Callable[..., None], *arguments: Any) -> Iterator[Ask]:
    """Run `run` in a separate process; yield a function that returns a way's tokens per second."""
    ours, theirs = multiprocessing.Pipe()
    started = multiprocessing.get_context("spawn").Process(target=run, args=(theirs, *arguments))
    started.start()
    theirs.close()

    def ask(name: str, calls: int) -> float:
        ours.send((name, calls))
        tokens_per_second: float = ours.recv()
        return tokens_per_second

    try:
        yield ask
    finally:
        ours.close()
        started.join()


def from_threads(caches: Sequence[flashpoint.Cache], calls: int) -> float:
    """Return the tokens per second of callers that use the SDK, one thread for each."""
    q, k, v = (draw(1, HEADS, 1, DIM) for _ in range(3))

    def decode(cache: flashpoint.Cache) -> None:
        for _ in range(calls):
            cache.attention(q, k, v)

    threads = [threading.Thread(target=decode, args=(cache,)) for cache in caches]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(caches) * calls / (time.perf_counter() - began)


def memory_of_forks(client: flashpoint.Client, cache: flashpoint.Cache) -> float:
    """Return the memory of a cache and FORKS copies of it, divided by that of the cache alone."""

    def cache_bytes() -> int:
        nbytes: int = client.info()["caches"]["bytes"]
        return nbytes

    cache.refresh()
    others = cache_bytes() - cache.bytes
    copies = client.fork_caches([cache] * FORKS)
    ratio = (cache_bytes() - others) / cache.bytes
    for copy in copies:
        copy.delete()
    return ratio


def timed(rounds: int, calls: int) -> tuple[list[dict[str, float]], list[tuple[float, float]], float]:
    """Return each round's tokens per second by way, the operator's rates at its ends, and `memory_of_forks`."""
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        bare = enter(bare_uvicorn())
        _, port, _ = enter(service())
        client = enter(flashpoint.Client(f"http://127.0.0.1:{port}"))
        caches = client.caches(CALLERS, kv_heads=HEADS, head_dim=DIM)
        for cache in caches:
            cache.append(draw(1, HEADS, KEYS, DIM), draw(1, HEADS, KEYS, DIM))
        forks = memory_of_forks(client, caches[0])
        load = enter(child(loads, port, bare, [cache.id for cache in caches]))
        operator = enter(child(operates))
        with environment_of_the_engine():
            apart = enter(child(operates))
        ways: dict[str, Callable[[], float]] = {
            OURS: partial(load, OURS, calls),
            ALL: partial(load, ALL, calls),
            ECHO: partial(load, ECHO, calls),
            SDK: lambda: from_threads(caches, calls),
            STATELESS: partial(load, STATELESS, 2 * CALLERS),
            APART: partial(apart, APART, calls),
        }
        every, steady = [], []
        for number in range(-1, rounds):  # the first round does not count
            names = list(ways)
            turn = number % len(names)
            before, rates = operator(OPERATOR, calls), {}
            for name in names[turn:] + names[:turn]:
                rates[name] = ways[name]()
                for cache in caches:
                    cache.truncate(KEYS)
            after = operator(OPERATOR, calls)
            if number >= 0:
                every.append({OPERATOR: (before + after) / 2, **rates})
                steady.append((before, after))
                print(
                    f"round {number + 1} of {rounds}: { ({n: round(r, 1) for n, r in every[-1].items()}) }", flush=True
                )
        return every, steady, forks


def figures(rounds: Sequence[Mapping[str, float]], forks: float) -> dict[str, Any]:
    """Return the medians of the rounds, and the targets."""

    def ratio(of: Callable[[Mapping[str, float]], float]) -> float:
        return statistics.median(of(one) for one in rounds)

    bound = "one request for eight caches over (echo of its bytes + operator)"
    return {
        "tokens_per_second": {name: round(ratio(lambda one, name=name: one[name]), 1) for name in rounds[0]},
        "targets": [
            target("eight callers over the operator", ratio(lambda r: r[OURS] / r[OPERATOR]), "times", least=0.55),
            target("eight callers over the service without caches", ratio(lambda r: r[OURS] / r[STATELESS]), "times",
                   least=8.0),
            target(bound, ratio(lambda r: r[ALL] * (1 / r[ECHO] + 1 / r[OPERATOR])), "times", least=0.95),
            target(f"memory of a cache and {FORKS} forks over the cache's", forks, "times", most=1.1),
        ],
    }  # fmt: skip


def measure(args: argparse.Namespace) -> dict[str, Any] | None:
    every, steady, forks = timed(args.rounds, args.calls)
    rounds = [rates for rates, is_clean in zip(every, undisturbed(steady, args.deviation), strict=True) if is_clean]
    if not rounds:
        print("not measured: another program used the machine in every round")
        return None
    result = figures(rounds, forks)
    for name, tokens in result["tokens_per_second"].items():
        print(f"{name:<40} {tokens:>10.1f} tokens/s")
    counts = {"rounds": len(rounds), "thrown_away": len(every) - len(rounds)}
    return {"callers": CALLERS, "keys": KEYS, "calls": args.calls, **counts, **result}


if __name__ == "__main__":
    run(
        measure,
        "cached-decode",
        rounds=Option(12),
        calls=Option(60, "calls of each caller in a round"),
        deviation=Option(0.15, "largest deviation of the operator from its median in a round that counts"),
    )
