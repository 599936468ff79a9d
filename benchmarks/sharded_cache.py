"""Time one query over a cache of a million tokens at four servers, beside the operator: `benchmarks/sharded_cache.py`.

Four `flashpoint serve` on this machine's CPU, each with a quarter of the keys and values (8 key heads, D 64, bfloat16:
2 GiB), asked by `flashpoint.sharded.cache`; beside them the operator in this process over the same tensors, ours and
torch's own, in turn. Both must be right against float64. The medians go to
benchmarks/results/sharded-cache-<device>.json. Exits with 1 where the ratio to the faster operator misses its goal.
Needs 6 GiB of memory and about two minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from record import ROOT, environment, write
from serving import target

import flashpoint
from flashpoint import sharded
from flashpoint_kernels import Options, Problem, run
from flashpoint_kernels.reproducible import split

TOKENS, HEADS, DIM, SERVERS = 1 << 20, 8, 64, 4
PIECE = 1 << 15  # tokens of an append
GOAL = 0.8  # of the operator's speed
UNIT = 2.0**-8  # of bfloat16


@contextlib.contextmanager
def server() -> Iterator[str]:
    """A server on a free port; its URL."""
    command = [sys.executable, "-m", "flashpoint_server.cli.serve", "--port", "0", "--device", "cpu"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            url = next(line["url"] for text in process.stderr if (line := json.loads(text))["event"] == "listening")
            client = flashpoint.Client(url)
            while not client.ready():
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()
            process.stderr.read()


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """o in float64, and Σ p·|v|, by which rounding is measured."""
    answers = []
    for head in range(HEADS):
        scores = (k[0, head].double() @ q[0, head, 0].double()) * DIM**-0.5
        p, values = scores.softmax(0), v[0, head].double()
        answers.append((p @ values, p @ values.abs()))
    o, size = (torch.stack(found)[None, :, None] for found in zip(*answers, strict=True))
    return o, size


def timed(call: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    began = time.perf_counter()
    o = call()
    return time.perf_counter() - began, o


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--record", action="store_true", help="write the result into benchmarks/results/")
    given = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    q = torch.randn((1, HEADS, 1, DIM), generator=generator).bfloat16()
    k, v = (torch.empty((1, HEADS, given.tokens, DIM), dtype=torch.bfloat16) for _ in range(2))
    for t in (k, v):
        for head in range(HEADS):
            t[0, head] = torch.randn((given.tokens, DIM), generator=generator)

    def ours() -> torch.Tensor:
        problem = Problem.create({"q": q, "k": k, "v": v}, Options())
        for part in split(problem, "torch"):
            run([part], "torch")
        return problem.outputs["o"]

    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(server()) for _ in range(SERVERS)]
        clients = [stack.enter_context(flashpoint.Client(url, timeout=600)) for url in urls]
        span = -(-given.tokens // SERVERS)
        cache = stack.enter_context(sharded.cache(clients, kv_heads=HEADS, head_dim=DIM, dtype="bfloat16", span=span))
        for first in range(0, given.tokens, PIECE):
            cache.append(k[:, :, first : first + PIECE], v[:, :, first : first + PIECE])
        ways: dict[str, Callable[[], torch.Tensor]] = {
            "operator": ours,
            "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v),
            "sharded": lambda: cache.attention(q),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        answers = {name: timed(call)[1] for name, call in ways.items()}
        for _ in range(given.rounds):
            for name, call in ways.items():
                seconds[name].append(timed(call)[0])
    o, size = exact(q, k, v)
    bound = UNIT * (size + o.abs()) + 1e-6
    errors = {name: float(((answer.double() - o).abs() / bound).max()) for name, answer in answers.items()}
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    ratio = min(medians["operator"], medians["sdpa"]) / medians["sharded"]
    targets = [
        target("the faster operator's time / the four servers'", ratio, "time", least=GOAL),
        target("largest error / the bound for bfloat16", errors["sharded"], "error", most=1.0),
    ]
    result: dict[str, Any] = {
        "environment": environment("torch"), "tokens": given.tokens, "kv_heads": HEADS, "head_dim": DIM,
        "dtype": "bfloat16", "servers": SERVERS, "bytes": k.nbytes + v.nbytes, "rounds": given.rounds,
        "targets": targets, "median_milliseconds": {name: round(1e3 * time, 1) for name, time in medians.items()},
        "errors": {name: round(error, 3) for name, error in errors.items()},
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if given.record:
        write(ROOT / "benchmarks" / "results", "sharded-cache", result)
    return 0 if all(one["met"] for one in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
