"""Train a small mean-flow model with our attention and with torch's math path: the same losses, in less memory.

    .venv/bin/python examples/mean_flow.py
    .venv/bin/python examples/mean_flow.py --points 1024 --steps 50

A mean-flow model (Geng et al. 2025, arXiv 2505.13447) makes a sample from noise in one step. Its loss needs the
derivative of the network's output along its path in time: a Jacobian-vector product (JVP), in each step of the
training. Torch's fused attention has none, so that models use the math path, which stores all S × S probabilities and
their tangents. `flashpoint_kernels.attention` has one in O(S) memory. A sample is a set of points on a ring; each point
is a token. Each way trains in a process of its own, from the same seed, on the CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import gelu, scaled_dot_product_attention

from flashpoint.plots.style import BLACK, SKY, VERMILION, panels, saved
from flashpoint_kernels import attention
from flashpoint_kernels.timing.device import describe

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
DIM, HEADS, LAYERS = 64, 4, 2


def by_math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention by the operators of torch's math path, which have tangents."""
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v)


WAYS: dict[str, Attention] = {"flashpoint": attention, "math path": by_math}


class Layer(nn.Module):
    """Attention among the points of a set, (B, S, DIM), and a perceptron."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))
        update: Tensor = self.down(gelu(self.up(self.norms[1](x))))
        return x + update


class MeanFlow(nn.Module):
    """The mean velocity u(z, r, t) of the points z (B, S, 2) between the times r and t, each (B, 1, 1)."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.point, self.times = nn.Linear(2, DIM), nn.Sequential(nn.Linear(16, DIM), nn.SiLU(), nn.Linear(DIM, DIM))
        self.layers = nn.Sequential(*(Layer(attention) for _ in range(LAYERS)))
        self.norm, self.velocity = nn.LayerNorm(DIM), nn.Linear(DIM, 2)

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        angles = torch.cat([t, t - r], -1)[..., None] * (math.pi * torch.tensor([0.5, 1.0, 2.0, 4.0]))
        times = self.times(torch.cat([angles.sin(), angles.cos()], -1).flatten(-2))
        u: Tensor = self.velocity(self.norm(self.layers(self.point(z) + times)))
        return u


def rings(batch: int, points: int, generator: torch.Generator) -> Tensor:
    """Return sets of points (B, S, 2) on rings around 0, each with a radius of its own."""
    radius = 1 + 0.5 * torch.rand(batch, 1, 1, generator=generator)
    angles = 2 * math.pi * torch.rand(batch, points, generator=generator)
    return radius * torch.stack([angles.cos(), angles.sin()], -1)


def loss_of(model: MeanFlow, x: Tensor, generator: torch.Generator) -> Tensor:
    """Return the loss of Algorithm 1: u against v − (t − r)·du/dt, where du/dt is a JVP, and the target is constant."""
    noise = torch.randn(x.shape, generator=generator)
    first, last = torch.rand(2, len(x), 1, 1, generator=generator).sort(0).values
    first = torch.where(torch.rand(first.shape, generator=generator) < 0.5, last, first)  # half of them: flow matching
    z, v = (1 - last) * x + last * noise, noise - x
    direction = v, torch.zeros_like(first), torch.ones_like(last)
    u, along = torch.func.jvp(model, (z, first, last), direction)
    return (u - (v - (last - first) * along).detach()).square().mean()


class Trained(NamedTuple):
    """A training: losses, seconds of processor time, memory in MiB that it added at its peak, and made points."""

    losses: list[float]
    seconds: float
    mib: float
    sample: list[list[float]]


def train(way: str, *, steps: int, batch: int, points: int, seed: int = 0, rate: float = 2e-3) -> Trained:
    """Train `steps` steps with AdamW. `seed` determines the weights and the samples."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = MeanFlow(WAYS[way])
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    before, began, losses = _peak(), time.process_time(), []
    for _ in range(steps):
        loss = loss_of(model, rings(batch, points, generator), generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    seconds, mib = time.process_time() - began, _peak() - before
    with torch.no_grad():  # one step from noise
        noise = torch.randn(1, points, 2, generator=generator)
        sample = noise - model(noise, torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
    return Trained(losses, seconds, mib, sample[0].tolist())


def _peak() -> float:
    """Return the largest memory in MiB that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def draw(trained: dict[str, Trained], about: str) -> Figure:
    """Draw the losses, the memory, and the points that the first model made from noise in one step."""
    colours = dict(zip(trained, (VERMILION, BLACK), strict=False))
    key = [Line2D([], [], label=name, color=colour, linewidth=2) for name, colour in colours.items()]
    figure, axes = panels("A mean-flow model trained from one seed", about, 3, key, columns=3, panel=(3.4, 3.2))
    for name, one in trained.items():
        axes[0].plot(one.losses, color=colours[name], linewidth=5.0 if name == next(iter(trained)) else 1.5)
    axes[0].set_xlabel("step", fontsize=9)
    axes[0].set_ylabel("loss", fontsize=9)
    for place, (name, one) in enumerate(trained.items()):
        axes[1].bar(place, one.mib, 0.6, color=colours[name])
        axes[1].text(place, one.mib, f"{one.mib:.0f}", ha="center", va="bottom", fontsize=9)
    axes[1].set_xticks(range(len(trained)), list(trained), fontsize=9)
    axes[1].set_ylabel("memory of the training, MiB", fontsize=9)
    first = next(iter(trained.values()))
    axes[2].plot(*zip(*first.sample, strict=True), ".", color=SKY, markersize=3)
    axes[2].set_aspect("equal")
    axes[2].set_xlabel("made from noise in one step", fontsize=9)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=4, help="sets in a step (default: %(default)s)")
    parser.add_argument("--points", type=int, default=512, help="points of a set (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="file of the plot, SVG or PNG (default: none)")
    parser.add_argument("--json", type=Path, help="file for the curves and the environment as JSON")
    args = parser.parse_args()
    sizes = {name: getattr(args, name) for name in ("steps", "batch", "points", "seed")}
    trained = {}
    for way in WAYS:
        with ProcessPoolExecutor(1, get_context("spawn")) as process:  # its memory is that of one training
            one = trained[way] = process.submit(train, way, **sizes).result()
        print(f"{way:>10}: loss {one.losses[0]:.4f} at first, {one.losses[-1]:.4f} at the end; {one.mib:.0f} MiB; "
              f"{one.seconds:.0f} s of processor time")  # fmt: skip
    one, other = (trained[way].losses for way in WAYS)
    print(f"the losses differ by at most {max(abs(a - b) for a, b in zip(one, other, strict=True)):.1e}")
    if args.plot:
        args.plot.write_bytes(saved(lambda: draw(trained, describe("cpu")["device"]), args.plot.suffix[1:]))
    if args.json:
        from train_gpt import environment

        runs: dict[str, Any] = {way: one._asdict() for way, one in trained.items()}
        args.json.write_text(json.dumps({"environment": environment(), **sizes, "runs": runs}) + "\n")


if __name__ == "__main__":
    main()
