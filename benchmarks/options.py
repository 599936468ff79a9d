"""Compare each option alone with the formula, FlexAttention and torch's operator: `python benchmarks/options.py`.

At (1,8,2048,64) in float32 on the CPU, `flashpoint_kernels.attention` with `auto` alternates in one process with:

    forward, gradient   attention written out with its whole matrix, in plain torch operations and autograd
    flex                FlexAttention by torch.compile, where it has the option; needs a C++ compiler
    decode              torch's fused operator, one query of 8 sequences over 4,096 keys, in pages too
    plain               torch's fused operator without options: types, D, N, with and without the gradient
    flex_attention      our `flex_attention` beside torch's and beside the formula
    block_masks         `tiled` with a block mask beside `tiled` without one

`--only NAME` measures one section, in at most 7 minutes, and keeps the file's other sections. With `--runs N` each
figure is the median of N runs, and a row also has the ratio of every run. Targets: 0.85 of FlexAttention's speed in the
geometric mean, and at least 0.7; twice as fast as the formula, with a quarter of its memory, not counting inputs and
answers. Each row of `decode` has its own target, and `plain_bounds` has the targets of `plain`. With a block mask that
keeps 1/16 of the blocks, a call is six times as fast as without a mask.

Much of the formula's time is the system's allocation of new memory at each call. So the formula is timed in two
processes. With torch's defaults, our target is twice the formula's speed. With huge pages (THP_MEM_ALLOC_ENABLE=1), it
is 1.2 times the formula's speed for the forward, and the same speed with the gradient.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from itertools import product
from statistics import geometric_mean, median
from typing import Any

import torch
from record import machine_name
from runner import SERVICE, Args, apart, environment, option, pair, run, seconds, target
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.functional import scaled_dot_product_attention

from flashpoint_kernels import attention, attention_backward, create_block_mask, flex_attention, native
from flashpoint_kernels.timing.clock import peak_bytes

HEADS, LENGTH, DIM, DOCUMENT, KEYS = 8, 2048, 64, 256, 4096
DOCUMENTS = f"documents of {DOCUMENT}, causal (ours: ragged)"
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 4e-2}
ROUND = 0.15  # least seconds that each side of a comparison takes in a round
PASSES = ("forward", "with gradient")

Call = Callable[[], Any]
Mod = Callable[..., Tensor]
Row = dict[str, Any]


def options() -> Iterator[tuple[str, str, Row, Row]]:
    """Yield each option: its name, its peers, the arguments of a call, and the shapes and dtypes of q, k and v (`qkv`).

    The peers are `formula`, `flex` or both; `uncounted` is FlexAttention without a target.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    causal: Row = {"causal": True}
    slopes = {"alibi_slopes": torch.tensor([2.0 ** -(head + 1) for head in range(HEADS)])}
    both = "formula, flex"
    yield "no options", "flex", {}, {}
    yield "causal", "flex", causal, {}
    yield "window [256, 0], causal", both, causal | {"window": (256, 0)}, {}
    yield "window [1024, 1024]", both, {"window": (1024, 1024)}, {}
    yield "alibi_slopes, causal", both, causal | slopes, {}
    yield "softcap", both, {"softcap": 30.0}, {}
    yield "softcap, causal", both, causal | {"softcap": 30.0}, {}
    yield "sinks", "formula", {"sinks": normal(HEADS)}, {}
    yield "attn_mask, bool", both, {"attn_mask": torch.rand((LENGTH, LENGTH), generator=generator) < 0.8}, {}
    yield "attn_mask, float", both, {"attn_mask": normal(LENGTH, LENGTH)}, {}
    yield "attn_mask, float, with its gradient", "formula", {"attn_mask": normal(HEADS, LENGTH, LENGTH)}, {}
    yield "dropout_p 0.1", "formula", {"dropout_p": 0.1, "dropout_seed": 1}, {}
    yield "kv_lengths", "formula", {"kv_lengths": torch.tensor([1500])}, {}
    yield DOCUMENTS, "flex", {}, {}
    yield "Hk 2 (GQA)", "formula", {}, {"kv_heads": 2}
    yield "Hk 2 (GQA), causal", "flex", causal, {"kv_heads": 2}
    yield "Dv 128", "formula", {}, {"value_dim": 128}
    yield "float16", "formula", {}, {"dtype": torch.float16}
    yield "bfloat16, causal", "formula", causal, {"dtype": torch.bfloat16}
    yield "causal, N 512", "uncounted", causal, {"length": 512}
    yield "causal, bfloat16", "uncounted", causal, {"dtype": torch.bfloat16}
    yield "softcap, bfloat16", "uncounted", {"softcap": 30.0}, {"dtype": torch.bfloat16}


