"""Train a small character-level GPT from one seed with several kinds of attention; the loss curves are the same.

    .venv/bin/python examples/train_gpt.py                           # our attention beside torch's own
    make serve                                                       # in another terminal; then also over HTTP:
    .venv/bin/python examples/train_gpt.py --attention local sdpa served saved

`local` is flashpoint_kernels.attention, `sdpa` is torch's scaled_dot_product_attention. `served` sends every attention
to a Flashpoint server, forward and backward; `saved` saves the forward there, and sends less. Everything else runs here
on the CPU. At the end the model of the first kind writes some text, character by character. --plot draws the curves.
The training text is a part of the Python Language Reference, see data/README.md.
"""

import argparse
import functools
import json
import os
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import flashpoint
import flashpoint.torch
from flashpoint.plots.style import BLACK, RULE, SKY, VERMILION, panels, saved
from flashpoint_kernels import attention
from flashpoint_kernels.modules import Block
from flashpoint_kernels.timing.device import describe

TEXT = Path(__file__).parent / "data" / "python-reference.txt"
WAYS = ("local", "sdpa", "served", "saved")


class Gpt(nn.Module):
    """A model that maps characters (B, S), int64, to logits (B, S, vocabulary) of the character after each position."""

    def __init__(
        self, vocabulary: int, *, context: int, dim: int, heads: int, kv_heads: int, layers: int,
        attention: Callable[..., Any],
    ) -> None:  # fmt: skip
        super().__init__()
        self.character = nn.Embedding(vocabulary, dim)
        self.position = nn.Embedding(context, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads, kv_heads, attention=attention) for _ in range(layers)))
        self.norm = nn.LayerNorm(dim, bias=False)
        self.logits = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.character(text) + self.position.weight[: text.shape[1]]
        logits: Tensor = self.logits(self.norm(self.blocks(x)))
        return logits


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, dropout_p: float, **_: Any) -> Tensor:
    """Call torch's attention with the interface that `Block` needs: layout (B, S, H, D), grouped heads, no window."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    o = scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=causal, enable_gqa=True)
    return o.transpose(1, 2)


def way(name: str, client: flashpoint.Client, backend: str = "tiled") -> Callable[..., Any]:
    """Return the attention function of the kind `name`.

    The default backend is `tiled`, tiles in plain torch. On a CPU, `auto` would run the kernels in C if possible.
    """
    if name in ("served", "saved"):
        return functools.partial(flashpoint.torch.attention, client=client, backend=backend, save=name == "saved")
    return functools.partial(attention, backend=backend) if name == "local" else sdpa


class Trained(NamedTuple):
    """The result of one training."""

    losses: list[float]  # losses in nats per character, before each step
    model: Gpt
    alphabet: dict[str, int]
    context: int

    def write(self, start: str, count: int, *, seed: int = 0, temperature: float = 0.7) -> str:
        """Return `start` and `count` more characters, each drawn from the model's distribution."""
        letters = list(self.alphabet)
        codes = [self.alphabet[character] for character in start]
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _ in range(count):
                logits = self.model(torch.tensor([codes[-self.context :]]))[0, -1]
                chances = torch.softmax(logits / temperature, 0)
                codes.append(int(torch.multinomial(chances, 1, generator=generator)))
        return "".join(letters[code] for code in codes)


