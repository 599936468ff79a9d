"""Compare answers of the library in random calls with a reference: `python benchmarks/library_errors.py [one-row]`.

By default, the calls are those of the functions of flash_attn, of `scaled_dot_product_attention` and `flex_attention`:
each option alone and with others, in float32, float16 and bfloat16, with gradients where the function has them. The
reference is the formula in float64 on the same inputs (`formula`). An error is divided by the largest value of o, or of
dq, dk and dv together. A row counts all cases that use its option. Targets: 4e-6 in float32, 4e-3 in float16 and 0.03
in bfloat16. Writes library-errors-<cpu>.json, and takes a minute.

`one-row` counts rows whose bits depend on the call. The reference is a causal prefill with random options, dtypes and
sizes. Calls of 1, 2, 5, 17 and 64 queries compute its rows again, over the keys up to the last query, with another
sequence in the batch. As a control, torch's scaled_dot_product_attention does the same, and some of its rows must
differ. Target: 0 of a million rows differ. Writes one-row-<cpu>.json, and takes some minutes.
"""

from __future__ import annotations

import math
import random
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from options import mods
from runner import ROOT, Args, option, run, run_named, target
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask

from flashpoint_kernels import attention, flash_attn, flex_attention, native, scaled_dot_product_attention

sys.path.append(str(ROOT))

from tests.support.kernels.rotation import rotated

BOUNDS = {"float32": 4e-6, "float16": 4e-3, "bfloat16": 0.03}
SIZES = (1, 2, 3, 7, 16, 33, 64, 130, 200)
PAGE = 16
FAR = 1 << 30
# Parts of the names of the functions that take the last 1, 2 or 3 of q, k and v in one tensor.
PACKED = {1: "", 2: "kvpacked_", 3: "qkvpacked_"}
Sequences = list[Tensor]  # one tensor (rows, heads, D) for each sequence
Chosen = Mapping[str, Any]  # options by name, with their values
Call = Callable[[Sequences, Sequences, Sequences, Chosen], Sequences]
COUNTS = (1, 2, 5, 17, 64)  # number of queries of each call of `one_row`
LENGTHS = (40, 130, 300, 700, 1300)


def formula(q: Tensor, k: Tensor, v: Tensor, chosen: Chosen, b: int) -> Tensor:
    """Return o (Sq, H, D) of sequence b in float64; o is 0 for a query that sees no key."""
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(len(q) // len(t), 0) for t in (k, v))
    s = q @ k.mT * chosen.get("scale", 1 / math.sqrt(q.shape[2]))
    shift = 0 if chosen.get("top_left") else k.shape[1] - q.shape[1]
    ahead = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None] - shift
    if "softcap" in chosen:
        s = chosen["softcap"] * (s / chosen["softcap"]).tanh()
    if "alibi" in chosen:
        s = s - chosen["alibi"].double()[:, None, None] * ahead.abs()
    left, right = chosen.get("window", (-1, -1))
    right = 0 if "causal" in chosen else right
    hidden = (ahead > (right if right >= 0 else FAR)) | (ahead < -(left if left >= 0 else FAR))
    if "leftpad" in chosen:
        hidden = hidden | (torch.arange(k.shape[1]) < chosen["leftpad"][b])
    if (mask := chosen.get("mask")) is not None:
        mask = mask[b]
        hidden, s = (hidden | ~mask, s) if mask.dtype == torch.bool else (hidden, s + mask.double())
    s = s.masked_fill(hidden, -torch.inf)
    seen = ~hidden.expand_as(s).all(-1, keepdim=True)
    return (s.masked_fill(~seen, 0).softmax(-1) * seen @ v).transpose(0, 1)


def of_flash_attn(chosen: Chosen) -> dict[str, Any]:
    names = {"scale": "softmax_scale", "window": "window_size", "alibi": "alibi_slopes", "softcap": "softcap"}
    return {names[name]: value for name, value in chosen.items() if name in names} | {"causal": "causal" in chosen}


def batched(packed: int, q: Sequences, k: Sequences, v: Sequences, chosen: Chosen) -> Sequences:
    """Call flash_attn_func or its packed variant, in which the last `packed` of q, k and v are one tensor."""
    tensors = [torch.stack(t) for t in (q, k, v)]
    call = getattr(flash_attn, f"flash_attn_{PACKED[packed]}func")
    return list(call(*joined(tensors, packed, 2), **of_flash_attn(chosen)))


