"""Keep a KV cache small by key weights: drop the keys that received the least attention, not the oldest.

    make serve                                  # in another terminal
    .venv/bin/python examples/evict.py --plot evict.svg

A stream brings facts, a key with a value each, and questions about facts of any age. Some facts are asked for again and
again. A question is a query of attention over the cache; its answer is the value that o is nearest to. The cache may
hold few tokens only. `return_key_weights` says how much attention each cached key received, so what was asked for can
stay (as in H2O, Zhang et al. 2023, arXiv 2306.14048). The newest facts stay, too: nobody could ask for them yet. To
drop the oldest tokens instead needs no weights, and forgets facts that are still asked for.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

import flashpoint
from flashpoint.plots.style import BLACK, GREY, VERMILION, panels, saved
from flashpoint_kernels.timing.device import describe

Array = NDArray[np.float32]
DIM, VALUES = 64, 32  # columns of keys and values, and the number of values
NEW, ASKED = 16, 32  # facts and questions of one step
BUDGETS = (64, 128, 256, 512)  # tokens that a cache may hold
WAYS = ("key weights", "oldest dropped")


class Step(NamedTuple):
    """New facts, k and v (1, 1, NEW, DIM), and questions q (1, 1, ASKED, DIM) with the numbers of their values."""

    k: Array
    v: Array
    q: Array
    answers: NDArray[np.int64]


def stream(steps: int, seed: int = 0) -> tuple[Array, Iterator[Step]]:
    """Return the values (VALUES, DIM), and the steps: nine of ten questions are about a tenth of the facts."""
    random = np.random.default_rng(seed)
    values = _units(random, VALUES)

    def every() -> Iterator[Step]:
        names, kinds = np.empty((0, DIM), np.float32), np.empty(0, np.int64)
        for _ in range(steps):
            new, of = _units(random, NEW), random.integers(0, VALUES, NEW)
            names, kinds = np.concatenate([names, new]), np.concatenate([kinds, of])
            known = np.arange(len(names))
            popular = known[known % 10 == 0]
            asked = np.where(random.random(ASKED) < 0.9, random.choice(popular, ASKED), random.choice(known, ASKED))
            # A score is q·k / 8: the asked key scores about 16, and the others less than 8.
            q = 128 * (names[asked] + 0.03 * random.standard_normal((ASKED, DIM)))
            yield Step(*(t.astype(np.float32)[None, None] for t in (new, values[of], q)), kinds[asked])

    return values, every()


def _units(random: np.random.Generator, count: int) -> Array:
    rows = random.standard_normal((count, DIM))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def right(client: flashpoint.Client, steps: int, budget: int | None, way: str, seed: int = 0) -> float:
    """Return the share of right answers with a cache of at most `budget` tokens between steps; None is no limit."""
    values, every = stream(steps, seed)
    weights, count, total = np.zeros(0, np.float32), 0, 0
    with client.cache(kv_heads=1, head_dim=DIM) as cache:
        for step in every:
            cache.append(step.k[0], step.v[0])
            o, received = cache.attention(step.q, return_key_weights=True)
            count += int((np.argmax(o[0, 0] @ values.T, 1) == step.answers).sum())
            total += ASKED
            weights = np.pad(weights, (0, NEW)) + received[0, 0]
            if budget is None or len(weights) <= budget:
                continue
            if way == "key weights":
                old = len(weights) - NEW  # the newest facts stay
                kept = np.sort([*np.argsort(weights[:old])[old - (budget - NEW) :], *range(old, len(weights))])
            else:
                kept = np.arange(len(weights) - budget, len(weights))
            k, v = cache.tensors()
            cache.append(k[0][:, kept], v[0][:, kept], at=0)  # replaces all tokens
            weights = weights[kept]
    return count / total


def draw(shares: dict[str, list[float]], whole: float, about: str) -> Figure:
    """Draw the share of right answers against the number of tokens that a cache may hold."""
    colours = dict(zip(WAYS, (VERMILION, BLACK), strict=True))
    key = [Line2D([], [], label=way, color=colour, marker="o") for way, colour in colours.items()]
    key.append(Line2D([], [], label="nothing dropped", color=GREY, linestyle="--"))
    figure, (ax,) = panels("Answers from a cache that drops tokens", about, 1, key, panel=(7.0, 3.4))
    for way, found in shares.items():
        ax.plot(BUDGETS, [100 * share for share in found], color=colours[way], marker="o")
    ax.axhline(100 * whole, color=GREY, linestyle="--")
    ax.set_xscale("log", base=2)
    ax.set_xticks(BUDGETS, list(map(str, BUDGETS)))
    ax.set_xlabel("tokens that the cache may hold", fontsize=9)
    ax.set_ylabel("right answers, %", fontsize=9)
    ax.set_ylim(0, 105)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="the server (default: FLASHPOINT_URL, or http://localhost:8000)")
    parser.add_argument("--steps", type=int, default=64, help=f"steps of {NEW} facts (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="file of the plot, SVG or PNG (default: none)")
    parser.add_argument("--json", type=Path, help="file for the answers and the environment as JSON")
    args = parser.parse_args()
    with flashpoint.Client(args.url) as client:
        whole = right(client, args.steps, None, WAYS[0], args.seed)
        shares = {way: [right(client, args.steps, n, way, args.seed) for n in BUDGETS] for way in WAYS}
    print(f"{'tokens':>14}: {'  '.join(f'{n:>5}' for n in BUDGETS)}    all {NEW * args.steps}")
    for way, found in shares.items():
        print(f"{way:>14}: {'  '.join(f'{share:5.1%}' for share in found)}  {whole:5.1%}")
    if args.plot:
        args.plot.write_bytes(saved(lambda: draw(shares, whole, describe("cpu")["device"]), args.plot.suffix[1:]))
    if args.json:
        from train_gpt import environment

        result = {"environment": environment(), "steps": args.steps, "seed": args.seed, "budgets": BUDGETS}
        args.json.write_text(json.dumps({**result, "shares": shares, "whole": whole}) + "\n")


if __name__ == "__main__":
    main()
