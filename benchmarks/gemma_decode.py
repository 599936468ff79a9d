"""Compare Gemma 3 270M with its KV cache on the server and with a local cache: tokens, bytes and speed.

`python benchmarks/gemma_decode.py` takes eight minutes on two quiet cores, and needs `pip install .[examples]`. First
the model continues a prompt of 1,800 tokens, alternately with local SDPA and with the cache on a server on the same
cores. The server counts the bytes of the bodies of one more continuation. Next it times
calls of one layer: the client's wait, and the stages that the server reports. Then the model writes 16 answers to a
prompt of 1,500 tokens with local SDPA and with the cache on the server (examples/best_of_n.py). Last, each mode of
`generate` must return the tokens of local eager attention.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from runner import ROOT, Args, in_turn, medians, option, ratio, run, target
from serving import service, with_bytes
from transformers import DynamicCache, Gemma3ForCausalLM

sys.path.append(str(ROOT / "examples"))
from best_of_n import write
from gemma import load

import flashpoint
from flashpoint.integrations.transformers import NAME, RemoteCache, register

TEXT = ROOT / "examples/data/python-reference.txt"
PROMPT, NEW, ROUNDS = 1800, 24, 7
LEAST_RATIO, MOST_BYTES = 0.8, 250_000
ANSWERS, ANSWERED = 16, 1500  # number of answers to one prompt, and tokens of the prompt
WINDOW = (511, -1)  # sliding window of most layers, in tokens
Remote = Callable[[], RemoteCache]


def prompts(tokenizer: Any, lengths: list[int]) -> dict[str, torch.Tensor]:
    """Return prompts of these lengths, padded on the left."""
    tokens = tokenizer(TEXT.read_text(), return_tensors="pt").input_ids[0]
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, -length:], mask[row, -length:] = tokens[1000 * row : 1000 * row + length], 1
    return {"input_ids": ids, "attention_mask": mask}


def draft(model: Any) -> Any:
    """Return a draft model that has only the model's first four layers, so that its drafts are often wrong."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers, config.layer_types = 4, config.layer_types[:4]
    config._attn_implementation = "sdpa"
    small = Gemma3ForCausalLM(config).eval()
    small.load_state_dict(model.state_dict(), strict=False)
    return small


def same(model: Any, tokenizer: Any, remote: Remote) -> dict[str, bool]:
    """Return whether each mode of `generate` gives the same tokens as eager attention."""
    same_tokens = {}
    beyond = prompts(tokenizer, [600])
    modes: dict[str, dict[str, Any]] = {
        "greedy, beyond the window": beyond,
        "four beams": {**prompts(tokenizer, [80]), "num_beams": 4},
        "a padded batch of three": prompts(tokenizer, [70, 20, 45]),
        "assisted, prompt lookup": {**beyond, "prompt_lookup_num_tokens": 5},
        "assisted, draft model": {**prompts(tokenizer, [60]), "assistant_model": draft(model)},
    }
    for mode, inputs in modes.items():
        model.set_attn_implementation("eager")
        sizes = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
        expected = model.generate(**inputs, **sizes)
        model.set_attn_implementation(NAME)
        with remote() as cache:
            same_tokens[mode] = torch.equal(model.generate(**inputs, **sizes, past_key_values=cache), expected)
        print(f"{mode}: {'the same tokens' if same_tokens[mode] else 'OTHER TOKENS'}", flush=True)
    return same_tokens


def decoded(model: Any, first: torch.Tensor, cache: Any) -> tuple[list[int], float]:
    """Decode greedily after a cache that contains the prompt; return the tokens and the seconds per token."""
    token, tokens = first, []
    start = time.perf_counter()
    for _ in range(NEW):
        token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
        tokens.append(int(token))
    return tokens, (time.perf_counter() - start) / NEW


def speed(model: Any, tokenizer: Any, remote: Remote, port: int) -> dict[str, Any]:
    """Return the speed after a long prompt, and the bytes per token, locally and with the cache on the server."""
    ids = prompts(tokenizer, [PROMPT])["input_ids"]
    caches: dict[str, Any] = {"eager": DynamicCache(config=model.config), "sdpa": DynamicCache(config=model.config)}
    caches[NAME] = remote()
    first, tokens = {}, {}

    def continued(way: str) -> float:
        """Continue the prompt with a copy of its cache, and return the seconds per token."""
        model.set_attn_implementation(way)
        cache = copy.deepcopy(caches[way])
        tokens[way], seconds = decoded(model, first[way], cache)
        if isinstance(cache, RemoteCache):
            cache.close()
        return seconds

    for way, cache in caches.items():
        model.set_attn_implementation(way)
        first[way] = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
    continued("eager")
    rounds = list(in_turn({way: partial(continued, way) for way in ("sdpa", NAME)}, ROUNDS))
    _, nbytes = with_bytes(port, partial(continued, NAME))
    return {
        "prompt_tokens": PROMPT, "new_tokens": NEW, "rounds": ROUNDS,
        "same_tokens_as_eager": tokens[NAME] == tokens["eager"],
        "same_tokens_at_home": tokens["sdpa"] == tokens["eager"],
        "tokens_per_second": {way: round(1 / statistics.median(row[way] for row in rounds), 2) for way in rounds[0]},
        "ratio": round(ratio(rounds, "sdpa", NAME), 3),
        "ratios": [round(row["sdpa"] / row[NAME], 3) for row in rounds],
        "bytes_per_token": round(nbytes / NEW),
    }  # fmt: skip


