"""Gemma 3 270M writes many answers to one long prompt, with its KV cache on the server and with a local cache.

    .venv/bin/pip install -c constraints.txt '.[examples,server]'
    .venv/bin/python examples/best_of_n.py      # starts its own server
    .venv/bin/python examples/best_of_n.py --answers 16

The server stores the prompt once: the caches of the answers are forks of one cache, and a call reads their common keys
once for all answers. Locally ("at home"), SDPA reads a batch with a copy of the prompt for each answer. Both runs
sample tokens with the same seed. The best answer has the highest mean log-probability of its tokens.
"""

import argparse
import contextlib
import os
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
    """Records when `generate` has the logits of each token."""

    def __init__(self) -> None:
        self.times: list[float] = [time.perf_counter()]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.times.append(time.perf_counter())
        return scores


class Answers(NamedTuple):
    """The tokens (answers, new tokens), the index of the best answer, and seconds for the prompt and for the tokens."""

    tokens: Tensor
    best: int
    prompt_seconds: float
    seconds: float


def write(model: Any, ids: Tensor, count: int, tokens: int, cache: Any) -> Answers:
    """Write `count` answers to the prompt `ids` (1, S), each of `tokens` tokens."""
    torch.manual_seed(0)
    clock = Clock()
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, num_return_sequences=count, do_sample=True,
        max_new_tokens=tokens, min_new_tokens=tokens, logits_processor=[clock], output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    new = output.sequences[:, ids.shape[1] :]
    log_probabilities = [logits.log_softmax(-1).gather(1, new[:, n : n + 1]) for n, logits in enumerate(output.logits)]
    best = int(torch.cat(log_probabilities, 1).mean(1).argmax())
    return Answers(new, best, clock.times[1] - clock.times[0], clock.times[-1] - clock.times[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--url",
        default=os.environ.get("FLASHPOINT_URL"),
        help="a server; without it and FLASHPOINT_URL, one of its own",
    )
    parser.add_argument("--prompt-tokens", type=int, default=1500, help="length of the prompt (default: %(default)s)")
    parser.add_argument("--answers", type=int, default=16, help="number of answers (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of each answer (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="folder in which the file of the weights is assembled")
    args = parser.parse_args()
    model, tokenizer = load(args.folder)
    ids = tokenizer(TEXT.read_text(), return_tensors="pt").input_ids[:, : args.prompt_tokens]
    server = contextlib.nullcontext(args.url) if args.url else own_server()
    with server as url, flashpoint.Client(url, timeout=600) as client, torch.no_grad():
        register(client)
        first: Answers | None = None
        for way in ("at home, SDPA", "cache on the server"):
            home = way.startswith("at home")
            model.set_attn_implementation("sdpa" if home else NAME)
            model.generate(ids[:, :8], do_sample=False, max_new_tokens=1)  # warm-up: the first call loads the weights
            cache = DynamicCache(config=model.config) if home else RemoteCache(client, model.config)
            before = carried(url)
            result = write(model, ids, args.answers, args.tokens, cache)
            sent = carried(url) - before
            if isinstance(cache, RemoteCache):
                cache.close()
            first = first or result
            token_count = args.answers * (args.tokens - 1)
            same = int((result.tokens == first.tokens).all(1).sum())
            print(
                f"{way:<20} prompt {result.prompt_seconds:5.1f} s, then {token_count / result.seconds:6.1f} tokens/s, "
                f"{sent / 1e6:6.1f} MB sent and received, {same} of {args.answers} answers as at home"
            )
        print(f"best: {tokenizer.decode(result.tokens[result.best])!r}")


if __name__ == "__main__":
    main()
