"""Tables of a model that decodes with its cache on the server, from benchmarks/results."""

from __future__ import annotations

from typing import Any

from flashpoint.commands.terminal.tables import number

from .markdown import NOT_MEASURED, Result, by_machine, made_on, named, results, table, targets

LAYERS = 18  # layers of Gemma 3 270M
# name, key heads, head dimension, bytes of a number
SHAPES = (
    ("Gemma 3 270M, 1 key head, D 256, float32", 1, 256, 4),
    ("8 key heads, D 128, bfloat16", 8, 128, 2),
    ("32 key heads, D 128, bfloat16", 32, 128, 2),
)


@by_machine("gemma", "torch", "transformers")
def gemma(result: Result) -> str:
    """Return the targets, the speed and the bytes of Gemma 3 with its cache on the server."""
    found, modes = result["decode"], result["modes"]
    home, away = found["tokens_per_second"].values()
    rows = [
        ("tokens a second at home, SDPA", number(home)),
        ("tokens a second, cache on the server", number(away)),
        ("more time for a token and layer, ms", number(_more(result))),
        ("bytes for a token, sent and received", f"{found['bytes_per_token']:,}"),
        *((f"the tokens of eager attention: {mode}", "yes" if same else "no") for mode, same in modes.items()),
    ]
    text = f"{targets(result)}\n" + table([f"after {found['prompt_tokens']:,} tokens", ""], rows)
    if many := result.get("answers"):
        text += "\n" + _answers(many) + "\n" + _stages(result["call_ms"])
    return text


def _answers(many: dict[str, Any]) -> str:
    """Return the speed of many answers to one prompt, locally and with the cache on the server."""
    seconds, tokens = many["prompt_seconds"], many["tokens_per_second"]
    rows = [
        ("seconds for the prompt", *map(number, seconds.values())),
        ("tokens a second afterwards", *map(number, tokens.values())),
        ("MB sent and received", "0", number(many["bytes"] / 1e6)),
    ]
    head = [f"{many['answers']} answers to {many['prompt_tokens']:,} tokens", "at home, SDPA", "cache on the server"]
    return table(head, rows) + f"\n{many['same_answers']} of {many['answers']} answers are the same.\n"


def _stages(calls: dict[str, dict[str, float]]) -> str:
    """Return the milliseconds of a layer's call: the client's wait, and the stages in the server."""
    names = list(dict.fromkeys(name for stages in calls.values() for name in stages))
    rows = [(name, *(f"{stages.get(name, 0.0):.2f}" for stages in calls.values())) for name in names]
    return table(["a layer's call, ms", *(f"{count} sequences" for count in calls)], rows)


@named
def lora() -> str:
    """Return the losses of LoRA training with local and with served attention, and their largest difference."""
    rows = []
    for result in results("lora"):
        home, served = result["curves"]["home"], result["curves"]["served"]
        made = made_on(result["environment"], "torch")
        losses = (f"{home[0]:.4f} to {home[-1]:.4f}", f"{served[0]:.4f} to {served[-1]:.4f}")
        rows.append((made, result["steps"], result["context"], *losses, f"{result['apart']:.1e}"))
    head = ["machine", "steps", "tokens a step", "loss at home", "served", "at most apart"]
    return table(head, rows) if rows else NOT_MEASURED


@named
def break_even() -> str:
    """Return the predicted least length at which decoding is faster with the cache on the server than locally."""
    text = ""
    rates = {result["environment"]["device"]: result["rates"] for result in results("capacity")}
    for result in results("gemma"):
        reads = rates.get(result["environment"]["device"]) or next(iter(rates.values()))
        seconds, memory = _more(result) / 1e3, reads["memory"]
        made = result["environment"]
        text += (
            f"\nA call costs {seconds * 1e3:.2f} ms more than local attention, which reads keys at "
            f"{number(memory / 1e9)} GB/s ({made['device']}, {made['date'][:10]}). Predicted: remote is faster\n\n"
        )
        for name, heads, dim, size in SHAPES:
            of_token = 2 * heads * dim * size
            tokens = round(seconds * memory / of_token, -2)
            text += f"- from {tokens:,.0f} tokens for {name} ({of_token:,} bytes a token)\n"
    return text or NOT_MEASURED


def _more(result: dict[str, Any]) -> float:
    """Return by how many milliseconds a layer's call to the server takes longer than its local attention."""
    home, away = result["decode"]["tokens_per_second"].values()
    return (1 / away - 1 / home) / LAYERS * 1e3
