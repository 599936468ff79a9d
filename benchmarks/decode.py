"""Time decode over caches that the service holds, beside the operator and beside the service without caches.

`python benchmarks/decode.py`. Eight callers each decode over a cache of their own, of 4,096 keys at first, 8 heads,
D 64, float32: each call brings q, k and v of one token, attends, and leaves the cache a token longer. A process of its
own sends their requests over eight connections, each the next when its answer has come (load.py); threads with the SDK
do the same. In turn with these, each round: torch's operator over as many keys in a process, eight callers that send
all keys and values with each call, one request for all eight caches, and bare uvicorn that echoes as many bytes. A
round at whose ends the operator deviates from its median is thrown away. Then the memory of 64 forks that nobody has
written to. Medians, and ratios within a round, go to benchmarks/results/cached-decode-<cpu>.json. Takes two minutes.
Exits with 1 where a target is missed.
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
    """A request of q of one token for each sequence, and of k and v of so many."""
    tensors = {"q": draw(batch, HEADS, 1, DIM), **dict.fromkeys("kv", draw(batch, HEADS, keys, DIM))}
    infos = [(name, "float32", t.shape) for name, t in tensors.items()]
    return wire.build_head(infos, wire.encode_options(options)) + b"".join(t.tobytes() for t in tensors.values())


def post(path: str, body: bytes) -> Request:
    return Request.post(path, {"Content-Type": wire.MEDIA_TYPE}, (body,))


def loads(asked: Connection, port: int, bare: int, ids: Sequence[str]) -> None:
    """A process that sends requests: what is asked is a way and its calls, and told are tokens a second."""
    steps = [post("/attention", message(caches=[one])) for one in ids]
    together = message(len(ids), caches=list(ids))
    whole = post("/attention", message(keys=KEYS))
    ways: Mapping[str, Callable[[int], float]] = {
        OURS: lambda calls: repeated(port, steps, calls),
        ALL: lambda calls: CALLERS * repeated(port, [post("/attention", together)], calls),
        ECHO: lambda calls: CALLERS * repeated(bare, [post("/echo", together)], calls),
        STATELESS: lambda calls: rate(drive(port, [whole] * calls, CALLERS)),
    }
    answer(asked, ways)


def operates(asked: Connection) -> None:
    """A process that calls torch's operator; as `loads`."""
    from concurrent.futures import ThreadPoolExecutor

    import torch

    q, k, v = (torch.randn(CALLERS, HEADS, count, DIM) for count in (1, KEYS, KEYS))
    attend = torch.nn.functional.scaled_dot_product_attention
    cores = torch.get_num_threads()

    def one(caller: int) -> None:
        own = slice(caller, caller + 1)
        attend(q[own], k[own], v[own])

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

    answer(asked, {OPERATOR: all_cores, APART: a_caller_a_core})


def answer(asked: Connection, ways: Mapping[str, Callable[[int], float]]) -> None:
    with contextlib.suppress(EOFError):
        while True:
            name, calls = asked.recv()
            asked.send(ways[name](calls))


@contextlib.contextmanager
def child(run: Callable[..., None], *arguments: Any) -> Iterator[Ask]:
    """A process of `run`; asks it for tokens a second of a way."""
    ours, theirs = multiprocessing.Pipe()
    started = multiprocessing.get_context("spawn").Process(target=run, args=(theirs, *arguments))
    started.start()
    theirs.close()

    def ask(name: str, calls: int) -> float:
        ours.send((name, calls))
        found: float = ours.recv()
        return found

    try:
        yield ask
    finally:
        ours.close()
        started.join()


def from_threads(caches: Sequence[flashpoint.Cache], calls: int) -> float:
    """The SDK's callers, a thread each; tokens a second."""
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
    """Return the server's memory with FORKS copies of a cache over that with the cache alone."""

    def held() -> int:
        nbytes: int = client.info()["caches"]["bytes"]
        return nbytes

    cache.refresh()
    others = held() - cache.bytes
    copies = client.fork_caches([cache] * FORKS)
    found = (held() - others) / cache.bytes
    for copy in copies:
        copy.delete()
    return found


def timed(rounds: int, calls: int) -> tuple[list[dict[str, float]], list[tuple[float, float]], float]:
    """Tokens a second of each way in each round, the operator's at its ends, and `memory_of_forks`."""
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
            before, found = operator(OPERATOR, calls), {}
            for name in names[turn:] + names[:turn]:
                found[name] = ways[name]()
                for cache in caches:
                    cache.truncate(KEYS)
            after = operator(OPERATOR, calls)
            if number >= 0:
                every.append({OPERATOR: (before + after) / 2, **found})
                steady.append((before, after))
                print(
                    f"round {number + 1} of {rounds}: { ({n: round(r, 1) for n, r in every[-1].items()}) }", flush=True
                )
        return every, steady, forks


def figures(rounds: Sequence[Mapping[str, float]], forks: float) -> dict[str, Any]:
    """Medians of the rounds, and what was to be reached."""

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


def measure(asked: argparse.Namespace) -> dict[str, Any] | None:
    every, steady, forks = timed(asked.rounds, asked.calls)
    rounds = [one for one, kept in zip(every, undisturbed(steady, asked.deviation), strict=True) if kept]
    if not rounds:
        print("not measured: somebody else used the machine in every round")
        return None
    found = figures(rounds, forks)
    for name, tokens in found["tokens_per_second"].items():
        print(f"{name:<40} {tokens:>10.1f} tokens/s")
    counts = {"rounds": len(rounds), "thrown_away": len(every) - len(rounds)}
    return {"callers": CALLERS, "keys": KEYS, "calls": asked.calls, **counts, **found}


if __name__ == "__main__":
    run(
        measure,
        "cached-decode",
        rounds=Option(12),
        calls=Option(60, "of each caller in a round"),
        deviation=Option(0.15, "of the operator that a clean round may have"),
    )