def train(
    attention: Callable[..., Any], *, seed: int = 0, steps: int = 300, batch: int = 8, context: int = 64,
    dim: int = 64, heads: int = 4, kv_heads: int = 2, layers: int = 2, rate: float = 3e-3,
) -> Trained:  # fmt: skip
    """Train `steps` steps with AdamW; `seed` determines the weights and batches."""
    text = TEXT.read_text(encoding="utf-8")
    alphabet = {character: n for n, character in enumerate(sorted(set(text)))}
    codes = torch.tensor([alphabet[character] for character in text])
    torch.manual_seed(seed)
    model = Gpt(
        len(alphabet), context=context, dim=dim, heads=heads, kv_heads=kv_heads, layers=layers, attention=attention
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(codes) - context, (batch, 1))
        sample = codes[starts + torch.arange(context + 1)]
        loss = cross_entropy(model(sample[:, :-1]).flatten(0, 1), sample[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, model, alphabet, context)


def draw(curves: dict[str, list[float]], about: str) -> Figure:
    """Draw the loss curves in the upper panel, and the difference of each from the first curve in the lower one."""
    first, *others = curves
    # Each curve is thinner than the curves before it, so that they stay visible below it.
    styles = {
        "local": (VERMILION, "-", 6.0),
        "sdpa": (BLACK, "-", 2.5),
        "served": (SKY, "--", 1.5),
        "saved": (RULE, ":", 1.0),
    }
    key = [Line2D([], [], label=name, color=styles[name][0], linestyle=styles[name][1], linewidth=styles[name][2])
           for name in curves]  # fmt: skip
    marks = dict(zip(others, "xo+", strict=False))
    key += [Line2D([], [], label=f"{name} from {first}", color=styles[name][0], marker=mark, linestyle="none")
            for name, mark in marks.items()]  # fmt: skip
    figure, axes = panels(
        "A small GPT trained from one seed", about, 1 + bool(others), key, columns=1, panel=(8.0, 2.8), keys=len(curves)
    )
    for name, losses in curves.items():
        colour, line, width = styles[name]
        axes[0].plot(losses, color=colour, linestyle=line, linewidth=width)
    for name, mark in marks.items():
        differences = [abs(a - b) for a, b in zip(curves[name], curves[first], strict=True)]
        axes[-1].plot(differences, mark, color=styles[name][0], markersize=4)
        axes[-1].ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        axes[-1].set_ylabel("difference of loss", fontsize=9)
    axes[0].set_ylabel("loss, nats a character", fontsize=9)
    axes[-1].set_xlabel("step", fontsize=9)
    return figure


def environment() -> dict[str, Any]:
    """Return the device and versions, the commit of this clone, the date, and the machine's load."""
    command = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(command, cwd=TEXT.parent, capture_output=True, text=True, check=False).stdout.strip()
    now = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "load_average": os.getloadavg()}
    return {**describe("cpu"), "commit": commit or "unknown", **now}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT with attention computed in several ways")
    parser.add_argument("--attention", nargs="+", choices=WAYS, default=["local", "sdpa"], help="default: local sdpa")
    parser.add_argument(
        "--url", help="the server of `served` and `saved` (default: FLASHPOINT_URL, or http://localhost:8000)"
    )
    parser.add_argument("--backend", default="tiled", help="backend of local, served and saved (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--plot", default="train-gpt.svg", help="file of the plot, SVG or PNG; none if empty (default: %(default)s)"
    )
    parser.add_argument("--write", type=int, default=200, help="characters to write at the end (default: %(default)s)")
    parser.add_argument("--json", help="file for the curves and the environment as JSON")
    args = parser.parse_args()
    curves, text = {}, ""
    with flashpoint.Client(args.url) as client:
        for name in dict.fromkeys(args.attention):
            trained = train(way(name, client, args.backend), seed=args.seed, steps=args.steps)
            curves[name] = trained.losses
            print(f"{name:>6}: loss {curves[name][0]:.4f} at first, {curves[name][-1]:.4f} at step {args.steps}")
            text = text or trained.write("The ", args.write)
    first, *others = curves
    for name in others:
        difference = max(abs(a - b) for a, b in zip(curves[name], curves[first], strict=True))
        print(f"{name} is at most {difference:.1e} from {first}")
    print(f"\n{first} writes:\n{text}")
    if args.plot:
        kind = "png" if args.plot.endswith(".png") else "svg"
        Path(args.plot).write_bytes(saved(lambda: draw(curves, describe("cpu")["device"]), kind))
    if args.json:
        result = {"environment": environment(), "seed": args.seed, "backend": args.backend, "curves": curves}
        result["text"] = text
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
