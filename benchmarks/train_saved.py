"""Train a small GPT with and without saved forwards: `python benchmarks/train_saved.py`.

It trains the GPT of examples/train_gpt.py from one seed. Rounds with and without saving alternate. The targets: bitwise
equal losses, and at most 0.7 times the bytes of a step, in and out, by the server's count. It also measures the
milliseconds of a step, and the time that saving adds to one forward of 1,024 tokens. It writes
benchmarks/results/train-saved-<cpu>.json, and takes about three minutes. The exit code is 1 if a target is missed.
"""

from __future__ import annotations

import sys
import time
import urllib.request
from functools import partial
from typing import Any

import torch
from runner import ROOT, Args, Option, in_turn, medians, run, target
from serving import service

import flashpoint

sys.path.append(str(ROOT / "examples"))

import train_gpt

WAYS = ("served", "saved")
MOST_BYTES = 0.7
LARGE = (1, 8, 1024, 64)


def sent_and_received(port: int) -> float:
    """Return the bytes of all bodies so far, received and sent, as the server counts them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    counters = ("flashpoint_received_bytes_total ", "flashpoint_sent_bytes_total ")
    return sum(float(line.split()[1]) for line in lines if line.startswith(counters))


def training(client: flashpoint.Client, port: int, rounds: int, steps: int) -> dict[str, Any]:
    """Return losses, bytes per step and milliseconds per step, with and without saving."""
    losses: dict[str, list[float]] = {}
    nbytes: dict[str, float] = {}

    def trained(name: str) -> float:
        """Train the model, and return the milliseconds of a step."""
        attend, before = train_gpt.way(name, client, "torch"), sent_and_received(port)
        overhead = sent_and_received(port) - before  # bytes of the metrics request itself
        began = time.perf_counter()
        losses[name] = train_gpt.train(attend, steps=steps).losses
        taken = (time.perf_counter() - began) / steps * 1e3
        nbytes[name] = (sent_and_received(port) - before - 2 * overhead) / steps
        return taken

    ms = medians(list(in_turn({name: partial(trained, name) for name in WAYS}, rounds, warm=0)))
    return {
        "steps": steps, "rounds": rounds, "last_loss": losses["saved"][-1],
        "same_losses": losses["served"] == losses["saved"],
        "bytes_per_step": {name: round(nbytes[name]) for name in WAYS}, "ms_per_step": ms,
    }  # fmt: skip


def saving(client: flashpoint.Client, rounds: int) -> dict[str, float]:
    """Return the milliseconds of a forward of LARGE with and without saving, timed alternately."""
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
        train_gpt.train(train_gpt.way("saved", client, "torch"), steps=3)
        result = training(client, port, args.rounds, args.steps)
        forward = saving(client, 20 * args.rounds)
    share = result["bytes_per_step"]["saved"] / result["bytes_per_step"]["served"]
    targets = [
        target("bytes a step with save / without", share, "ratio", most=MOST_BYTES),
        target("the same losses to the bit", float(result["same_losses"]), "yes", least=1.0),
    ]
    return {"targets": targets, "training": result, "forward_ms": forward}


if __name__ == "__main__":
    run(measure, "train-saved", rounds=Option(5), steps=Option(40))
