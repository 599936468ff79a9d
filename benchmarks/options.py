"""Each option by itself, beside the formula, FlexAttention and torch's operator: `python benchmarks/options.py`.

At (1,8,2048,64) in float32 on the CPU, `flashpoint_kernels.attention` with `auto`, in turn with another in one process:

    forward, gradient   attention written out with its whole matrix, in plain torch operations and autograd
    flex                FlexAttention by torch.compile, where it has the option (options_peers.py); needs a C++ compiler
    decode              torch's fused operator, one query of 8 sequences over 4,096 keys, in pages too
    short               torch's fused operator without options, at several lengths

`--only NAME` measures one of them, in at most 7 minutes, and leaves what the file has of the others. With `--runs N`
the numbers are medians of N runs, and a row also has the ratio of every run. Wanted: of FlexAttention's speed 0.85 in
the geometric mean and 0.7 at least; twice as fast as the formula, in a quarter of the memory that it holds beside its
inputs and answers; decode as each row says; within 5% of torch's operator at N 2048.

Much of the formula's time is the system's, for memory that is new at each call: it is timed in a process as torch is,
where the option is to be twice as fast, and again in one where torch asks for huge pages (THP_MEM_ALLOC_ENABLE=1): 1.2
times forward, as fast with the gradient. Goes to benchmarks/results/options-<cpu>.json. Exits with 1 where a target is
missed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch
from alternate import pair
from record import file_name, write
from serving import MALLOC, ROOT, environment, target
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flashpoint_kernels import attention
from flashpoint_kernels.timing.clock import peak_bytes

HEADS, LENGTH, DIM = 8, 2048, 64
SHORTER = (128, 512, 1024, 2048)  # for torch's operator, which short calls are compared with
FASTER, MEMORY, WITHIN = 2.0, 0.25, 1.05
HUGE_PAGES = {"forward": 1.2, "with gradient": 1.0}  # times as fast as the formula there
FLEX_MEAN, FLEX_LEAST = 0.85, 0.7
SECTIONS = ("forward", "gradient", "flex", "decode", "short")
# FlexAttention's time to compile is that of a first use: nothing is taken from a cache on disk.
VARIABLES = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}

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


def working_memory(call: Callable[[], Any]) -> float:
    """MiB that a call holds at most beside its inputs and its answers."""
    answers = call()
    kept = sum(t.nbytes for t in ((answers,) if isinstance(answers, Tensor) else answers))
    del answers
    held = peak_bytes(call, "cpu")
    if held is None:
        raise SystemExit("this system does not tell how much memory a process has held: run it on Linux")
    return (held - kept) / 2**20


def beside_formula(gradient: str, rounds: int) -> Iterator[dict[str, Any]]:
    for name, (tensors, keywords) in options().items():
        ours = call_of(attention, tensors, keywords, gradient)
        other = call_of(written_out, tensors, keywords, gradient)
        row: dict[str, Any] = {"option": name, "pass": gradient, **pair(ours, other, rounds)}
        mine, theirs = working_memory(ours), working_memory(other)
        yield row | {"mib": round(mine, 1), "other_mib": round(theirs, 1), "memory": round(mine / theirs, 3)}


def short(rounds: int) -> Iterator[dict[str, Any]]:
    for length in SHORTER:
        q, k, v = (torch.randn(1, HEADS, length, DIM) for _ in range(3))
        for causal in (False, True):
            found = pair(
                lambda q=q, k=k, v=v, c=causal: attention(q, k, v, causal=c),
                lambda q=q, k=k, v=v, c=causal: scaled_dot_product_attention(q, k, v, is_causal=c),
                rounds, 0.3,
            )  # fmt: skip
            yield {"length": length, "causal": causal, **found}


def measure(section: str, rounds: int) -> None:
    """Write each row of a section to standard output, a line of JSON."""
    import options_peers

    rows = {
        "forward": lambda: beside_formula("forward", rounds),
        "gradient": lambda: beside_formula("with gradient", rounds),
        "flex": lambda: options_peers.beside_flex(rounds),
        "decode": lambda: options_peers.decode(rounds),
        "short": lambda: short(rounds),
    }
    with torch.no_grad() if section in ("flex", "decode") else torch.enable_grad():
        for row in rows[section]():
            print(json.dumps(row), flush=True)


def measured(section: str, rounds: int, huge_pages: bool = False) -> list[dict[str, Any]]:
    """The rows of `measure` in a process of its own."""
    variables = {**os.environ, **MALLOC, **VARIABLES, "THP_MEM_ALLOC_ENABLE": str(int(huge_pages))}
    command = [sys.executable, __file__, "--rounds", str(rounds), "--measure", section]
    rows = []
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            print("huge pages" if huge_pages else "", line, end="", flush=True)
            rows.append(json.loads(line))
    if child.returncode:
        raise SystemExit(child.returncode)
    return rows


def rows_of(section: str, rounds: int, runs: int) -> list[dict[str, Any]]:
    """The rows of a section; of several runs the median of each number, and the ratio of each run."""
    every = [run_of(section, rounds) for _ in range(runs)]
    if runs == 1:
        return every[0]
    return [medians(rows) | {"runs": [row["times"] for row in rows]} for rows in zip(*every, strict=True)]


def medians(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One row from the same row of several runs."""
    found = dict(rows[0])
    for name, value in found.items():
        if isinstance(value, dict):
            found[name] = medians([row[name] for row in rows])
        elif isinstance(value, float):
            found[name] = median(row[name] for row in rows)
    return found


