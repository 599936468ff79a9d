"""Time calls on this CPU beside torch: `python benchmarks/cpu_calls.py`. Takes about five minutes on a quiet machine.

In one process, with torch's usual threads, calls of `flashpoint_kernels.attention` alternate with torch's SDPA:

    forward, gradient   eight shapes (B, H, N, D), each without and with `causal`, in float32, bfloat16 and float16
    flex                two of these forwards, beside compiled FlexAttention
    decode              one query over 4,096 keys, for 8 sequences and 8 heads
    short               1 and 16 tokens, 8 heads, D 64: microseconds more than SDPA
    waiting             some calls right after an operator of torch, and after 50 ms of rest

A row has the median milliseconds of both, and the median over rounds of torch's time / ours. `share` is the rate of a
forward over that of torch's fastest matrix product in this run, of the dtype in which the kernel multiplies (bfloat16
with AMX or AVX512-BF16, else float32), or of decoding over torch's fastest read of memory. It is over 1 where torch is
not at the processor's limit. Writes cpu-beside-<cpu>.json.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from runner import Args, in_turn, option, pair, ratio, run, seconds, target
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

from flashpoint_kernels import attention, native

SHAPES = ((1, 8, 2048, 64), (1, 8, 2048, 128), (4, 8, 512, 64), (1, 8, 128, 64))
LONG = SHAPES[0]
DTYPES = ("float32", "bfloat16", "float16")
DECODE = (8, 8, 4096, 64)  # sequences, heads, keys, D
REST = 0.05  # seconds
LEAST = 0.004  # seconds for which calls are repeated in a round, at least
SQUARE, READ = 2048, 1 << 26  # rows and columns of the matrix product; float32 numbers that are read
# The goals on a processor with AMX, and on others: the geometric mean by dtype of DTYPES, and the least of all.
GOALS = {
    "forward": ((1.25, 1.4, 1.4, 0.95), (1.15, 1.25, 2.2, 0.95)),
    "gradient": ((1.3, 2.6, 2.0, 0.0), (1.2, 6.3, 9.2, 0.0)),
    "decode": ((1.2, 1.0, 0.0, 0.0), (1.0, 3.5, 0.0, 0.0)),
}
MORE = (8.0, 12.0)  # microseconds that a call of 16 tokens may take more than SDPA
APART = 1.1  # largest ratio between calls after an operator and after a rest
Row = dict[str, Any]


def draw(*shape: int, dtype: str, count: int = 3) -> list[Tensor]:
    """Return random tensors of one shape."""
    generator = torch.Generator("cpu").manual_seed(0)
    numbers = torch.randn((count, *shape), generator=generator, dtype=torch.float32, device="cpu")
    return list(numbers.to(getattr(torch, dtype)))


def limits(rounds: int = 7) -> dict[str, float]:
    """Return the fastest matrix products in flops a second, by dtype, and the fastest read in bytes a second."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        a, b = draw(SQUARE, SQUARE, dtype=dtype, count=2)
        found[dtype] = 2 * SQUARE**3 / min(seconds(partial(torch.mm, a, b)) for _ in range(rounds))
    memory = torch.ones(READ, dtype=torch.float32, device="cpu")
    found["read"] = memory.nbytes / min(seconds(memory.sum) for _ in range(rounds))
    return found


def forwards(limit: dict[str, float], rounds: int) -> Iterator[Row]:
    """Yield a row for each forward."""
    for dtype in DTYPES:
        multiplied = "bfloat16" if native.names().get(dtype) in ("c-amx", "c-avx512bf16") else "float32"
        for shape in SHAPES:
            q, k, v = draw(*shape, dtype=dtype)
            for causal in (False, True):
                row = pair(
                    partial(attention, q, k, v, causal=causal), partial(sdpa, q, k, v, is_causal=causal), rounds, LEAST
                )
                flops = 4 * math.prod(shape) * shape[2] / (2 if causal else 1)
                share = flops / row["ms"] * 1e3 / limit[multiplied]
                yield {**named("forward", dtype, shape, causal), **row, "share": round(share, 3)}


def gradients(rounds: int) -> Iterator[Row]:
    """Yield a row for each forward with its gradients."""
    for dtype in DTYPES:
        for shape in SHAPES:
            *inputs, do = draw(*shape, dtype=dtype, count=4)
            x = [t.requires_grad_() for t in inputs]
            for causal in (False, True):

                def ours(x: list[Tensor] = x, do: Tensor = do, causal: bool = causal) -> None:
                    torch.autograd.grad(attention(x[0], x[1], x[2], causal=causal), x, do)

                def theirs(x: list[Tensor] = x, do: Tensor = do, causal: bool = causal) -> None:
                    torch.autograd.grad(sdpa(x[0], x[1], x[2], is_causal=causal), x, do)

                yield {**named("gradient", dtype, shape, causal), **pair(ours, theirs, rounds, LEAST)}


