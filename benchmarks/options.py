"""Time each option alone, beside the formula, FlexAttention and torch's operator: `python benchmarks/options.py`.

At (1,8,2048,64) in float32 on the CPU, `flashpoint_kernels.attention` with `auto` alternates in one process with:

    forward, gradient   attention written out with its whole matrix, in plain torch operations and autograd
    flex                FlexAttention by torch.compile, where it has the option (options_peers.py); needs a C++ compiler
    decode              torch's fused operator, one query of 8 sequences over 4,096 keys, in pages too
    plain               torch's fused operator without options: types, D, N, with and without the gradient
    flex_attention      our `flex_attention` beside torch's and beside the formula (options_flex.py)

`--only NAME` measures one section, in at most 7 minutes, and keeps the file's other sections. With `--runs N` the
numbers are medians of N runs, and a row also has the ratio of every run. Targets: 0.85 of FlexAttention's speed in the
geometric mean, 0.7 at least; twice as fast as the formula, in a quarter of its memory beyond inputs and answers; for
decode the target of each row; without options those of options_plain.py.

The system spends much of the formula's time on memory that is new at each call. So the formula is timed in two
processes: with torch's defaults, where the target is twice as fast, and with huge pages (THP_MEM_ALLOC_ENABLE=1), where
the target is 1.2 times as fast forward, and as fast with the gradient. Writes benchmarks/results/options-<cpu>.json.
Exits with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from statistics import geometric_mean, median
from typing import Any

import options_flex
import options_plain
import torch
from record import file_name
from runner import SERVICE, Option, environment, pair, rows_of_child, run, target
from torch import Tensor

from flashpoint_kernels import attention
from flashpoint_kernels.timing.clock import peak_bytes

HEADS, LENGTH, DIM = 8, 2048, 64
FASTER, MEMORY = 2.0, 0.25
HUGE_PAGES = {"forward": 1.2, "with gradient": 1.0}  # target: times as fast as the formula with huge pages
FLEX_MEAN, FLEX_LEAST = 0.85, 0.7
SECTIONS = ("forward", "gradient", "flex", "decode", "plain", "flex_attention")
# No cache on disk, so that FlexAttention's time to compile is that of a first use.
VARIABLES = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}

Tensors = dict[str, Tensor]


def written_out(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None, kv_lengths: Tensor | None = None, causal: bool = False,
    window: tuple[int, int] = (-1, -1), softcap: float = 0.0, dropout_p: float = 0.0, dropout_seed: int | None = None,
) -> Tensor:  # fmt: skip
    """Return attention by the contract's formula, with s (B,Hq,Sq,Sk) in memory, in float32.

    The mask of dropout is torch's here. It differs from the contract's, and is cheaper.
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
    """Return each option's tensors and keywords by name; some names are data types or shapes."""
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
    """Return a call of the forward, or of it and the gradient of q, k, v, sinks and a float mask for each head."""
    inputs = dict(tensors)
    leaves = []
    for name, t in tensors.items():
        wanted = name in "qkv" or name == "sinks" or (name == "attn_mask" and t.ndim == 3)
        if gradient == "with gradient" and wanted and t.is_floating_point():
            inputs[name] = t.clone().requires_grad_()
            leaves.append(inputs[name])
    do = torch.ones(1, HEADS, LENGTH, tensors["v"].shape[-1], dtype=tensors["q"].dtype)

    def call() -> Any:
        o = attend(**inputs, **keywords)
        return torch.autograd.grad(o, leaves, do[:, :, : o.shape[2]]) if leaves else o

    return call


def working_memory(call: Callable[[], Any]) -> float:
    """Return the peak memory of a call in MiB, without its inputs and its answers."""
    answers = call()
    answer_bytes = sum(t.nbytes for t in ((answers,) if isinstance(answers, Tensor) else answers))
    del answers
    peak = peak_bytes(call, "cpu")
    if peak is None:
        raise SystemExit("this system does not report a process's peak memory: run this benchmark on Linux")
    return (peak - answer_bytes) / 2**20


def beside_formula(gradient: str, rounds: int) -> Iterator[dict[str, Any]]:
    for name, (tensors, keywords) in options().items():
        ours = call_of(attention, tensors, keywords, gradient)
        other = call_of(written_out, tensors, keywords, gradient)
        row: dict[str, Any] = {"option": name, "pass": gradient, **pair(ours, other, rounds)}
        mine, theirs = working_memory(ours), working_memory(other)
        yield row | {"mib": round(mine, 1), "other_mib": round(theirs, 1), "memory": round(mine / theirs, 3)}


