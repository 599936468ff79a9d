"""Time forward mode, second derivatives and key weights: `python benchmarks/derivatives.py`, under three minutes.

In float32 on the CPU, (1,4,N,64), with `auto`. The ways of a row alternate in one process, beside torch's math path:

    jvp          `torch.func.jvp` in q, k and v beside a forward; also beside a forward on `tiled`
    hvp          Hessian-vector products beside a forward with its gradients: the jvp of a gradient ("forward over
                 reverse"), and a backward through a backward ("reverse over reverse")
    key_weights  a call with `return_key_weights`, and `key_weights` with and without a known lse, beside a forward
    memory       the peak memory of a jvp, an hvp and key weights at one head, up to 16,384 tokens; of the math path at
                 the shortest length, because it stores N × N probabilities
    cache        a service's call over a KV cache with `return_key_weights` beside the same call without

Targets: a jvp takes at most 3.5 times a forward (six products in the place of two); key weights add at most one
forward's time; twice the tokens take at most 2.2 times the memory. The other ratios have no target. Before the times
of derivatives are measured, they are compared with those of the math path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from runner import SERVICE, Args, apart, in_turn, medians, option, ratio, run, seconds, target
from serving import service
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashpoint
from flashpoint_kernels import attention, key_weights
from flashpoint_kernels.timing.clock import peak_bytes

HEADS, DIM = 4, 64
LEAST = 0.1  # least seconds that a way of `key_weights` and `cache` takes in a round
CLOSE = {"atol": 1e-3, "rtol": 1e-3}
GROWTH = 2.2
FORWARD_OVER_REVERSE, REVERSE_OVER_REVERSE = "forward over reverse", "reverse over reverse"

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Row = dict[str, Any]
Ways = Mapping[str, Callable[[], Any]]


def by_math(causal: bool) -> Attend:
    """Return torch's math path, the only one of its operators that has these derivatives."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attend


def drawn(length: int, heads: int = HEADS) -> tuple[list[Tensor], list[Tensor]]:
    """Return q, k and v, and a direction for each: in memory of their own, because torch copies a tangent in a view."""
    random = torch.Generator().manual_seed(0)
    numbers = [torch.randn(1, heads, length, DIM, generator=random) for _ in range(6)]
    return numbers[:3], numbers[3:]


