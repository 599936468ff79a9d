"""Each option by itself, beside attention written out with its whole matrix: `python benchmarks/options.py`.

At (1,8,2048,64) in float32 on the CPU, `flashpoint_kernels.attention` with `auto`, forward and forward with gradient,
in turn with the same formula in plain torch operations and autograd; beside them, without options, torch's own fused
operator at several lengths. Wanted: `auto` within 5% of torch's operator where it covers the options, and elsewhere
twice as fast as the formula, in a quarter of the memory that it holds beside its inputs and answers.

Much of the formula's time is the system's, for memory that is new at each call: all is timed in a process as torch is,
and again in one where torch asks for huge pages (THP_MEM_ALLOC_ENABLE=1), to which no target applies. Goes to
benchmarks/results/options-<cpu>.json. Exits with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from statistics import median
from typing import Any

import torch
from record import write
from serving import MALLOC, ROOT, environment, target
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flashpoint_kernels import attention
from flashpoint_kernels.timing.clock import peak_bytes

HEADS, LENGTH, DIM = 8, 2048, 64
SHORTER = (128, 512, 1024, 2048)  # for torch's operator, which short calls are compared with
FASTER, MEMORY, WITHIN = 2.0, 0.25, 1.05

Tensors = dict[str, Tensor]


def written_out(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None, kv_lengths: Tensor | None = None, causal: bool = False,
    window: tuple[int, int] = (-1, -1), softcap: float = 0.0, dropout_p: float = 0.0, dropout_seed: int | None = None,
) -> Tensor:  # fmt: skip
    """The contract's formula with s (B,Hq,Sq,Sk) in memory, in float32: what one would write.

    But for dropout, whose mask is torch's own here: cheaper than the contract's, and another one.
    """
    dtype = q.dtype
    q, k, v = q.float(), k.float(), v.float()
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.mT / math.sqrt(q.shape[-1])
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    i, j = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2], torch.arange(k.shape[2])
    if alibi_slopes is not None:
        s = s - alibi_slopes[:, None, None] * (i - j).abs()
    hidden = []
    if causal:
        hidden.append(j > i)
    if window[0] >= 0:
        hidden.append(j < i - window[0])
    if window[1] >= 0:
        hidden.append(j > i + window[1])
    if kv_lengths is not None:
        hidden.append(j >= kv_lengths[:, None, None, None])
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        hidden.append(~attn_mask)
    elif attn_mask is not None:
        s = s + attn_mask
    if hidden:
        s = s.masked_fill(reduce(torch.logical_or, hidden), float("-inf"))
    if sinks is None:
        p = torch.softmax(s, -1)
    else:
        sink = sinks[:, None, None].expand(*s.shape[:-1], 1)
        p = torch.softmax(torch.cat([s, sink], -1), -1)[..., :-1]
    if dropout_p:
        p = torch.dropout(p, dropout_p, True)
    return (p @ v).to(dtype)


def options() -> dict[str, tuple[Tensors, dict[str, Any]]]:
    """Each option's tensors and keywords; names ending in a dtype or a shape are about those."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def qkv(kv_heads: int = HEADS, value_dim: int = DIM, dtype: torch.dtype = torch.float32) -> Tensors:
        shapes = ((HEADS, DIM), (kv_heads, DIM), (kv_heads, value_dim))
        return {n: normal(1, h, LENGTH, d).to(dtype) for n, (h, d) in zip("qkv", shapes, strict=True)}

    allowed = torch.rand((LENGTH, LENGTH), generator=generator) < 0.8
    return {
        "window [256, 0], causal": (qkv(), {"causal": True, "window": (256, 0)}),
        "window [1024, 1024]": (qkv(), {"window": (1024, 1024)}),
        "softcap": (qkv(), {"softcap": 30.0}),
        "softcap, causal": (qkv(), {"softcap": 30.0, "causal": True}),
        "alibi_slopes, causal": (qkv() | {"alibi_slopes": torch.full((HEADS,), 0.1)}, {"causal": True}),
        "sinks": (qkv() | {"sinks": normal(HEADS)}, {}),
        "attn_mask, bool": (qkv() | {"attn_mask": allowed}, {}),
        "attn_mask, float": (qkv() | {"attn_mask": normal(LENGTH, LENGTH)}, {}),
        "attn_mask, float, with its gradient": (qkv() | {"attn_mask": normal(HEADS, LENGTH, LENGTH)}, {}),
        "dropout_p 0.1": (qkv(), {"dropout_p": 0.1, "dropout_seed": 1}),
        "kv_lengths": (qkv() | {"kv_lengths": torch.tensor([1500])}, {}),
        "Hk 2 (GQA)": (qkv(kv_heads=2), {}),
        "Dv 128": (qkv(value_dim=128), {}),
        "float16": (qkv(dtype=torch.float16), {}),
        "bfloat16, causal": (qkv(dtype=torch.bfloat16), {"causal": True}),
    }