def rows_here(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield each row of the section `asked.measure`."""
    import options_peers

    rows: dict[str, Callable[[int], Iterator[dict[str, Any]]]] = {
        "forward": partial(beside_formula, "forward"),
        "gradient": partial(beside_formula, "with gradient"),
        "flex": options_peers.beside_flex,
        "decode": options_peers.decode,
        "plain": options_plain.rows,
        "flex_attention": options_flex.rows,
    }
    with torch.no_grad() if args.measure in ("flex", "decode") else torch.enable_grad():
        yield from rows[args.measure](args.rounds)


def measured(section: str, rounds: int, huge_pages: bool = False) -> list[dict[str, Any]]:
    """Return the rows of a section, measured in a separate process."""
    variables = {**VARIABLES, "THP_MEM_ALLOC_ENABLE": str(int(huge_pages))}
    return list(rows_of_child("--rounds", str(rounds), "--measure", section, **variables))


def rows_of(section: str, rounds: int, runs: int) -> list[dict[str, Any]]:
    """Return the rows of a section; for several runs, the median of each number and the ratio of each run."""
    every = [run_of(section, rounds) for _ in range(runs)]
    if runs == 1:
        return every[0]
    return [medians(rows) | {"runs": [row["times"] for row in rows]} for rows in zip(*every, strict=True)]


def medians(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one row with the medians of the same row in several runs."""
    merged = dict(rows[0])
    for name, value in merged.items():
        if isinstance(value, dict):
            merged[name] = medians([row[name] for row in rows])
        elif isinstance(value, float):
            merged[name] = median(row[name] for row in rows)
    return merged


def run_of(section: str, rounds: int) -> list[dict[str, Any]]:
    rows = measured(section, rounds)
    if section in ("forward", "gradient"):
        for row, other in zip(rows, measured(section, rounds, True), strict=True):
            row["huge_pages"] = {name: other[name] for name in ("ms", "other_ms", "times")}
    return rows


def targets(rows: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the targets of the sections that were measured."""
    made = []
    for section, name in (("forward", "forward"), ("gradient", "with gradient")):
        if section_rows := rows.get(section):
            least, huge = (
                min(row["times"] for row in section_rows),
                min(row["huge_pages"]["times"] for row in section_rows),
            )
            made += [
                target(f"{name}: over the formula, least", least, "times faster", least=FASTER),
                target(f"{name}: the same with huge pages", huge, "times faster", least=HUGE_PAGES[name]),
                target(
                    f"{name}: memory / the formula's, most",
                    max(row["memory"] for row in section_rows),
                    "size",
                    most=MEMORY,
                ),
            ]
    if section_rows := [row["times"] for row in rows.get("flex", []) if row["counted"]]:
        made += [
            target(
                "FlexAttention's time / ours, geometric mean", geometric_mean(section_rows), "time", least=FLEX_MEAN
            ),
            target("FlexAttention's time / ours, least", min(section_rows), "time", least=FLEX_LEAST),
        ]
    for row in rows.get("decode", []):
        made.append(
            target(f"torch's operator's time / ours, {row['decode']}", row["times"], "time", least=row["least"])
        )
    return made + options_plain.targets(rows.get("plain", [])) + options_flex.targets(rows.get("flex_attention", []))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    machine = environment(*SERVICE)
    file = args.out / f"options-{file_name(machine['device'])}.json"
    recorded = json.loads(file.read_text()) if args.only and file.exists() else {}
    rows, when = dict(recorded.get("rows", {})), dict(recorded.get("measured", {}))
    for section in (args.only,) if args.only else SECTIONS:
        when[section] = {name: environment()[name] for name in ("load_average", "commit", "date")}
        rows[section] = rows_of(section, args.rounds, args.runs)
    return {"measured": when, "rows": rows, "targets": targets(rows)}


if __name__ == "__main__":
    run(
        measure,
        "options",
        child=rows_here,
        rounds=Option(5),
        runs=Option(1, "number of runs; each number is their median"),
        only=Option(None, "measure only this section", choices=SECTIONS),
    )
