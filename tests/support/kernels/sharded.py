"""A process of two that compare attention of DTensors with attention of the whole tensors, and print what differs.

`python -m tests.support.kernels.sharded` takes RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from its environment.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from flashpoint_kernels import (
    ProblemError,
    attention,
    attention_backward,
    attention_weights,
    key_weights,
    scaled_dot_product_attention,
)
from tests.support.kernels.solving import normal

BATCH, HEADS = Shard(0), Shard(1)
SUMMED = ("attn_mask", "sinks")  # their gradients are sums over processes, in another order


def qkv(batch: int = 2, heads: int = 4, kv_heads: int = 4, layout: str = "bhsd") -> dict[str, Tensor]:
    shapes = {"q": (batch, heads, 5, 16), "k": (batch, kv_heads, 7, 16), "v": (batch, kv_heads, 7, 24)}
    t = {name: normal(*shape, seed=n) for n, (name, shape) in enumerate(shapes.items())}
    return t if layout == "bhsd" else {name: x.transpose(1, 2).contiguous() for name, x in t.items()}


def cases() -> Iterator[tuple[str, dict[str, Tensor], dict[str, Any], Any, Any]]:
    """Yield each case: its name, tensors and options, the placement of q, and that of o."""
    for placement in (BATCH, HEADS, Replicate()):
        yield "plain", qkv(), {}, placement, placement
        yield "causal, grouped heads", qkv(kv_heads=2), {"causal": True}, placement, placement
        more = {"attn_mask": normal(5, 7, seed=5), "sinks": normal(4, seed=6)}
        yield "one mask and sinks", qkv() | more, {"window": (3, -1), "softcap": 5.0}, placement, placement
        more = {"attn_mask": normal(2, 1, 5, 7, seed=7), "alibi_slopes": normal(4, seed=8).abs()}
        yield "a mask of each sequence, slopes", qkv() | more, {}, placement, placement
        more = {"kv_lengths": torch.tensor([7, 3]), "q_lengths": torch.tensor([2, 5]), "offset": torch.tensor([1, 4])}
        yield "lengths and offsets", qkv() | more, {"causal": True}, placement, placement
        blocks = {"block_mask": normal(2, 4, 1, 1, seed=9) > 0}
        yield "blocks", qkv() | blocks, {"block_size": (16, 16)}, placement, placement
    yield "bshd", qkv(layout="bshd"), {"layout": "bshd"}, Shard(2), Shard(2)
    yield "one key head", qkv(kv_heads=1), {}, HEADS, Replicate()
    yield "three sequences", qkv(batch=3), {}, BATCH, Replicate()
    yield "queries", qkv(), {}, Shard(2), Replicate()


def differences(mesh: DeviceMesh) -> Iterator[str]:
    for name, tensors, options, placement, expected in cases():
        where = f"{name} {placement} on {tuple(mesh.shape)}"
        whole, parts = {}, {}
        for n, t in tensors.items():
            differs = n in ("q", "k", "v", "attn_mask", "sinks") and t.is_floating_point()
            whole[n] = t.clone().requires_grad_(differs)
            fits = n in ("q", "k", "v") and (not isinstance(placement, Shard) or t.shape[placement.dim] > 1)
            placements = [*[Replicate()] * (mesh.ndim - 1), placement if fits else Replicate()]
            parts[n] = distribute_tensor(t, mesh, placements).requires_grad_(differs)
        o, lse = attention(**whole, **options, return_lse=True)
        with CommDebugMode() as traffic:
            found, found_lse = attention(**parts, **options, return_lse=True)
        if not isinstance(found, DTensor) or found.placements[-1] != expected:
            yield f"{where}: o is {type(found)}"
        if placement == expected and "kv_lengths" not in tensors and traffic.get_total_counts():
            yield f"{where}: {traffic.get_comm_counts()} communications"
        loss, found_loss = (a.square().sum() + b.nan_to_num(neginf=0).sum() for a, b in ((o, lse), (found, found_lse)))
        loss.backward()
        found_loss.backward()
        pairs = {"o": (found, o), "lse": (found_lse, lse)}
        pairs |= {f"d{n}": (parts[n].grad, t.grad) for n, t in whole.items() if t.requires_grad}
        for answer, (part, right) in pairs.items():
            part = part.full_tensor()
            if not (torch.allclose(part, right, 1e-5, 1e-6) if answer[1:] in SUMMED else torch.equal(part, right)):
                yield f"{where}: {answer} differs by {(part - right).abs().max()}"


def refusals(mesh: DeviceMesh) -> Iterator[str]:
    """Yield the calls that are not refused with these words."""
    t = qkv()
    given = {name: distribute_tensor(x, mesh, [BATCH]) for name, x in t.items()}
    q, k, v = given.values()
    for words, call in {
        "k: must be a DTensor, as the others are": lambda: attention(q, t["k"], v),
        "dropout_p: must be 0 for DTensors": lambda: attention(**given, dropout_p=0.1),
        "layout: must be bhsd or bshd for DTensors": lambda: attention(
            *(x[0].transpose(0, 1) for x in given.values()), layout="thd",
            **{f"cu_seqlens_{n}": torch.tensor([0, length]) for n, length in (("q", 5), ("k", 7))},
        ),
        "a DTensor, which attention_backward does not take": lambda: attention_backward(normal(2, 4, 5, 24), **given),
        "a DTensor, which key_weights does not take": lambda: key_weights(q, k),
        "a DTensor, which attention_weights does not take": lambda: attention_weights(q, k, rows=[0]),
        "dropout_p: must be 0 for DTensors: all": lambda: scaled_dot_product_attention(q, k, v, dropout_p=0.1),
    }.items():  # fmt: skip
        try:
            call()
        except ProblemError as error:
            if words not in str(error):
                yield f"{words}: {error}"
        except Exception as error:
            yield f"{words}: {type(error).__name__}: {error}"
        else:
            yield f"{words}: no error"


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    line = init_device_mesh("cpu", (2,))
    wrong = [*differences(line), *differences(init_device_mesh("cpu", (1, 2))), *refusals(line)]
    print("\n".join(wrong), end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
