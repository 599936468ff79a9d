"""Train a small GPT with and without saved forwards: `python benchmarks/train_saved.py`.

It trains the GPT of examples/train_gpt.py from one seed. Rounds with and without saving alternate. The targets: bitwise
equal losses, and at most 0.7 times the bytes of a step, in and out, by the server's count. It also measures the
milliseconds of a step, and the time that saving adds to one forward of 1,024 tokens. It takes about three minutes.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

import torch
from runner import ROOT, Args, in_turn, medians, option, run, seconds, target
from serving import service, with_bytes

import flashpoint

sys.path.append(str(ROOT / "examples"))

import train_gpt

WAYS = ("served", "saved")
MOST_BYTES = 0.7
LARGE = (1, 8, 1024, 64)


def training(client: flashpoint.Client, port: int, rounds: int, steps: int) -> dict[str, Any]:
    """Return the last loss, and the bytes and milliseconds of a step with and without saved forwards."""
    losses: dict[str, list[float]] = {}
    nbytes: dict[str, float] = {}

    def trained(name: str) -> float:
        """Train the model, and return the milliseconds of a step."""
        attend = train_gpt.way(name, client, "cpu")

        def train() -> None:
            losses[name] = train_gpt.train(attend, steps=steps).losses

        taken, nbytes[name] = with_bytes(port, partial(seconds, train))
        return float(taken / steps * 1e3)

    ms = medians(list(in_turn({name: partial(trained, name) for name in WAYS}, rounds, warm=0)))
    return {
        "steps": steps, "rounds": rounds, "last_loss": losses["saved"][-1],
        "same_losses": losses["served"] == losses["saved"],
        "bytes_per_step": {name: round(nbytes[name] / steps) for name in WAYS}, "ms_per_step": ms,
    }  # fmt: skip


def saving(client: flashpoint.Client, rounds: int) -> dict[str, float]:
    """Return the milliseconds of a forward at LARGE with `save` and without, timed alternately."""
    q, k, v = (torch.randn(LARGE, generator=torch.Generator().manual_seed(seed)) for seed in range(3))

    def forward(save: bool) -> float:
        began = time.perf_counter()
        result = client.attention(q, k, v, return_lse=True, save=save)
        taken = (time.perf_counter() - began) * 1e3
        if save:
            client.delete_saved(result.saved)
        return taken

    return medians(list(in_turn({"unsaved": partial(forward, False), "saved": partial(forward, True)}, rounds, warm=0)))


def measure(args: Args) -> dict[str, Any]:
    torch.set_num_threads(1)
    with service() as (_, port, _), flashpoint.Client(f"http://127.0.0.1:{port}") as client:
        train_gpt.train(train_gpt.way("saved", client, "cpu"), steps=3)
        result = training(client, port, args.rounds, args.steps)
        forward = saving(client, 20 * args.rounds)
    share = result["bytes_per_step"]["saved"] / result["bytes_per_step"]["served"]
    targets = [
        target("bytes a step with save / without", share, "ratio", most=MOST_BYTES),
        target("the same losses to the bit", float(result["same_losses"]), "yes", least=1.0),
    ]
    return {"targets": targets, "training": result, "forward_ms": forward}


if __name__ == "__main__":
    run(measure, "train-saved", rounds=option(5), steps=option(40))