def run_of(section: str, rounds: int) -> list[dict[str, Any]]:
    rows = measured(section, rounds)
    if section in ("forward", "gradient"):
        for row, other in zip(rows, measured(section, rounds, True), strict=True):
            row["huge_pages"] = {name: other[name] for name in ("ms", "other_ms", "times")}
    return rows


def targets(rows: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the targets of the sections that were measured."""
    found = []
    for section, name in (("forward", "forward"), ("gradient", "with gradient")):
        if own := rows.get(section):
            least, huge = min(row["times"] for row in own), min(row["huge_pages"]["times"] for row in own)
            found += [
                target(f"{name}: over the formula, least", least, "times faster", least=FASTER),
                target(f"{name}: the same with huge pages", huge, "times faster", least=HUGE_PAGES[name]),
                target(f"{name}: memory / the formula's, most", max(row["memory"] for row in own), "size", most=MEMORY),
            ]
    if own := [row["times"] for row in rows.get("flex", []) if row["counted"]]:
        found += [
            target("FlexAttention's time / ours, geometric mean", geometric_mean(own), "time", least=FLEX_MEAN),
            target("FlexAttention's time / ours, least", min(own), "time", least=FLEX_LEAST),
        ]
    for row in rows.get("decode", []):
        found.append(
            target(f"torch's operator's time / ours, {row['decode']}", row["times"], "time", least=row["least"])
        )
    if own := [1 / row["times"] for row in rows.get("short", []) if row["length"] == LENGTH]:
        found.append(target("time / torch's own operator's at N 2048, most", max(own), "time", most=WITHIN))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=1, help="of which each number is the median")
    parser.add_argument("--only", choices=SECTIONS, help="measure these rows alone")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--measure", choices=SECTIONS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        measure(asked.measure, asked.rounds)
        return 0
    made = environment()
    file = asked.out / f"options-{file_name(made['device'])}.json"
    kept = json.loads(file.read_text()) if asked.only and file.exists() else {}
    rows, when = dict(kept.get("rows", {})), dict(kept.get("measured", {}))
    for section in (asked.only,) if asked.only else SECTIONS:
        when[section] = {name: environment()[name] for name in ("load_average", "commit", "date")}
        rows[section] = rows_of(section, asked.rounds, asked.runs)
    wanted = targets(rows)
    write(asked.out, "options", {"environment": made, "measured": when, "rows": rows, "targets": wanted})
    return 0 if all(t["met"] for t in wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