def call_of(
    attend: Callable[..., Any], tensors: Tensors, keywords: Mapping[str, Any], gradient: str
) -> Callable[[], Any]:
    """A call of the forward, or of it and the gradient of q, k, v, sinks and a float mask of each head's own."""
    own = dict(tensors)
    leaves = []
    for name, t in tensors.items():
        wanted = name in "qkv" or name == "sinks" or (name == "attn_mask" and t.ndim == 3)
        if gradient == "with gradient" and wanted and t.is_floating_point():
            own[name] = t.clone().requires_grad_()
            leaves.append(own[name])
    do = torch.ones(1, HEADS, LENGTH, tensors["v"].shape[-1], dtype=tensors["q"].dtype)

    def call() -> Any:
        o = attend(**own, **keywords)
        return torch.autograd.grad(o, leaves, do[:, :, : o.shape[2]]) if leaves else o

    return call


def seconds(call: Callable[[], Any], least: float = 0.0) -> float:
    """One call's, or the median of as many as fill `least` seconds."""
    taken: list[float] = []
    while not taken or sum(taken) < least:
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return median(taken)


def working_memory(call: Callable[[], Any]) -> float:
    """MiB that a call holds at most beside its inputs and its answers."""
    answers = call()
    kept = sum(t.nbytes for t in ((answers,) if isinstance(answers, Tensor) else answers))
    del answers
    held = peak_bytes(call, "cpu")
    if held is None:
        raise SystemExit("this system does not tell how much memory a process has held: run it on Linux")
    return (held - kept) / 2**20


def pair(ours: Callable[[], Any], other: Callable[[], Any], rounds: int, least: float = 0.0) -> dict[str, float]:
    """Milliseconds of each, and the median over rounds of what the other takes of ours."""
    ours(), other()
    found = [(seconds(ours, least), seconds(other, least)) for _ in range(rounds)]
    mine, theirs = ([pair[n] for pair in found] for n in (0, 1))
    return {
        "ms": round(median(mine) * 1e3, 3),
        "other_ms": round(median(theirs) * 1e3, 3),
        "times": round(median(b / a for a, b in found), 3),
    }


def measure(rounds: int) -> None:
    """Write each row to standard output, a line of JSON: those of `options`, then those beside torch's operator."""
    for name, (tensors, keywords) in options().items():
        for gradient in ("forward", "with gradient"):
            ours = call_of(attention, tensors, keywords, gradient)
            other = call_of(written_out, tensors, keywords, gradient)
            row: dict[str, Any] = {"option": name, "pass": gradient, **pair(ours, other, rounds)}
            mine, theirs = working_memory(ours), working_memory(other)
            row |= {"mib": round(mine, 1), "other_mib": round(theirs, 1), "memory": round(mine / theirs, 3)}
            print(json.dumps(row), flush=True)
    for length in SHORTER:
        shape = (1, HEADS, length, DIM)
        q, k, v = (torch.randn(shape) for _ in range(3))
        for causal in (False, True):
            found = pair(
                lambda q=q, k=k, v=v, c=causal: attention(q, k, v, causal=c),
                lambda q=q, k=k, v=v, c=causal: scaled_dot_product_attention(q, k, v, is_causal=c),
                rounds, 0.3,
            )  # fmt: skip
            print(json.dumps({"length": length, "causal": causal, **found}), flush=True)


def measured(rounds: int, huge_pages: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of `measure` in a process of its own: those with an option, and those beside torch's operator."""
    variables = {**os.environ, **MALLOC, "THP_MEM_ALLOC_ENABLE": str(int(huge_pages))}
    command = [sys.executable, __file__, "--rounds", str(rounds), "--measure"]
    rows = []
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            print("huge pages" if huge_pages else "", line, end="", flush=True)
            rows.append(json.loads(line))
    if child.returncode:
        raise SystemExit(child.returncode)
    return [row for row in rows if "option" in row], [row for row in rows if "length" in row]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        measure(asked.rounds)
        return 0
    made = environment()
    (rows, fused), (huge, _) = measured(asked.rounds, False), measured(asked.rounds, True)
    for row, other in zip(rows, huge, strict=True):
        row["huge_pages"] = {name: other[name] for name in ("ms", "other_ms", "times")}
    long = [row for row in fused if row["length"] == LENGTH]
    targets = [
        target("over the formula written out, least", min(row["times"] for row in rows), "times faster", least=FASTER),
        target("memory / the formula's, most", max(row["memory"] for row in rows), "size", most=MEMORY),
        target(
            "time / torch's own operator's at N 2048, most", max(1 / row["times"] for row in long), "time", most=WITHIN
        ),
    ]
    result = {"environment": made, "rows": rows, "fused": fused, "targets": targets}
    write(asked.out, "options", result)
    return 0 if all(t["met"] for t in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