def qkv(
    length: int = LENGTH, kv_heads: int = HEADS, value_dim: int = DIM, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    shapes = (HEADS, DIM), (kv_heads, DIM), (kv_heads, value_dim)
    return [torch.randn(1, heads, length, dim).to(dtype) for heads, dim in shapes]


def call_of(
    attend: Callable[..., Any], tensors: Sequence[Tensor], keywords: Mapping[str, Any], gradient: str,
    captured: Sequence[Tensor] = (),
) -> Call:  # fmt: skip
    """Return a function that calls `attend` and, unless `gradient` is "forward", also differentiates it."""
    if gradient == "forward":
        return partial(attend, *tensors, **keywords)
    inputs = [t.clone().requires_grad_() for t in tensors]
    options = dict(keywords)
    for name, t in keywords.items():
        if name == "sinks" or (name == "attn_mask" and t.ndim == 3):
            options[name] = t.clone().requires_grad_()
    do = torch.ones(*tensors[0].shape[:-1], tensors[-1].shape[-1], dtype=tensors[0].dtype)
    leaves = [*inputs, *(t for t in options.values() if isinstance(t, Tensor) and t.requires_grad), *captured]
    return lambda: torch.autograd.grad(attend(*inputs, **options), leaves, do)


def written_out(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None, kv_lengths: Tensor | None = None, causal: bool = False,
    window: tuple[int, int] = (-1, -1), softcap: float = 0.0, dropout_p: float = 0.0, dropout_seed: int | None = None,
) -> Tensor:  # fmt: skip
    """Compute attention by the formula in float32 in plain torch operations, with the scores (B,Hq,Sq,Sk) in memory.

    The dropout mask comes from torch. It differs from the mask of our `attention`, and takes less time.
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


def memory(call: Call) -> int:
    """Return the peak memory in bytes that a call adds."""
    if (peak := peak_bytes(call, "cpu")) is None:
        raise RuntimeError("this system does not report a process's peak memory: run this benchmark on Linux")
    return peak


def working_memory(call: Call) -> float:
    """Return the peak memory of a call in MiB, not counting its inputs and answers."""
    answers = call()
    answer_bytes = sum(t.nbytes for t in ((answers,) if isinstance(answers, Tensor) else answers))
    del answers
    return (memory(call) - answer_bytes) / 2**20


def beside_formula(gradient: str, rounds: int) -> Iterator[Row]:
    for name, peers, keywords, sizes in options():
        if "formula" not in peers:
            continue
        tensors = qkv(**sizes)
        ours, other = (call_of(attend, tensors, keywords, gradient) for attend in (attention, written_out))
        row: Row = {"option": name, "pass": gradient, **pair(ours, other, rounds)}
        mine, theirs = working_memory(ours), working_memory(other)
        yield row | {"mib": round(mine, 1), "other_mib": round(theirs, 1), "memory": round(mine / theirs, 3)}


def mods(shift: int = 0, **keywords: Any) -> tuple[Mod | None, Mod | None]:
    """Return FlexAttention's score_mod and mask_mod for options of our `attention`; None for each that is not needed.

    `shift` is the number of keys minus the number of queries, or 0 if the first query sees only the first key.
    """
    mask, slopes, cap = (keywords.get(name) for name in ("attn_mask", "alibi_slopes", "softcap"))
    left, right = keywords.get("window", (-1, -1))
    right = 0 if keywords.get("causal") else right
    bias = mask if mask is not None and mask.is_floating_point() else None
    allowed = mask if bias is None else None

    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if cap:
            s = cap * torch.tanh(s / cap)
        if slopes is not None:
            s = s - slopes[h] * (i + shift - j).abs()
        return s if bias is None else s + bias[(b, h, i, j)[-bias.ndim :]]

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = [] if allowed is None else [allowed[(b, h, i, j)[-allowed.ndim :]]]
        if right >= 0:
            seen.append(j <= i + shift + right)
        if left >= 0:
            seen.append(j >= i + shift - left)
        return reduce(torch.logical_and, seen)

    scores, hides = cap or slopes is not None or bias is not None, allowed is not None or max(left, right) >= 0
    return score_mod if scores else None, mask_mod if hides else None


def compiled_flex(tensors: Sequence[Tensor], score_mod: Mod | None, mask_mod: Mod | None) -> Call:
    """Return a call of FlexAttention that is compiled at its first use."""
    torch.compiler.reset()
    q, k, _ = tensors
    lengths = q.shape[2], k.shape[2]
    blocks = None if mask_mod is None else torch_flex.create_block_mask(mask_mod, None, None, *lengths, device="cpu")
    keywords = {"score_mod": score_mod, "block_mask": blocks, "enable_gqa": q.shape[1] != k.shape[1]}
    return partial(torch.compile(torch_flex.flex_attention), *tensors, **keywords)


def documents() -> tuple[Call, Call]:
    """Return two calls with the same documents: ours with ragged sequences, and one of FlexAttention."""
    tensors, document = qkv(), torch.arange(LENGTH) // DOCUMENT

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (document[i] == document[j]) & (i >= j)

    ragged_qkv = [t[0].transpose(0, 1).contiguous() for t in tensors]
    starts = torch.arange(0, LENGTH + 1, DOCUMENT, dtype=torch.int32)
    ragged: Row = {"layout": "thd", "cu_seqlens_q": starts, "cu_seqlens_k": starts, "causal": True}
    return lambda: attention(*ragged_qkv, **ragged).transpose(0, 1)[None], compiled_flex(tensors, None, mask_mod)


def beside_flex(rounds: int) -> Iterator[Row]:
    """Yield a row for each option, compared with FlexAttention, whose first call compiles and is timed separately."""
    torch.manual_seed(0)
    for name, peers, keywords, sizes in options():
        if peers == "formula":
            continue
        if name == DOCUMENTS:
            ours, other = documents()
        else:
            tensors = qkv(**sizes)
            ours, other = partial(attention, *tensors, **keywords), compiled_flex(tensors, *mods(**keywords))
        compile_s = round(seconds(other), 2)
        check(name, ours(), other())
        counted = peers != "uncounted"
        yield {"option": name, "counted": counted, **pair(ours, other, rounds, ROUND), "compile_s": compile_s}


def check(name: str, ours: Tensor, theirs: Tensor) -> None:
    """Raise AssertionError if the two answers differ by more than rounding."""
    close = CLOSE[ours.dtype]
    torch.testing.assert_close(ours, theirs, atol=close, rtol=close, msg=lambda text: f"{name}: {text}")


def paged(k: Tensor, v: Tensor, size: int) -> Row:
    """Return the keys and values in pages of `size` keys, in random order."""
    batch, heads, length, _ = k.shape
    order = torch.randperm(batch * length // size)
    pools = (t.view(batch, heads, -1, size, t.shape[-1]).transpose(1, 2).flatten(0, 1) for t in (k, v))
    pool_k, pool_v = (pool[order].contiguous() for pool in pools)
    table = order.argsort().view(batch, -1).to(torch.int32)
    lengths = torch.full((batch,), length, dtype=torch.int32)
    return {"k": pool_k, "v": pool_v, "block_table": table, "kv_lengths": lengths}


def decode(rounds: int) -> Iterator[Row]:
    """Yield rows of one query of 8 sequences against 4,096 keys, compared with torch's operator with contiguous keys.

    Torch's operator reads grouped keys once for each query head. So it gets the heads of a group as queries.
    """
    torch.manual_seed(0)
    q, k, v = (torch.randn(8, 8, length, 64) for length in (1, KEYS, KEYS))
    torchs = partial(scaled_dot_product_attention, q, k, v)
    grouped = [torch.randn(8, heads, length, 128).bfloat16() for heads, length in ((32, 1), (8, KEYS), (8, KEYS))]
    folded = [grouped[0].view(8, 8, 4, 128), *grouped[1:]]
    rows: list[tuple[str, Call, Call, float]] = [
        ("(8,8,1,64), float32", partial(attention, q, k, v), torchs, 0.95),
        *(
            (f"(8,8,1,64), float32, pages of {size:,}", partial(attention, q, **paged(k, v, size)), torchs, least)
            for size, least in ((1024, 0.95), (16, 0.35))
        ),
        (
            "(8,32,1,128), 8 key heads, bfloat16", partial(attention, *grouped),
            lambda: scaled_dot_product_attention(*folded).view(8, 32, 1, 128), 0.95,
        ),
    ]  # fmt: skip
    for name, ours, other, least in rows:
        check(name, ours(), other())
        yield {"decode": name, **pair(ours, other, rounds, ROUND), "least": least}


def plain(rounds: int) -> Iterator[Row]:
    """Yield rows of (1,8,N,D) without options, compared with torch's operator."""
    kinds = product(PASSES, ("float32", "float16", "bfloat16"), (64, 128), (128, 512, LENGTH), (False, True))
    for gradient, dtype, dim, length, causal in kinds:
        tensors = [torch.randn(1, HEADS, length, dim, dtype=getattr(torch, dtype)) for _ in range(3)]
        ours = call_of(attention, tensors, {"causal": causal}, gradient)
        other = call_of(scaled_dot_product_attention, tensors, {"is_causal": causal}, gradient)
        yield {
            "pass": gradient, "dtype": dtype, "head_dim": dim, "length": length, "causal": causal,
            "kernel": native.names().get(dtype), **pair(ours, other, rounds, 0.1),
        }  # fmt: skip


def flex_kinds() -> Iterator[tuple[str, Row, Sequence[Tensor]]]:
    """Yield the name, the arguments of `flex_attention` and the captured tensors of each kind of call."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(HEADS, 2 * LENGTH, generator=generator, requires_grad=True)
    gain = torch.rand(HEADS, generator=generator, requires_grad=True)
    blocks = torch_flex.create_block_mask(mods(causal=True, window=(255, 0))[1], None, None, LENGTH, LENGTH, "cpu")
    yield "a sigmoid of scores", {"score_mod": lambda s, b, h, i, j: 4 * torch.sigmoid(s)}, ()
    yield "a table of distances", {"score_mod": lambda s, b, h, i, j: s + table[h, i - j + LENGTH]}, (table,)
    by_head = {"score_mod": lambda s, b, h, i, j: s * gain[h]}
    yield "a gain of each head", by_head, (gain,)
    yield "the same in a causal window", by_head | {"block_mask": blocks}, (gain,)


def flex_written_out(q: Tensor, k: Tensor, v: Tensor, score_mod: Mod, block_mask: Any = None) -> Tensor:
    """Compute attention by the formula with a score_mod, with the scores (B,H,Sq,Sk) in memory."""
    s = q @ k.mT / math.sqrt(q.shape[-1])
    numbers = [torch.arange(n).view([-1 if axis == d else 1 for d in range(4)]) for axis, n in enumerate(s.shape)]
    s = score_mod(s, *numbers)
    if block_mask is not None:
        s = s.masked_fill(~block_mask.mask_mod(*numbers), -torch.inf)
    return torch.softmax(s, -1) @ v


def beside_eager_flex(rounds: int) -> Iterator[Row]:
    """Yield our `flex_attention` with score_mods that no option covers.

    The forward is compared with torch's flex_attention without torch.compile, which has no gradient on the CPU. The
    gradient, including that of captured tensors, is compared with the formula, also in its memory.
    """
    tensors = torch.randn(3, 1, HEADS, LENGTH, DIM, generator=torch.Generator().manual_seed(1)).unbind()
    for name, keywords, captured in flex_kinds():
        forwards = [partial(attend, *tensors, **keywords) for attend in (flex_attention, torch_flex.flex_attention)]
        with torch.no_grad():
            times = pair(*forwards, rounds)
        yield {"kind": name, "pass": "forward", **times}
        ours, other = (
            call_of(attend, tensors, keywords, PASSES[1], captured) for attend in (flex_attention, flex_written_out)
        )
        row: Row = {"kind": name, "pass": "with gradient", **pair(ours, other, rounds)}
        yield row | {"mib": memory(ours) >> 20, "other_mib": memory(other) >> 20}


def block_masks(rounds: int) -> Iterator[Row]:
    """Yield rows of `tiled` with a block mask beside `tiled` without one: the forward, and the gradients alone."""
    generator = torch.Generator().manual_seed(0)
    document, blocks = torch.arange(LENGTH) // 300, (HEADS, LENGTH // 128, LENGTH // 128)
    documents = create_block_mask(lambda b, h, i, j: document[i] == document[j], q_len=LENGTH, kv_len=LENGTH)
    masks = {
        "1/16 of the blocks, of each head": torch.rand(blocks, generator=generator) < 1 / 16,
        "half of the blocks, of each head": torch.rand(blocks, generator=generator) < 1 / 2,
        "documents of 300 tokens": documents,
    }
    q, k, v, do = torch.randn(4, 1, HEADS, LENGTH, DIM, generator=generator).unbind()
    for name, mask in masks.items():
        both = [{"block_mask": each, "backend": "tiled"} for each in (mask, None)]
        forwards = [partial(attention, q, k, v, **options) for options in both]
        gradients = [
            partial(attention_backward, do, q, k, v, *call(return_lse=True), **options)
            for call, options in zip(forwards, both, strict=True)
        ]
        for direction, calls in (("forward", forwards), ("gradient", gradients)):
            row: Row = {"mask": name, "share": round(float(mask.float().mean()), 4), "pass": direction}
            yield row | pair(*calls, rounds)


def sections() -> Mapping[str, Callable[[int], Iterator[Row]]]:
    forward, gradient = (partial(beside_formula, name) for name in PASSES)
    flex, without_gradient = torch.no_grad()(beside_flex), torch.no_grad()(decode)
    return {
        "forward": forward, "gradient": gradient, "flex": flex, "decode": without_gradient, "plain": plain,
        "flex_attention": beside_eager_flex, "block_masks": block_masks,
    }  # fmt: skip


def measured(section: str, rounds: int, huge_pages: bool = False) -> list[Row]:
    """Return the rows of a section, measured in a separate process.

    FlexAttention's cache on disk is disabled, so that its compile time is that of its first use.
    """
    variables = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "THP_MEM_ALLOC_ENABLE": str(int(huge_pages))}
    with apart(sections, **variables) as ask:
        return list(ask(section, rounds))


def rows_of(section: str, rounds: int, runs: int) -> list[Row]:
    """Return the rows of a section; with several runs, each figure is a median, and a row has the ratio of each run."""
    every = [run_of(section, rounds) for _ in range(runs)]
    if runs == 1:
        return every[0]
    return [merged(rows) | {"runs": [row["times"] for row in rows]} for rows in zip(*every, strict=True)]


def merged(rows: Sequence[Row]) -> Row:
    """Return one row with the medians of the same row from several runs."""

    def of_all(values: Sequence[Any]) -> Any:
        if isinstance(values[0], dict):
            return merged(values)
        return median(values) if isinstance(values[0], float) else values[0]

    return {name: of_all([row[name] for row in rows]) for name in rows[0]}


def run_of(section: str, rounds: int) -> list[Row]:
    rows = measured(section, rounds)
    if section in ("forward", "gradient"):
        for row, other in zip(rows, measured(section, rounds, True), strict=True):
            row["huge_pages"] = {name: other[name] for name in ("ms", "other_ms", "times")}
    return rows


def targets(rows: Mapping[str, list[Row]]) -> list[Row]:
    """Return the targets of the sections that were measured."""
    made = []

    def bound(what: str, of: Any, values: list[float], unit: str = "time", **limit: float) -> None:
        if values:
            made.append(target(what, of(values), unit, **limit))

    for section, name, huge_pages in (("forward", "forward", 1.2), ("gradient", "with gradient", 1.0)):
        each = rows.get(section, [])
        faster, huge = [row["times"] for row in each], [row["huge_pages"]["times"] for row in each]
        bound(f"{name}: over the formula, least", min, faster, "times faster", least=2.0)
        bound(f"{name}: the same with huge pages", min, huge, "times faster", least=huge_pages)
        bound(f"{name}: memory / the formula's, most", max, [row["memory"] for row in each], "size", most=0.25)
    beside_flex = [row["times"] for row in rows.get("flex", []) if row["counted"]]
    bound("FlexAttention's time / ours, geometric mean", geometric_mean, beside_flex, least=0.85)
    bound("FlexAttention's time / ours, least", min, beside_flex, least=0.7)
    for row in rows.get("decode", []):
        bound(f"torch's operator's time / ours, {row['decode']}", min, [row["times"]], least=row["least"])
    plain = rows.get("plain", [])
    for what, kind, least in plain_bounds(any(row["kernel"] == "c-amx" for row in plain)):
        times = [row["times"] for row in plain if all(row[name] == value for name, value in kind.items())]
        bound(f"SDPA's time / ours, {what}, least", min, times, least=least)
    if not any(row["kernel"] == "c-amx" for row in plain):
        for gradient, most in (("forward", 1.05), ("with gradient", 1.1)):
            ms = {tuple(row[name] for name in ("dtype", "head_dim", "causal")): row["ms"] for row in plain
                  if (row["pass"], row["length"]) == (gradient, 2048)}  # fmt: skip
            over = [ms["bfloat16", *kind] / ms["float32", *kind] for dtype, *kind in ms if dtype == "bfloat16"]
            bound(f"bfloat16's time / float32's, N 2048 {gradient}, most", max, over, most=most)
    for gradient, other in zip(PASSES, ("torch's flex_attention, not compiled", "the formula"), strict=True):
        times = [row["times"] for row in rows.get("flex_attention", []) if row["pass"] == gradient]
        bound(f"flex_attention {gradient}: {other}'s time / ours, least", min, times, least=1.0)
    for row in rows.get("block_masks", []):
        if row["share"] < 0.1:
            bound(f"{row['pass']} without / with {row['mask']}", min, [row["times"]], "times faster", least=6.0)
    return made


def plain_bounds(amx: bool) -> Iterator[tuple[str, Row, float]]:
    """Yield each target of the section `plain`: its name, the rows that it applies to, and the least ratio."""
    for dtype in ("float32", "float16"):
        for length, causal, least, with_amx in (
            (2048, False, 1.0, 1.08), (2048, True, 1.2, 1.3), (512, False, 1.0, 1.05), (128, False, 0.9, 0.95),
        ):  # fmt: skip
            kind = {"pass": "forward", "dtype": dtype, "length": length, "causal": causal}
            yield f"{dtype} N {length}{' causal' * causal}", kind, with_amx if amx else least
    forward: Row = {"pass": "forward", "dtype": "bfloat16"}
    for dim, length, least in ((64, 512, 1.2), (64, 128, 1.0), (128, 512, 1.05), (128, 128, 0.8)):
        yield f"bfloat16 N {length} D {dim}", {**forward, "length": length, "head_dim": dim, "causal": False}, least
    gradient: Row = {"pass": "with gradient", "length": 2048}
    if amx:
        yield "bfloat16 N 2048", {**forward, "length": 2048, "causal": False}, 1.4
        yield "bfloat16 N 2048 causal", {**forward, "length": 2048, "causal": True}, 1.6
    yield "float32 N 2048 with gradient", {**gradient, "dtype": "float32"}, 1.1
    if amx:
        yield "bfloat16 N 2048 with gradient", {**gradient, "dtype": "bfloat16"}, 1.8


def measure(args: Args) -> dict[str, Any]:
    machine = environment(*SERVICE)
    file = args.out / f"options-{machine_name(machine)}.json"
    recorded = json.loads(file.read_text()) if args.only and file.exists() else {}
    rows, when = dict(recorded.get("rows", {})), dict(recorded.get("measured", {}))
    for section in (args.only,) if args.only else sections():
        when[section] = {name: environment()[name] for name in ("load_average", "commit", "date")}
        rows[section] = rows_of(section, args.rounds, args.runs)
    return {"measured": when, "rows": rows, "targets": targets(rows)}


if __name__ == "__main__":
    run(
        measure,
        "options",
        rounds=option(5),
        runs=option(1, "number of runs; each number is their median"),
        only=option(None, "measure only this section", choices=sections()),
    )