def ragged(packed: int, q: Sequences, k: Sequences, v: Sequences, chosen: Chosen) -> Sequences:
    """Call flash_attn_varlen_func or one of its packed variants."""
    tensors = [torch.cat(t) for t in (q, k, v)]
    sides = (q,) if packed == 3 else (q, k)
    starts = [torch.tensor([0, *map(len, rows)]).cumsum(0).int() for rows in sides]
    longest = [max(map(len, rows)) for rows in sides]
    call = getattr(flash_attn, f"flash_attn_varlen_{PACKED[packed]}func")
    o = call(*joined(tensors, packed, 1), *starts, *longest, **of_flash_attn(chosen))
    return [o[a:b] for a, b in pairwise(starts[0].tolist())]


def joined(tensors: list[Tensor], packed: int, dim: int) -> list[Tensor]:
    """Return q, k and v, of which the last `packed` are stacked in a new dimension `dim`."""
    return [*tensors[:-packed], torch.stack(tensors[-packed:], dim)] if packed > 1 else tensors


def cached(q: Sequences, k: Sequences, v: Sequences, chosen: Chosen) -> Sequences:
    """Call flash_attn_with_kvcache with a cache (k, v) of rows or pages; the call appends the last keys and values."""
    appended, lengths = chosen.get("append", 0), [len(t) - chosen.get("append", 0) for t in k]
    rows = -(-max(map(len, k)) // PAGE) * PAGE
    place = list(range(len(q)))[:: -1 if "batch_idx" in chosen else 1]
    caches = []
    for each in (k, v):
        cache = each[0].new_full((len(q), rows, *each[0].shape[1:]), torch.nan)
        for b, (t, n) in enumerate(zip(each, lengths, strict=True)):
            cache[place[b], :n] = t[:n]
        caches.append(cache)
    options: dict[str, Any] = of_flash_attn(chosen)
    if "batch_idx" in chosen:
        options["cache_batch_idx"] = torch.tensor(place, dtype=torch.int32)
    if "pages" in chosen:
        order = torch.randperm(len(q) * rows // PAGE, generator=torch.Generator().manual_seed(0))
        table = order.argsort().int().view(len(q), -1)
        caches = [t.flatten(0, 1).unflatten(0, (-1, PAGE))[order] for t in caches]
        options["block_table"] = table
    if appended:
        options |= {"k": torch.stack([t[-appended:] for t in k]), "v": torch.stack([t[-appended:] for t in v])}
    if "rotary" in chosen:
        cos, sin, interleaved = chosen["rotary"]
        options |= {"rotary_cos": cos.to(q[0]), "rotary_sin": sin.to(q[0]), "rotary_interleaved": interleaved}
    if "leftpad" in chosen:
        options["cache_leftpad"] = torch.tensor(chosen["leftpad"], dtype=torch.int32)
    filled = torch.tensor(lengths, dtype=torch.int32)
    return list(flash_attn.flash_attn_with_kvcache(torch.stack(q), *caches, cache_seqlens=filled, **options))


def sdpa(q: Sequences, k: Sequences, v: Sequences, chosen: Chosen) -> Sequences:
    tensors = [torch.stack(t).transpose(1, 2) for t in (q, k, v)]
    mask: Any = chosen.get("mask")
    if "causal" in chosen and not chosen.get("top_left"):
        with warnings.catch_warnings(action="ignore"):  # torch warns of NaN in its answer for more queries than keys
            mask = causal_lower_right(len(q[0]), len(k[0]))
    o = scaled_dot_product_attention(
        *tensors, mask, is_causal=bool(chosen.get("top_left")), scale=chosen.get("scale"), enable_gqa="heads" in chosen,
    )  # fmt: skip
    return list(o.transpose(1, 2))


def flex(q: Sequences, k: Sequences, v: Sequences, chosen: Chosen) -> Sequences:
    tensors = [torch.stack(t).transpose(1, 2) for t in (q, k, v)]
    names = {"alibi": "alibi_slopes", "mask": "attn_mask"}
    keywords = {names.get(name, name): value for name, value in chosen.items()}
    score_mod, mask_mod = mods(0 if chosen.get("top_left") else len(k[0]) - len(q[0]), **keywords)
    blocks = mask_mod and create_block_mask(mask_mod, None, None, len(q[0]), len(k[0]), "cpu")
    return list(flex_attention(*tensors, score_mod, blocks, chosen.get("scale"), "heads" in chosen).transpose(1, 2))


OF_ALL = ("none", "causal", "window", "softcap", "alibi", "scale", "heads")
FUNCTIONS: dict[str, tuple[Call, tuple[str, ...]]] = {
    "flash_attn_func": (partial(batched, 1), OF_ALL),
    "flash_attn_kvpacked_func": (partial(batched, 2), OF_ALL),
    "flash_attn_qkvpacked_func": (partial(batched, 3), OF_ALL[:-1]),
    "flash_attn_varlen_func": (partial(ragged, 1), OF_ALL),
    "flash_attn_varlen_kvpacked_func": (partial(ragged, 2), OF_ALL),
    "flash_attn_varlen_qkvpacked_func": (partial(ragged, 3), OF_ALL[:-1]),
    "flash_attn_with_kvcache": (cached, (*OF_ALL, "append", "rotary", "leftpad", "batch_idx", "pages")),
    "scaled_dot_product_attention": (sdpa, ("none", "causal", "top_left", "bool mask", "float mask", "scale", "heads")),
    "flex_attention": (flex, (*OF_ALL, "top_left", "float mask")),
}
# The names of the options in the interfaces of these functions.
SHOWN = {
    "alibi": "alibi_slopes", "window": "window_size", "scale": "softmax_scale", "heads": "fewer key heads",
    "append": "k, v", "leftpad": "cache_leftpad", "batch_idx": "cache_batch_idx", "pages": "block_table",
    "rotary": "rotary_cos, rotary_sin", "bool mask": "attn_mask, bool", "float mask": "attn_mask, float",
}  # fmt: skip
SHOWN_BY = {
    "scaled_dot_product_attention": {
        "causal": "causal_lower_right", "top_left": "is_causal", "heads": "enable_gqa", "scale": "scale",
    },
    "flex_attention": {
        "causal": "mask_mod: causal", "top_left": "mask_mod: the first key", "window": "mask_mod: a window",
        "softcap": "score_mod: softcap", "alibi": "score_mod: ALiBi", "float mask": "score_mod: captured bias",
        "heads": "enable_gqa", "scale": "scale",
    },
}  # fmt: skip


def possible(function: str, names: set[str]) -> bool:
    """Return whether one call of `function` may have all these options."""
    masks, diagonals = names & {"bool mask", "float mask"}, names & {"causal", "top_left"}
    both = function == "scaled_dot_product_attention" and masks and diagonals
    pages = "pages" in names and names & {"leftpad", "batch_idx"}
    return not (both or pages or len(masks) > 1 or len(diagonals) > 1)


def drawn(draw: random.Random, name: str, options: Sequence[str]) -> tuple[list[Sequences], dict[str, Any], set[str]]:
    """Draw a call: return q, k and v of the sequences, the options with their values, and the names of the options."""
    names = {draw.choice(options)}
    for more in draw.sample(options, draw.randint(0, 2)):
        if possible(name, names | {more}):
            names.add(more)
    names = names - {"none"} or {"none"}
    if "rotary" in names:
        names |= {"append", "causal"}
    numbers = torch.Generator().manual_seed(draw.getrandbits(32))
    one_length, batch, heads = "varlen" not in name, draw.randint(1, 3), draw.choice((1, 2, 4))
    of_keys, dim = 1 if "heads" in names else heads, draw.choice((16, 32, 40, 64, 128))
    lengths = [(draw.choice(SIZES), draw.choice(SIZES)) for _ in range(batch)]
    lengths = [lengths[0]] * batch if one_length else lengths
    if "qkvpacked" in name:
        lengths = [(keys, keys) for _, keys in lengths]
    if name == "flash_attn_with_kvcache":
        lengths = [(min(queries, 5), keys + 8) for queries, keys in lengths]
    tensors = [[torch.randn(queries, heads, dim, generator=numbers) for queries, _ in lengths]]
    tensors += [[torch.randn(keys, of_keys, dim, generator=numbers) for _, keys in lengths] for _ in range(2)]
    queries, keys = lengths[0]
    masks = {
        "bool mask": lambda: torch.rand(batch, heads, queries, keys, generator=numbers) > 0.3,
        "float mask": lambda: torch.randn(batch, heads, queries, keys, generator=numbers),
    }
    makers: dict[str, Callable[[], Any]] = {
        "causal": lambda: True, "top_left": lambda: True, "heads": lambda: True, "batch_idx": lambda: True,
        "pages": lambda: True, "window": lambda: (draw.randint(0, 40), draw.choice((-1, 0, 9))),
        "softcap": lambda: draw.choice((2.0, 30.0)), "scale": lambda: draw.choice((0.05, 0.3)),
        "alibi": lambda: torch.rand(heads, generator=numbers) / 4, "append": lambda: lengths[0][0],
        "leftpad": lambda: [draw.randint(0, 3) for _ in range(batch)],
        "rotary": lambda: (*rotary(dim, keys + 8, numbers), draw.random() < 0.5),
    }  # fmt: skip
    chosen = {each: makers[each]() for each in sorted(names - {"none"} - masks.keys())}
    if "top_left" in chosen:
        chosen["causal"] = True
    for mask in names & masks.keys():
        chosen["mask"] = masks[mask]()
    return tensors, chosen, names


def rotary(dim: int, positions: int, numbers: torch.Generator) -> tuple[Tensor, Tensor]:
    angle = torch.rand(positions, dim // 4, generator=numbers) * 2 * math.pi
    return angle.cos(), angle.sin()


def errors(name: str, call: Call, tensors: list[Sequences], chosen: Chosen, dtype: torch.dtype) -> dict[str, float]:
    """Return the largest errors of o and of the gradients, each divided by the largest value."""
    differentiates = name != "flash_attn_with_kvcache"
    leaves = [[t.to(dtype).requires_grad_(differentiates) for t in each] for each in tensors]
    exact = [[t.detach().double().requires_grad_(differentiates) for t in each] for each in leaves]
    if "rotary" in chosen:
        cos, sin, style = chosen["rotary"]
        cos, sin, new = cos.to(dtype), sin.to(dtype), chosen["append"]
        inputs = [[], [], exact[2]]
        for q, k in zip(exact[0], exact[1], strict=True):
            inputs[0].append(rotated(q, cos, sin, len(k) - new, style))
            inputs[1].append(torch.cat([k[:-new], rotated(k[-new:], cos, sin, len(k) - new, style)]))
    else:
        inputs = exact
    truth = [formula(q, k, v, chosen, b) for b, (q, k, v) in enumerate(zip(*inputs, strict=True))]
    answers = call(*leaves, chosen)
    relative_errors = {"o": relative_error(answers, truth)}
    if differentiates:
        do = [torch.randn(t.shape, generator=torch.Generator().manual_seed(1)).to(dtype) for t in answers]
        ours = torch.autograd.grad([*answers], [t for each in leaves for t in each], do)
        right = torch.autograd.grad(truth, [t for each in exact for t in each], [t.double() for t in do])
        # Divide by the largest value of all gradients: a single gradient may be 0 except for rounding.
        relative_errors["gradients"] = relative_error(ours, right)
    return relative_errors


def relative_error(answers: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """Return the largest error of `answers`, divided by the largest value of `truth` or by 1e-3 if that is larger."""
    largest_error = max(float((a.double() - b).detach().abs().max()) for a, b in zip(answers, truth, strict=True))
    return largest_error / max(1e-3, *(float(t.detach().abs().max()) for t in truth))


def library_errors(args: Args) -> dict[str, Any]:
    draw, rows, functions = random.Random(args.seed), [], []
    for name, (call, options) in FUNCTIONS.items():
        shown = SHOWN | SHOWN_BY.get(name, {})
        of_option: dict[str, dict[str, Any]] = {
            each: {"function": name, "option": shown.get(each, each), "cases": 0} for each in options
        }
        whole: dict[str, Any] = {"function": name, "options": [row["option"] for row in of_option.values()], "cases": 0}
        for _ in range(args.cases):
            tensors, chosen, names = drawn(draw, name, options)
            errors_by_type = {
                f"{what}, {dtype}": error
                for dtype in BOUNDS
                for what, error in errors(name, call, tensors, chosen, getattr(torch, dtype)).items()
            }
            for row in (whole, *(row for each, row in of_option.items() if each in names)):
                row["cases"] += len(BOUNDS)
                row |= {key: max(row.get(key, 0.0), error) for key, error in errors_by_type.items()}
        functions.append(whole)
        rows += of_option.values()
        print(name, *(f"{key} {value:.1e}" for key, value in whole.items() if isinstance(value, float)))
    worst = {
        dtype: max(v for row in functions for key, v in row.items() if key.endswith(f", {dtype}")) for dtype in BOUNDS
    }
    for row in (*functions, *rows):
        row |= {key: float(f"{value:.2g}") for key, value in row.items() if isinstance(value, float)}
    targets = [
        target(f"largest error, {dtype}", worst[dtype] * 1e6, "millionths", most=bound * 1e6)
        for dtype, bound in BOUNDS.items()
    ]
    return {"seed": args.seed, "functions": functions, "rows": rows, "targets": targets}


def drawn_prefill(draw: random.Random) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    """Return random tensors of one sequence, random options, and a description of the options."""
    kv_heads, group, length = draw.choice((1, 2, 4)), draw.choice((1, 2, 4)), draw.choice(LENGTHS)
    dim, dtype = draw.choice((16, 40, 64, 80, 128)), draw.choice((torch.float32, torch.float16, torch.bfloat16))
    numbers = torch.Generator().manual_seed(draw.getrandbits(32))
    shapes = {"q": kv_heads * group, "k": kv_heads, "v": kv_heads}
    t = {n: torch.randn(1, h, length, dim, generator=numbers).to(dtype) for n, h in shapes.items()}
    heads = kv_heads * group
    extra = draw.choice(("", "alibi_slopes", "sinks", "attn_mask", "bool mask"))
    if extra in ("alibi_slopes", "sinks"):
        t[extra] = torch.rand(heads, generator=numbers) / 16
    elif extra:
        mask = torch.randn(1, heads, length, length, generator=numbers)
        t["attn_mask"] = mask if extra == "attn_mask" else mask > -1
    options: dict[str, Any] = draw.choice(({}, {"window": (37, -1)}, {"softcap": 3.0}, {"scale": 0.3}))
    return t, options, f"{str(dtype)[6:]}, {heads}/{kv_heads} heads, N {length}, D {dim}, {extra or '–'}, {options}"


def beside(t: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    """Return the tensors of a call with the queries [start, stop), and with another sequence in the batch."""
    tensors = {"q": t["q"][:, :, start:stop], "k": t["k"][:, :, :stop], "v": t["v"][:, :, :stop]}
    if "attn_mask" in t:
        tensors["attn_mask"] = t["attn_mask"][..., start:stop, :stop]
    both = {name: torch.cat([x, x.flip(1)]) for name, x in tensors.items()}
    return both | {name: t[name] for name in t.keys() & {"alibi_slopes", "sinks"}}


def differing(solve: Callable[..., Tensor], t: dict[str, Tensor], count: int, **options: Any) -> tuple[int, int]:
    """Return the number of rows, and how many have other bits in calls of `count` queries than in one call of all."""
    whole, length, differing_rows = solve(**t, **options), t["q"].shape[2], 0
    for start in range(0, length, count):
        stop = min(start + count, length)
        answer = solve(**beside(t, start, stop), **options)[:1]
        differing_rows += int((answer != whole[:, :, start:stop]).any(-1).sum())
    return whole.shape[1] * length, differing_rows


def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Call torch's operator with a causal mask whose diagonal ends at the lower right, as in our attention."""
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=hidden, enable_gqa=True)


def one_row(args: Args) -> dict[str, Any]:
    draw, rows, wrong, problems = random.Random(args.seed), 0, 0, 0
    control_rows = control_wrong = 0
    failures: list[str] = []
    ours = partial(attention, causal=True, backend="cpu")
    with torch.inference_mode():
        while rows < args.rows:
            t, options, what = drawn_prefill(draw)
            for count in COUNTS:
                more, bad = differing(ours, t, count, **options)
                rows, wrong = rows + more, wrong + bad
                failures += [f"{bad} rows of {what}, calls of {count}"] if bad else []
            problems += 1
            if problems % 20 == 1:
                more, bad = differing(torchs, {name: t[name] for name in "qkv"}, 1)
                control_rows, control_wrong = control_rows + more, control_wrong + bad
    return {
        "seed": args.seed, "rows": rows, "differing": wrong, "problems": problems, "found": failures,
        "control": {"rows": control_rows, "differing": control_wrong}, "kernels": native.names(),
        "targets": [
            target("rows whose bits depend on the call", wrong, "rows", most=0),
            target("rows that the control finds", control_wrong, "rows", least=1),
        ],
    }  # fmt: skip


if __name__ == "__main__":
    cases, rows = option(150, "cases of each function"), option(1_000_000, "least number of rows to compare")
    run_named(
        library_errors=partial(run, library_errors, packages=("torch",), cases=cases, seed=option(0)),
        one_row=partial(run, one_row, packages=("torch",), rows=rows, seed=option(0)),
    )
