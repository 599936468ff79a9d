"""The operator of torch that every peer runs, and the simplest wire format for its tensors.

Raw format: a little-endian uint32 with the length of a JSON list of [name, shape], that list, and the float32 tensors.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

GRADS = ("dq", "dk", "dv")
BATCH = 8  # largest number of requests in a batch, for peers that batch
BATCH_SECONDS = 0.001  # longest time that a request waits for a batch


def attend(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `o` from q, k and v (B,H,S,D), or the gradients if `tensors` also has `do`."""
    q, k, v = (tensors[name] for name in "qkv")
    if "do" not in tensors:
        with torch.inference_mode():
            return {"o": scaled_dot_product_attention(q, k, v)}
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    o = scaled_dot_product_attention(q, k, v)
    return dict(zip(GRADS, torch.autograd.grad(o, (q, k, v), tensors["do"]), strict=True))


def attend_all(requests: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Return the answers of a batch: requests of the same shape and direction share one call."""
    answers: list[dict[str, Tensor]] = [{}] * len(requests)
    groups: dict[object, list[int]] = {}
    for i, tensors in enumerate(requests):
        groups.setdefault((tensors["q"].shape, "do" in tensors), []).append(i)
    for members in groups.values():
        first = requests[members[0]]
        whole = attend({name: torch.cat([requests[i][name] for i in members]) for name in first})
        parts = {name: t.split(first["q"].shape[0]) for name, t in whole.items()}
        for place, i in enumerate(members):
            answers[i] = {name: split[place] for name, split in parts.items()}
    return answers


def unpack(body: bytearray) -> dict[str, Tensor]:
    (length,) = struct.unpack_from("<I", body)
    tensors, offset = {}, 4 + length
    for name, shape in json.loads(body[4:offset]):
        count = math.prod(shape)
        tensors[name] = torch.frombuffer(body, dtype=torch.float32, count=count, offset=offset).view(shape)
        offset += 4 * count
    return tensors


def pack(tensors: Mapping[str, Tensor]) -> bytes:
    whole = {name: t.contiguous() for name, t in tensors.items()}
    head = json.dumps([[name, list(t.shape)] for name, t in whole.items()]).encode()
    return b"".join([struct.pack("<I", len(head)), head, *(t.numpy().data for t in whole.values())])