def answers(model: Any, tokenizer: Any, remote: Remote, port: int) -> dict[str, Any]:
    """Return seconds, tokens and bytes for many answers to one prompt, locally and with the cache on the server."""
    ids = prompts(tokenizer, [ANSWERED])["input_ids"]
    results = {}
    for way in ("sdpa", NAME):
        model.set_attn_implementation(way)
        cache = remote() if way == NAME else DynamicCache(config=model.config)
        results[way] = with_bytes(port, partial(write, model, ids, ANSWERS, NEW, cache))
        if isinstance(cache, RemoteCache):
            cache.close()
    local, on_server = (results[way][0] for way in ("sdpa", NAME))
    return {
        "prompt_tokens": ANSWERED, "answers": ANSWERS, "new_tokens": NEW,
        "prompt_seconds": {way: round(run.prompt_seconds, 2) for way, (run, _) in results.items()},
        "tokens_per_second": {way: round(ANSWERS * (NEW - 1) / run.seconds, 2) for way, (run, _) in results.items()},
        "ratio_of_tokens": round(local.seconds / on_server.seconds, 3),
        "ratio": round((local.prompt_seconds + local.seconds) / (on_server.prompt_seconds + on_server.seconds), 3),
        "same_answers": int((local.tokens == on_server.tokens).all(1).sum()),
        "bytes": round(results[NAME][1]),
    }  # fmt: skip


def stages(client: flashpoint.Client, count: int) -> dict[str, float]:
    """Return the median milliseconds of one layer's call, as the client sees it, and of the server's stages of it.

    The call has one new token for each of `count` sequences.
    """
    (root,) = client.caches(1, kv_heads=1, head_dim=256)
    root.append(torch.randn(1, 1, ANSWERED, 256), torch.randn(1, 1, ANSWERED, 256))
    caches = client.fork_caches([root] * count)
    q, k, v = (torch.randn(count, heads, 1, 256) for heads in (4, 1, 1))
    samples = []
    for _ in range(200):
        began = time.perf_counter()
        _, meta = client.attention(
            q, k, v, caches=caches, at=[ANSWERED] * count, causal=True, window=WINDOW, with_meta=True
        )
        samples.append({"call": 1000 * (time.perf_counter() - began), **meta.timings})
    client.delete_caches([root, *caches])
    return medians(samples[20:])


@torch.no_grad()
def measure(args: Args) -> dict[str, Any]:
    model, tokenizer = load(args.folder)
    with service() as (_, port, _), flashpoint.Client(f"http://127.0.0.1:{port}", timeout=600) as client:
        register(client)
        remote = partial(RemoteCache, client, model.config)
        decoding = speed(model, tokenizer, remote, port)
        calls = {str(count): stages(client, count) for count in (1, ANSWERS)}
        many = answers(model, tokenizer, remote, port)
        modes = same(model, tokenizer, remote)
    agreeing = sum(modes.values()) + decoding["same_tokens_as_eager"]
    targets = [
        target("modes that give the tokens of eager attention at home", agreeing, "modes", least=len(modes) + 1),
        target("tokens a second, of those at home with SDPA", decoding["ratio"], "rate", least=LEAST_RATIO),
        target("bytes of a token", decoding["bytes_per_token"], "bytes", most=MOST_BYTES),
        target(f"{ANSWERS} answers, with the prompt: SDPA's seconds over ours", many["ratio"], "times", least=1),
        target(f"{ANSWERS} answers: tokens a second, of those at home", many["ratio_of_tokens"], "rate", least=1),
    ]
    return {"targets": targets, "modes": modes, "decode": decoding, "answers": many, "call_ms": calls}


if __name__ == "__main__":
    folder = option(None, "folder in which the file of the weights is assembled", type=Path)
    run(measure, "gemma", packages=("torch", "transformers"), folder=folder)