def tangent(attend: Attend, inputs: Sequence[Tensor], dots: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    answers: tuple[Tensor, Tensor] = torch.func.jvp(attend, tuple(inputs), tuple(dots))
    return answers


def gradients(attend: Attend, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the gradients of Σ o²/2, which is not linear in o: all terms of the second derivative are there."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    return torch.autograd.grad(attend(*leaves).square().sum() / 2, leaves)


def forward_over_reverse(attend: Attend, inputs: Sequence[Tensor], dots: Sequence[Tensor]) -> tuple[Tensor, ...]:
    gradient = torch.func.grad(lambda *t: attend(*t).square().sum() / 2, (0, 1, 2))
    products: tuple[Tensor, ...] = torch.func.jvp(gradient, tuple(inputs), tuple(dots))[1]
    return products


def reverse_over_reverse(attend: Attend, inputs: Sequence[Tensor], dots: Sequence[Tensor]) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    first = torch.autograd.grad(attend(*leaves).square().sum() / 2, leaves, create_graph=True)
    return torch.autograd.grad(first, leaves, dots)


PRODUCTS = {FORWARD_OVER_REVERSE: forward_over_reverse, REVERSE_OVER_REVERSE: reverse_over_reverse}


def check(name: str, ours: Any, theirs: Any) -> None:
    """Raise AssertionError if the derivatives differ by more than rounding."""
    torch.testing.assert_close(ours, theirs, **CLOSE, msg=lambda text: f"{name}: {text}")


def timed(ways: Ways, rounds: int, least: float = 0.0) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Return the median milliseconds of each way, and the seconds of each round."""
    times = list(in_turn({name: partial(seconds, call, least) for name, call in ways.items()}, rounds))
    return medians([{name: 1e3 * value for name, value in each.items()} for each in times]), times


def compared(
    times: Sequence[Mapping[str, float]], derivative: str, plain: str, theirs: str = "math"
) -> dict[str, float]:
    """Return the ratios of a derivative's time to the plain call's, ours and the math path's, and of theirs to ours."""
    return {
        "over_plain": round(ratio(times, derivative, plain), 3),
        "math_over_plain": round(ratio(times, f"{theirs} {derivative}", f"{theirs} {plain}"), 3),
        "times": round(ratio(times, f"{theirs} {derivative}", derivative), 3),
    }


def jvp(lengths: Sequence[int], rounds: int) -> Iterator[Row]:
    for length, causal in kinds(lengths):
        inputs, dots = drawn(length)
        ours, math = partial(attention, causal=causal), by_math(causal)
        check("jvp", tangent(ours, inputs, dots), tangent(math, inputs, dots))
        ways = {
            "forward": partial(ours, *inputs), "forward on tiled": partial(ours, *inputs, backend="tiled"),
            "jvp": partial(tangent, ours, inputs, dots),
            "math forward": partial(math, *inputs), "math jvp": partial(tangent, math, inputs, dots),
        }  # fmt: skip
        ms, times = timed(ways, rounds)
        over_tiled = round(ratio(times, "jvp", "forward on tiled"), 3)
        yield {
            "length": length, "causal": causal, **compared(times, "jvp", "forward"), "over_tiled": over_tiled, "ms": ms,
        }  # fmt: skip


def hvp(lengths: Sequence[int], rounds: int) -> Iterator[Row]:
    for length, causal in kinds(lengths):
        inputs, dots = drawn(length)
        ours, math = partial(attention, causal=causal), by_math(causal)
        for name, product in PRODUCTS.items():
            check(name, product(ours, inputs, dots), product(math, inputs, dots))
        ways = {"gradient": partial(gradients, ours, inputs), "math gradient": partial(gradients, math, inputs)}
        for name, product in PRODUCTS.items():
            ways[name], ways[f"math {name}"] = (partial(product, attend, inputs, dots) for attend in (ours, math))
        ms, times = timed(ways, rounds)
        for name in PRODUCTS:
            both = {n: ms[n] for n in ("gradient", name, "math gradient", f"math {name}")}
            yield {
                "length": length, "causal": causal, "product": name, **compared(times, name, "gradient"), "ms": both,
            }  # fmt: skip


def kinds(lengths: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """Yield each length without a causal mask, and the last one with it, too."""
    yield from ((length, False) for length in lengths)
    yield lengths[-1], True


def weights(lengths: Sequence[int], rounds: int) -> Iterator[Row]:
    for length, causal in kinds(lengths):
        (q, k, v), _ = drawn(length)
        _, lse = attention(q, k, v, causal=causal, return_lse=True)
        ways = {
            "forward": partial(attention, q, k, v, causal=causal),
            "forward with them": partial(attention, q, k, v, causal=causal, return_key_weights=True),
            "alone": partial(key_weights, q, k, causal=causal),
            "alone, with lse": partial(key_weights, q, k, causal=causal, lse=lse),
        }
        ms, times = timed(ways, rounds, LEAST)
        yield {
            "length": length, "causal": causal, "added": added(times, "forward with them", "forward"),
            **{name: round(ratio(times, name, "forward"), 3) for name in ("alone", "alone, with lse")}, "ms": ms,
        }  # fmt: skip


def added(times: Sequence[Mapping[str, float]], more: str, plain: str) -> float:
    """Return the time that key weights add to a call, divided by the call's time without them."""
    return round(median(each[more] / each[plain] - 1 for each in times), 3)


def memory(longest: int) -> Iterator[Row]:
    """Yield the peak memory of each derivative at a quarter, a half and all of `longest` tokens, and the last growth.

    Less than 1 MiB counts as 1 MiB, because the system's count of memory has an error of some hundred KiB.
    """
    for name, make in (
        ("jvp", lambda attend: partial(tangent, attend)),
        *((name, lambda attend, product=product: partial(product, attend)) for name, product in PRODUCTS.items()),
        ("key weights", lambda _: lambda inputs, _dots: key_weights(*inputs[:2])),
    ):
        ours, mib = make(attention), {}
        ours(*drawn(64, 1))  # the first call loads what later ones share
        for length in (longest // 4, longest // 2, longest):
            mib[length] = peak_mib(partial(ours, *drawn(length, 1)))
        row: Row = {"of": name, "mib": mib, "growth": round(max(mib[longest], 1.0) / max(mib[longest // 2], 1.0), 3)}
        if name != "key weights":
            math = make(by_math(False))
            math(*drawn(64, 1))
            row["math_mib"] = {longest // 4: peak_mib(partial(math, *drawn(longest // 4, 1)))}
        yield row


def peak_mib(call: Callable[[], Any]) -> float:
    """Return the peak memory in MiB that a call adds, with its answers."""
    if (peak := peak_bytes(call, "cpu")) is None:
        raise RuntimeError("this system does not report a process's peak memory: run this benchmark on Linux")
    return round(peak / 2**20, 1)


def cache(keys: int, rounds: int) -> Iterator[Row]:
    """Yield the times of calls over a KV cache of a service, with key weights and without."""
    with service() as (_, port, _), flashpoint.Client(f"http://127.0.0.1:{port}") as client:
        (_, k, v), _ = drawn(keys)
        with client.cache(kv_heads=HEADS, head_dim=DIM) as held:
            held.append(k, v)
            for queries in (1, 256):
                (q, _, _), _ = drawn(queries)
                ways = {
                    "forward": partial(held.attention, q),
                    "forward with them": partial(held.attention, q, return_key_weights=True),
                }
                ms, times = timed(ways, 2 * rounds, LEAST)
                yield {
                    "keys": keys, "queries": queries, "added": added(times, "forward with them", "forward"), "ms": ms,
                }  # fmt: skip


def sections() -> Mapping[str, Callable[..., Iterator[Row]]]:
    return {"jvp": jvp, "hvp": hvp, "key_weights": weights, "memory": memory, "cache": cache}


def targets(rows: Mapping[str, list[Row]]) -> list[Row]:
    most = {name: max(row["over_plain"] for row in rows[name]) for name in ("jvp", "hvp")}
    faster = {name: min(row["times"] for row in rows[name]) for name in most}
    print(
        f"an hvp over a forward with its gradients, most: {most['hvp']}; the math path's time / ours, least: {faster}"
    )
    made = [target("a jvp over a forward, most", most["jvp"], "time", most=3.5)]
    for what, section in (("", "key_weights"), (" over a cache", "cache")):
        worst = max(row["added"] for row in rows[section])
        made.append(target(f"what key weights add to a forward{what}, most", worst, "time", most=1.0))
    growth = max(row["growth"] for row in rows["memory"])
    return [*made, target("memory of twice the tokens, most", growth, "size", most=GROWTH)]


def measure(args: Args) -> dict[str, Any]:
    lengths, half = (args.length // 2, args.length), (args.length // 4, args.length // 2)
    asked = {"jvp": (lengths, args.rounds), "hvp": (half, args.rounds), "key_weights": (lengths, args.rounds)}
    asked |= {"memory": (args.longest,), "cache": (2 * args.length, args.rounds)}
    with apart(sections) as ask:
        rows = {name: ask(name, *given) for name, given in asked.items()}
    return {"heads": HEADS, "head_dim": DIM, "rows": rows, "targets": targets(rows)}


if __name__ == "__main__":
    run(
        measure,
        "derivatives",
        packages=SERVICE,
        rounds=option(3),
        length=option(2048, "tokens of a jvp and of key weights, and half as many; an hvp has half of both"),
        longest=option(16384, "most tokens of the memory"),
    )
