"""Requests of very many short sequences: little arithmetic, and much overhead for each sequence."""

import torch

COUNT = 65536  # the most sequences that a server takes by default
OPTIONS = {"softcap": {"softcap": 2.0}, "dropout": {"dropout_p": 0.5, "dropout_seed": 1},
           "reference": {"backend": "reference"}}  # fmt: skip
KINDS = ("plain", "mask", "kv_lengths", "thd", *OPTIONS)


def short_sequences(kind, count=COUNT, dim=16):
    """Return the tensors and the options of `count` sequences of one token; `kind` is one of KINDS.

    If `dim` is not a multiple of 16, a CPU without AVX-512 computes the sequences one by one, which takes many seconds.
    """
    one = torch.ones(count, 1, 1, dim)
    tensors, options = {"q": one, "k": one, "v": one}, dict(OPTIONS.get(kind, {}))
    if kind == "mask":
        tensors["attn_mask"] = torch.zeros(count, 1, 1, 1)
    elif kind == "kv_lengths":
        tensors["kv_lengths"] = torch.ones(count, dtype=torch.int64)
    elif kind == "thd":
        starts = torch.arange(count + 1)
        tensors = {name: t[:, 0] for name, t in tensors.items()} | {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        options["layout"] = "thd"
    return tensors, options