def flex(rounds: int) -> Iterator[Row]:
    """Yield a row for each forward that runs beside FlexAttention."""
    compiled: Callable[..., Any] = torch.compile(flex_attention)
    length = LONG[2]
    lower = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cpu")
    for dtype in DTYPES[:2]:
        q, k, v = draw(*LONG, dtype=dtype)
        for causal in (False, True):
            theirs = partial(compiled, q, k, v, block_mask=lower if causal else None)
            yield {
                **named("flex", dtype, LONG, causal),
                **pair(partial(attention, q, k, v, causal=causal), theirs, rounds, LEAST),
            }


def decodes(limit: dict[str, float], rounds: int) -> Iterator[Row]:
    """Yield a row for each dtype, for one query over many keys."""
    for dtype in DTYPES:
        k, v = draw(*DECODE, dtype=dtype, count=2)
        q = k[:, :, :1].clone()
        row = pair(partial(attention, q, k, v), partial(sdpa, q, k, v), rounds, LEAST)
        share = (k.nbytes + v.nbytes) / row["ms"] * 1e3 / limit["read"]
        yield {**named("decode", dtype, DECODE, False), **row, "share": round(share, 3)}


def shorts(rounds: int) -> Iterator[Row]:
    """Yield a row for each short call, with the microseconds that it takes more than SDPA."""
    for dtype in DTYPES:
        for length in (1, 16):
            shape = (1, 8, length, 64)
            q, k, v = draw(*shape, dtype=dtype)
            ways = {
                "ours": partial(seconds, partial(attention, q, k, v)),
                "sdpa": partial(seconds, partial(sdpa, q, k, v)),
            }
            each = list(in_turn(ways, 100 * rounds, warm=20))
            us = {name: 1e6 * median(found[name] for found in each) for name in ways}
            more = {
                "us": round(us["ours"], 1),
                "sdpa_us": round(us["sdpa"], 1),
                "more_us": round(us["ours"] - us["sdpa"], 1),
            }
            yield {**named("short", dtype, shape, False), **more}


def waits(rounds: int) -> Iterator[Row]:
    """Yield a row for each call that runs after an operator of torch, and after a rest."""
    numbers = torch.ones(1 << 20, dtype=torch.float32, device="cpu")
    for dtype in DTYPES[:2]:
        for shape, queries in ((LONG, LONG[2]), (SHAPES[-1], SHAPES[-1][2]), (DECODE, 1)):
            q, k, v = draw(*shape, dtype=dtype)
            call = partial(attention, q[:, :, :queries].clone(), k, v)

            def after_operator(call: Callable[[], Any] = call) -> float:
                numbers.add_(1)
                return seconds(call)

            def after_rest(call: Callable[[], Any] = call) -> float:
                time.sleep(REST)
                return seconds(call)

            each = list(in_turn({"operator": after_operator, "rest": after_rest}, 4 * rounds))
            yield {
                **named("waiting", dtype, shape, False),
                **{
                    f"{name}_ms": round(1e3 * median(found[name] for found in each), 3) for name in ("operator", "rest")
                },
                "times": round(ratio(each, "rest", "operator"), 3),
            }


def named(kind: str, dtype: str, shape: tuple[int, ...], causal: bool) -> Row:
    """Return the fields that name a row."""
    return {"kind": kind, "dtype": dtype, "shape": list(shape), "causal": causal}


def goals(rows: list[Row]) -> list[dict[str, Any]]:
    """Return the targets of a run."""
    place = 0 if native.names().get("bfloat16") == "c-amx" else 1
    found = []
    for kind, goal in GOALS.items():
        times = {
            dtype: [row["times"] for row in rows if (row["kind"], row["dtype"]) == (kind, dtype)] for dtype in DTYPES
        }
        *means, least = goal[place]
        for dtype, wanted in zip(DTYPES, means, strict=True):
            if wanted:
                mean = math.exp(sum(map(math.log, times[dtype])) / len(times[dtype]))
                found.append(target(f"{kind}, {dtype}: SDPA's time / ours", mean, "times", least=wanted))
        if least:
            found.append(target(f"{kind}, the least of all", min(map(min, times.values())), "times", least=least))
    more = max(row["more_us"] for row in rows if row["kind"] == "short" and row["shape"][2] == 16)
    found.append(target("a call of 16 tokens beside SDPA", more, "more µs", most=MORE[place]))
    apart = max(max(row["times"], 1 / row["times"]) for row in rows if row["kind"] == "waiting")
    found.append(target("calls after an operator and after a rest", apart, "times apart", most=APART))
    return found


def measure(args: Args) -> dict[str, Any]:
    rounds = args.rounds
    limit = limits()
    rows = []
    with torch.no_grad():
        parts = [forwards(limit, rounds), flex(rounds), decodes(limit, 3 * rounds), shorts(rounds), waits(rounds)]
        for part in parts:
            for row in part:
                print(row, flush=True)
                rows.append(row)
    for row in gradients(max(rounds // 2, 2)):
        print(row, flush=True)
        rows.append(row)
    return {
        "threads": torch.get_num_threads(), "rounds": rounds,
        "limits": {name: float(f"{found:.4g}") for name, found in limit.items()},
        "rows": rows, "targets": goals(rows),
    }  # fmt: skip


if __name__ == "__main__":
    run(measure, "cpu-beside", packages=("torch",), malloc=False, rounds=option(9, "rounds of each pair of calls"))
