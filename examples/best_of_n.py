"""Gemma 3 270M writes many answers to one long prompt: with its KV cache on the server, and at home.

    .venv/bin/pip install -c constraints.txt '.[examples,server]'
    .venv/bin/python examples/best_of_n.py      # with a server of its own
    .venv/bin/python examples/best_of_n.py --url http://localhost:8000 --answers 16

The server holds the prompt once: the caches of the answers are forks of one cache, and a call reads the keys that they
share once for all of them. At home, SDPA reads a batch in which each answer has a copy of the prompt. Both draw with
the same seed. The best answer is the one whose tokens have the highest mean log-probability.
"""

import argparse
import contextlib
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gemma import carried, load, own_server
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor

import flashpoint
from flashpoint.integrations.transformers import NAME, RemoteCache, register

TEXT = Path(__file__).parent / "data/python-reference.txt"


class Clock(LogitsProcessor):
    """Notes when `generate` has the logits of each token."""

    def __init__(self) -> None:
        self.times: list[float] = [time.perf_counter()]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.times.append(time.perf_counter())
        return scores


class Answers(NamedTuple):
    """Tokens (answers, new tokens), the number of the best answer, and seconds for the prompt and for the tokens."""

    tokens: Tensor
    best: int
    prompt_seconds: float
    seconds: float


def write(model: Any, ids: Tensor, count: int, tokens: int, cache: Any) -> Answers:
    """Write `count` answers of `tokens` tokens to the prompt `ids` (1, S)."""
    torch.manual_seed(0)
    clock = Clock()
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, num_return_sequences=count, do_sample=True,
        max_new_tokens=tokens, min_new_tokens=tokens, logits_processor=[clock], output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    new = found.sequences[:, ids.shape[1] :]
    steps = [logits.log_softmax(-1).gather(1, new[:, n : n + 1]) for n, logits in enumerate(found.logits)]
    best = int(torch.cat(steps, 1).mean(1).argmax())
    return Answers(new, best, clock.times[1] - clock.times[0], clock.times[-1] - clock.times[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server; one of its own where none is given")
    parser.add_argument("--prompt-tokens", type=int, default=1500, help="of the prompt (default: %(default)s)")
    parser.add_argument("--answers", type=int, default=16, help="to write (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=24, help="of each answer (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where the file of the weights is put together")
    arguments = parser.parse_args()
    model, tokenizer = load(arguments.folder)
    ids = tokenizer(TEXT.read_text(), return_tensors="pt").input_ids[:, : arguments.prompt_tokens]
    own = contextlib.nullcontext(arguments.url) if arguments.url else own_server()
    with own as url, flashpoint.Client(url, timeout=600) as client, torch.no_grad():
        register(client)
        first: Answers | None = None
        for way in ("at home, SDPA", "cache on the server"):
            home = way.startswith("at home")
            model.set_attn_implementation("sdpa" if home else NAME)
            model.generate(ids[:, :8], do_sample=False, max_new_tokens=1)  # not timed: the first reads the weights
            cache = DynamicCache(config=model.config) if home else RemoteCache(client, model.config)
            before = carried(url)
            found = write(model, ids, arguments.answers, arguments.tokens, cache)
            sent = carried(url) - before
            if isinstance(cache, RemoteCache):
                cache.close()
            first = first or found
            steps = arguments.answers * (arguments.tokens - 1)
            same = int((found.tokens == first.tokens).all(1).sum())
            print(
                f"{way:<20} prompt {found.prompt_seconds:5.1f} s, then {steps / found.seconds:6.1f} tokens/s, "
                f"{sent / 1e6:6.1f} MB sent and received, {same} of {arguments.answers} answers as at home"
            )
        print(f"best: {tokenizer.decode(found.tokens[found.best])!r}")


if __name__ == "__main__":
    main()
